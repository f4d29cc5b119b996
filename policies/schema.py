"""The document of a policy: its sections, read into a `PolicySource` with every mistake reported.

`extends` merges the base's sections node by node, so that everything keeps its place for messages. Every
policy extends `defaults` in the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muxk.kernel.view import Limits
from muxk.policies.answers import POINTS, Context
from muxk.policies.loader import fields
from muxk.policies.marks import Entry, MappingNode, Node, Scalar, SequenceNode, describe
from muxk.policies.params import read_params
from muxk.policies.problems import Report
from muxk.policies.units import TtftSlo, Type, UnitError, parse_ttft
from muxk.policies.vocabulary import Constant

API_VERSION = "muxk/v1alpha1"
KIND = "SchedulingPolicy"
MAX_RULES = 200
MAX_BASES = 8
DEFAULTS = "defaults"

_PLANNED = "is not supported yet"
_DOCUMENT: Mapping[str, str] = {"apiVersion": "", "kind": "", "metadata": "", "spec": ""}
_SPEC: Mapping[str, str] = {
    "extends": "",
    "slo": "",
    "params": "",
    "limits": "",
    "on_error": "",
    **dict.fromkeys(POINTS, ""),
    "classes": _PLANNED,
    "variables": _PLANNED,
    "place": _PLANNED,
}
_MERGED = ("slo", "params", "limits")
"""Sections that a policy inherits key by key; others are replaced as a whole."""
_SLO: Mapping[str, str] = {"tbt": "", "ttft": ""}
_LIMITS: Mapping[str, str] = {"backlog": "", "decode_ahead": "", "decode_floor": "", "queue": ""}
_RULE: Mapping[str, str] = {"name": "", "when": "", "then": ""}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")

Base = Callable[[str], "Node | None"]
"""From the name of a shipped policy to the root node of its file, or None when there is none."""


@dataclass(frozen=True, slots=True)
class RuleSource:
    """One rule as written; `when` is None for a rule that always matches."""

    name: str
    when: Scalar | None
    then: Node | None
    broken: bool = False
    """It has mistakes that are reported: nothing follows from a `when` that is not there."""


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A policy that was read and whose structure is right; its rules are not compiled yet."""

    name: str
    description: str
    spec: MappingNode
    """All sections, those of the bases included."""
    settings: tuple[tuple[str, str], ...]
    """Params in force, by name."""
    constants: Mapping[str, Constant]
    tbt_ns: int
    ttft: TtftSlo
    limits: Limits
    skip_failing_rules: bool
    points: Mapping[str, tuple[RuleSource, ...]]


def read_policy(root: Node, settings: Mapping[str, str], base: Base, report: Report) -> PolicySource | None:
    """Read a document; None when it is too broken to go on. Problems are in the report either way."""
    document = fields(root, _DOCUMENT, "a policy file", report)
    if not isinstance(root, MappingNode):
        return None
    _fixed(document, "apiVersion", API_VERSION, root, report)
    _fixed(document, "kind", KIND, root, report)
    name, description = _metadata(document.get("metadata"), root, report)
    spec = document.get("spec")
    if not isinstance(spec, MappingNode):
        mark = spec.mark if spec is not None else root.mark
        report.add(mark, "a policy needs a 'spec' mapping", "its sections are slo, split, slice, ...")
        return None
    merged = _with_bases(spec, base, report)
    return _spec(name, description, merged, settings, report)


def _fixed(document: dict[str, Node], key: str, wanted: str, root: Node, report: Report) -> None:
    node = document.get(key)
    if node is None:
        report.add(root.mark, f"'{key}' is missing", f"write {key}: {wanted}")
    elif not isinstance(node, Scalar) or node.text != wanted:
        report.add(node.mark, f"{key} must be {wanted}, not {describe(node)}")


