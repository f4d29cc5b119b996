"""The policies that documents show are policies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from muxk.policies.engine import compile_policy

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (name, block)
    for name in ("README.md", "docs/policy-language.md")
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_documented_policy_compiles(name: str, block: str) -> None:
    assert compile_policy(block, name).name == "mine"
