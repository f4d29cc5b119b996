"""The files of the policies that come with muxk."""

from __future__ import annotations

from importlib import resources

DEFAULTS = "defaults"
"""What every policy extends in the end; not one to run."""


def shipped_policies() -> tuple[str, ...]:
    """Names of the policies that come with muxk."""
    files = resources.files("muxk.policies").iterdir()
    names = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return tuple(name for name in names if name != DEFAULTS and not name.endswith(".test"))


def shipped_text(name: str) -> str:
    """The text of one of them, or of the defaults."""
    return resources.files("muxk.policies").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