def _metadata(node: Node | None, root: Node, report: Report) -> tuple[str, str]:
    if node is None:
        report.add(root.mark, "'metadata' is missing", "write metadata: {name: my-policy}")
        return "", ""
    found = fields(node, {"name": "", "description": ""}, "metadata", report)
    name = found.get("name")
    if name is None:
        report.add(node.mark, "metadata needs a 'name'")
    description = found.get("description")
    if description is not None and not isinstance(description, Scalar):
        report.add(description.mark, "a description is a text")
    text = description.text if isinstance(description, Scalar) else ""
    return _identifier(name, "a policy's name", report), text


def _identifier(node: Node | None, what: str, report: Report) -> str:
    if node is None:
        return ""
    if isinstance(node, Scalar) and _NAME.fullmatch(node.text):
        return node.text
    report.add(node.mark, f"{what} must be a word of letters, digits, '-', '_' and '.', not {describe(node)}")
    return ""


def _with_bases(spec: MappingNode, base: Base, report: Report) -> MappingNode:
    """The spec with everything that it does not restate taken from the policies it extends."""
    merged, extends = spec, _extends(spec, report)
    for _ in range(MAX_BASES):
        below = base(extends)
        below_spec = below.get("spec") if isinstance(below, MappingNode) else None
        if not isinstance(below_spec, MappingNode):
            node = spec.get("extends") or spec
            report.add(node.mark, f"there is no shipped policy '{extends[:40]}' to extend", "such as muxwise")
            return merged
        merged = _merge(below_spec, merged)
        if extends == DEFAULTS:
            return merged
        extends = _extends(below_spec, report)
    report.add(spec.mark, f"more than {MAX_BASES} policies extend one another")
    return merged


def _extends(spec: MappingNode, report: Report) -> str:
    node = spec.get("extends")
    return DEFAULTS if node is None else _identifier(node, "the policy to extend", report) or DEFAULTS


def _merge(below: MappingNode, above: MappingNode) -> MappingNode:
    entries = list(above.entries)
    for entry in below:
        key = entry.key.text
        over = above.get(key)
        if over is None:
            entries.append(entry)
        elif key in _MERGED and isinstance(over, MappingNode) and isinstance(entry.value, MappingNode):
            index = next(i for i, candidate in enumerate(entries) if candidate.key.text == key)
            entries[index] = Entry(entries[index].key, _merge(entry.value, over))
    return MappingNode(tuple(entries), above.mark)


def _spec(
    name: str, description: str, spec: MappingNode, settings: Mapping[str, str], report: Report
) -> PolicySource:
    found = fields(spec, _SPEC, "spec", report)
    params = read_params(found.get("params"), settings, report)
    constants = {f"params.{param.name}": Constant(param.type, param.value) for param in params}
    tbt_ns, ttft = _slo(found["slo"], Context(report, constants)) if "slo" in found else (1, TtftSlo(1, 0))
    constants["slo.tbt"] = Constant(Type.DURATION, tbt_ns)
    context = Context(report, constants)
    points = {point: _rules(found[point], point, report) for point in POINTS if point in found}
    return PolicySource(
        name=name,
        description=description,
        spec=spec,
        settings=tuple((param.name, repr(param.value)) for param in params),
        constants=constants,
        tbt_ns=tbt_ns,
        ttft=ttft,
        limits=_limits(found.get("limits"), context),
        skip_failing_rules=_on_error(found.get("on_error"), context) == "next",
        points=points,
    )


def _slo(node: Node, context: Context) -> tuple[int, TtftSlo]:
    found = fields(node, _SLO, "slo", context.report)
    tbt_ns = _duration(found.get("tbt"), "slo", context)
    ttft = TtftSlo(1, 0)
    ttft_node = found.get("ttft")
    if isinstance(ttft_node, Scalar):
        try:
            ttft = parse_ttft(ttft_node.text)
        except UnitError as error:
            context.report.add(ttft_node.mark, str(error), error.hint)
    elif ttft_node is not None:
        context.report.add(ttft_node.mark, "ttft must be a time", "write 800ms or 500ms + 10ms/token")
    return tbt_ns, ttft


