"""Tables that several parts of the policy reference have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muxk.policies.markdown import code, table
from muxk.policies.names import ASKED
from muxk.policies.operators import BUILTINS
from muxk.policies.reference_names import groups_of

Schema = Mapping[str, Any]


def keys_of(shape: Schema, defaults: Mapping[str, str] | None = None) -> str:
    """A table of the keys of a mapping."""
    shape = shape.get("then", shape) if "properties" not in shape else shape
    needed = shape.get("required", ())
    said = defaults or {}
    rows = [
        (code(key), "yes" if key in needed else "", each.get("description", ""), said.get(key, ""))
        for key, each in shape["properties"].items()
    ]
    return table(("key", "needed", "what it is", "default"), rows)


def groups_known(point: str) -> list[str]:
    """Groups of names that the conditions or the answers of a point know."""
    places = [place for place in (point, f"a key of {point}") if place in ASKED]
    return list(dict.fromkeys(title for place in places for title in groups_of(place)))


def builtins_table() -> str:
    """Functions that can be called everywhere."""
    rows = [
        (code(name), _count(each.least, each.most), ", ".join(each.types), each.about)
        for name, each in BUILTINS.items()
    ]
    return table(("function", "arguments", "of type", "gives"), rows)


def _count(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
