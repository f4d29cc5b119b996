"""The policies that come with muxk, as providers: entry points of pyproject.toml name them one by one."""

from __future__ import annotations

from muxk.policies.api import YamlPolicy

_HERE = "muxk.policies"

chunked = YamlPolicy(_HERE, "chunked.yaml", api_version=1)
inflight = YamlPolicy(_HERE, "inflight.yaml", api_version=1)
loongserve = YamlPolicy(_HERE, "loongserve.yaml", api_version=1)
muxwise = YamlPolicy(_HERE, "muxwise.yaml", api_version=1)
splitwise = YamlPolicy(_HERE, "splitwise.yaml", api_version=1)
static_split = YamlPolicy(_HERE, "static_split.yaml", api_version=1)
temporal = YamlPolicy(_HERE, "temporal.yaml", api_version=1)
