"""One constant of a simulated card moved by a factor: what a result depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from muxk.profiles.gpu import GpuProfile

NOT_MOVED = ("version", "name", "card", "held_out", "source", "assumed", "grid", "noise")
SHARES = ("efficiency", "bandwidth_efficiency", "wave_weight")
"""Never above 1."""


class NoSuchConstant(ValueError):
    """The text says which, and what there is."""


def assumed_constants(profile: GpuProfile) -> tuple[str, ...]:
    """Names `group.constant` of all that no table was fitted for; alike ones of a group are one."""
    found: dict[str, None] = {}
    for group, content in msgspec.to_builtins(profile).items():
        if group not in NOT_MOVED and isinstance(content, dict) and content["assumed"]:
            found.update(dict.fromkeys(f"{group}.{name}" for name in _leaves(content)))
    return tuple(found)


def _leaves(content: Any) -> Iterator[str]:
    for name, value in content.items():
        if name in NOT_MOVED:
            continue
        if isinstance(value, dict):
            yield from _leaves(value)
        elif isinstance(value, float | int) and value:
            yield name


def scaled(profile: GpuProfile, constant: str, factor: float) -> GpuProfile:
    """The card with this constant times the factor. Raises NoSuchConstant."""
    group, _, name = constant.partition(".")
    content = msgspec.to_builtins(profile)
    if group in NOT_MOVED or not isinstance(content.get(group), dict) or name not in _leaves(content[group]):
        known = ", ".join(assumed_constants(profile))
        raise NoSuchConstant(f"no constant {constant!r} of {profile.name}; assumed ones are {known}")
    content[group] = _scaled(content[group], name, factor)
    return msgspec.convert(content, GpuProfile, strict=False)


def _scaled(content: Any, name: str, factor: float) -> Any:
    if not isinstance(content, dict):
        return content
    return {
        key: _moved(value, name, factor) if key == name else _scaled(value, name, factor)
        for key, value in content.items()
    }


def _moved(value: float | int, name: str, factor: float) -> float | int:
    moved = value * factor
    if name in SHARES:
        moved = min(1.0, moved)
    return round(moved) if isinstance(value, int) else moved
