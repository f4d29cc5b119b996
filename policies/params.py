"""Params of a policy: typed values with a default and bounds, which `--set name=value` overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar, describe, whole
from muxk.policies.problems import Report, Source, did_you_mean, one_of
from muxk.policies.units import Type, UnitError, parse_quantity, unit_hint

TYPES: Mapping[str, Type] = {
    "number": Type.NUMBER,
    "duration": Type.DURATION,
    "size": Type.SIZE,
    "percent": Type.PERCENT,
    "bool": Type.BOOL,
}
PARAM: Mapping[str, str] = {"type": "", "default": "", "min": "", "max": "", "description": ""}
_BOOLS: Mapping[str, bool] = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Param:
    """A param with the value in force."""

    name: str
    type: Type
    value: int | float | bool
    description: str = ""


def read_params(node: Node | None, settings: Mapping[str, str], report: Report) -> list[Param]:
    """Params of a policy under settings; unknown settings are reported."""
    entries = node.entries if isinstance(node, MappingNode) else ()
    if node is not None and not isinstance(node, MappingNode):
        report.add(node.mark, f"params must be a mapping, not {describe(node)}")
    known = [entry.key.text for entry in entries]
    for name, text in settings.items():
        if name not in known:
            listed = f"params of this policy: {', '.join(known)}" if known else "this policy has no params"
            source = Source("--set", f"{name}={text}".replace("\n", " "))
            report.add(
                source.mark(0),
                f"unknown param '{name[:40]}'",
                did_you_mean(name, known, listed),
                "unknown-name",
            )
    params = (_param(entry.key, entry.value, settings.get(entry.key.text), report) for entry in entries)
    return [param for param in params if param is not None]


def _param(key: Scalar, node: Node, setting: str | None, report: Report) -> Param | None:
    name = key.text
    if not name.isidentifier() or not name.isascii():
        report.add(key.mark, f"a param's name must be letters, digits and '_', not '{name[:40]}'")
        return None
    found = fields(node, PARAM, f"param '{name}'", report)
    type_node, default = found.get("type"), found.get("default")
    if not isinstance(type_node, Scalar) or type_node.text not in TYPES:
        mark = type_node.mark if type_node is not None else node.mark
        written = type_node.text if isinstance(type_node, Scalar) else ""
        report.add(mark, f"param '{name}' needs a type: {one_of(TYPES)}", did_you_mean(written, TYPES))
        return None
    if default is None:
        report.add(node.mark, f"param '{name}' needs a default", code="missing-key")
        return None
    kind = type_node.text
    low, high = (_value(found.get(bound), kind, report) for bound in ("min", "max"))
    words = tuple(
        each.text if isinstance(each, Scalar) else "" for each in (found.get("min"), found.get("max"))
    )
    value = _bounded(default, _value(default, kind, report), (low, high), words, report)
    if setting is not None:
        scalar = whole(Source("--set", f"{name}={setting}".replace("\n", " ")), setting.replace("\n", " "))
        value = _bounded(scalar, _value(scalar, kind, report), (low, high), words, report)
    return Param(name, TYPES[kind], value if value is not None else 1, _description(found, report))


def _description(found: Mapping[str, Node], report: Report) -> str:
    node = found.get("description")
    if isinstance(node, Scalar):
        return node.text
    if node is not None:
        report.add(node.mark, "a description is a text")
    return ""


def _value(node: Node | None, kind: str, report: Report) -> int | float | bool | None:
    if node is None:
        return None
    if not isinstance(node, Scalar):
        report.add(node.mark, f"a {kind} is expected, not {describe(node)}")
        return None
    if kind == "bool":
        if node.text not in _BOOLS:
            report.add(node.mark, f"true or false is expected, not {describe(node)}")
        return _BOOLS.get(node.text)
    return _quantity(node, kind, report)


def _quantity(node: Scalar, kind: str, report: Report) -> int | float | None:
    text = node.text.strip()
    sign = -1 if text.startswith("-") else 1
    try:
        quantity = parse_quantity(text.removeprefix("-"))
    except UnitError as error:
        report.add(node.mark, str(error), error.hint)
        return None
    if quantity.type is not TYPES[kind]:
        hint = f"write {text[:20]}%" if kind == "percent" else unit_hint(TYPES[kind], quantity.type)
        report.add(node.mark, f"{TYPES[kind].phrase} is expected, not '{text[:40]}'", hint, "wrong-type")
        return None
    return sign * quantity.value


def _bounded(
    node: Node,
    value: float | bool | None,
    bounds: tuple[float | bool | None, float | bool | None],
    words: tuple[str, ...],
    report: Report,
) -> float | bool | None:
    """The value; notes one out of bounds, with the bound as the policy has it."""
    low, high = bounds
    if value is not None and low is not None and value < low:
        said = f"{describe(node)} is below the least value of this param"
        report.add(node.mark, said, f"write {words[0]} or more", code="out-of-bounds")
    if value is not None and high is not None and value > high:
        said = f"{describe(node)} is above the largest value of this param"
        report.add(node.mark, said, f"write {words[1]} or less", code="out-of-bounds")
    return value