def _constant(node: Node | None, wanted: Type, place: str, context: Context) -> float | None:
    """The value of an expression that may name params only."""
    expression = context.expression(node, wanted, place)
    if expression is None:
        return None
    value: float = expression.constant
    return value


def _duration(node: Node | None, place: str, context: Context) -> int:
    value = _constant(node, Type.DURATION, place, context)
    if value is not None and node is not None and round(value) < 1:
        context.report.add(node.mark, "a time must be more than 0")
    return max(1, round(value or 1))


def _limits(node: Node | None, context: Context) -> Limits:
    found = fields(node, _LIMITS, "limits", context.report) if node is not None else {}
    return Limits(
        backlog=_whole_number(found.get("backlog"), 1, 4, context),
        decode_floor_ns=_duration(found.get("decode_floor"), "limits", context),
        queue_bound=_whole_number(found.get("queue"), 1, 1_000_000, context),
        decode_ahead=_whole_number(found.get("decode_ahead"), 0, 1, context),
    )


def _whole_number(node: Node | None, least: int, most: int, context: Context) -> int:
    value = _constant(node, Type.NUMBER, "limits", context)
    if value is None or node is None:
        return least
    if value != round(value) or not least <= value <= most:
        context.report.add(node.mark, f"must be a whole number from {least} to {most:,}, not {value:g}")
        return least
    return round(value)


def _on_error(node: Node | None, context: Context) -> str:
    if node is None:
        return "default"
    return context.word(node, ("default", "next"), "on_error") or "default"


def _rules(node: Node, point: str, report: Report) -> tuple[RuleSource, ...]:
    """Rules of a point; what is no list is the answer of its only rule."""
    if not isinstance(node, SequenceNode):
        return (RuleSource("always", None, node),)
    if len(node.items) > MAX_RULES:
        report.add(node.mark, f"{point} has more than {MAX_RULES} rules")
        return ()
    rules = tuple(_rule(item, point, report) for item in node.items)
    _check_names(node, point, rules, report)
    _check_order(node, point, rules, report)
    return rules


def _rule(node: Node, point: str, report: Report) -> RuleSource:
    found = fields(node, _RULE, f"a rule of {point}", report)
    if not isinstance(node, MappingNode):
        return RuleSource("", None, None, broken=True)
    for key in ("name", "then"):
        if key not in found:
            report.add(node.mark, f"a rule of {point} needs '{key}'")
    when = found.get("when")
    if when is not None and not isinstance(when, Scalar):
        hint = "put quotes around the expression"
        report.add(when.mark, f"'when' must be an expression, not {describe(when)}", hint)
    broken = "then" not in found or len(found) < len(node.entries) or not isinstance(when, Scalar | None)
    condition = when if isinstance(when, Scalar) and when.text.strip() not in ("true", "True") else None
    name = _identifier(found.get("name"), "a rule's name", report)
    return RuleSource(name, condition, found.get("then"), broken)


def _check_names(node: SequenceNode, point: str, rules: tuple[RuleSource, ...], report: Report) -> None:
    lines: dict[str, int] = {}
    for item, rule in zip(node.items, rules, strict=True):
        if rule.name in lines:
            hint = f"the other is on line {lines[rule.name]}"
            report.add(item.mark, f"{point} has two rules named '{rule.name}'", hint)
        elif rule.name:
            lines[rule.name] = item.mark.line


def _check_order(node: SequenceNode, point: str, rules: tuple[RuleSource, ...], report: Report) -> None:
    """The last rule always matches, and no other does."""
    always: RuleSource | None = None
    for item, rule in zip(node.items, rules, strict=True):
        if always is not None:
            hint = f"rule '{always.name}' before it always matches; give that one a 'when'"
            report.add(item.mark, f"this rule of {point} can never be reached", hint)
            return
        if rule.when is None and not rule.broken:
            always = rule
    if always is None and not (rules and rules[-1].broken):
        place = node.items[-1].mark if rules else node.mark
        hint = "end with a rule that has no 'when', such as - {name: otherwise, then: ...}"
        report.add(place, f"the last rule of {point} must always match: it is the catch-all", hint)
