"""What a policy takes over from those it extends: sections node by node, so that everything keeps its place.

Every policy extends `defaults` in the end. A list of rules may end in `base`, which stands for the rules
of the extended policy at that point.
"""

from __future__ import annotations

from collections.abc import Callable

from muxk.policies.answers import POINTS
from muxk.policies.marks import Entry, MappingNode, Node, Scalar, SequenceNode
from muxk.policies.problems import Mark, Report, did_you_mean
from muxk.policies.sections import identifier
from muxk.policies.shipped_files import DEFAULTS, shipped_policies

MAX_BASES = 8
REST = "base"
"""The last item of a list of rules that goes on with those of the extended policy."""
ALWAYS = "always"
"""Name of the rule that a point has which is written as its answer alone."""
MERGED = ("slo", "params", "variables", "limits", "estimator")
"""Sections that a policy inherits key by key; others are replaced as a whole."""

Base = Callable[[str], "Node | None"]
"""From the name of a shipped policy to the root node of its file, or None when there is none."""


def with_bases(spec: MappingNode, base: Base, report: Report) -> list[MappingNode]:
    """The spec and those it extends, nearest first, each with all that it inherits."""
    specs = _chain(spec, base, report)
    merged: list[MappingNode] = []
    for one in reversed(specs):
        merged.insert(0, _merge(merged[0], one) if merged else one)
    return merged


def _chain(spec: MappingNode, base: Base, report: Report) -> list[MappingNode]:
    """The spec, the one it extends, and so on down to the defaults, as written."""
    specs, extends = [spec], _extends(spec, report)
    while extends:
        below = base(extends)
        below_spec = below.get("spec") if isinstance(below, MappingNode) else None
        if not isinstance(below_spec, MappingNode):
            node = spec.get("extends") or spec
            shipped = shipped_policies()
            hint = did_you_mean(extends, shipped, f"there are {', '.join(shipped)}")
            report.add(node.mark, f"there is no shipped policy '{extends[:40]}' to extend", hint)
            return specs
        specs.append(below_spec)
        extends = "" if extends == DEFAULTS else _extends(below_spec, report)
        if len(specs) > MAX_BASES:
            report.add(spec.mark, f"more than {MAX_BASES} policies extend one another")
            return specs
    return specs


def _extends(spec: MappingNode, report: Report) -> str:
    node = spec.get("extends")
    return DEFAULTS if node is None else identifier(node, "the policy to extend", report) or DEFAULTS


def _merge(below: MappingNode, above: MappingNode) -> MappingNode:
    """What a policy says, over what it extends; keys of the base come first, in its sequence."""
    entries = [_over(entry, above) for entry in below]
    entries += [entry for entry in above if below.get(entry.key.text) is None]
    return MappingNode(tuple(entries), above.mark)


def _over(entry: Entry, above: MappingNode) -> Entry:
    key = entry.key.text
    over = next((candidate for candidate in above if candidate.key.text == key), None)
    if over is None:
        return entry
    if key in MERGED and isinstance(over.value, MappingNode) and isinstance(entry.value, MappingNode):
        return Entry(over.key, _merge(entry.value, over.value))
    if key in POINTS and isinstance(over.value, SequenceNode) and ends_in_rest(over.value):
        return Entry(over.key, _continued(over.value, entry.value))
    return over


def ends_in_rest(rules: SequenceNode) -> bool:
    """Whether a list of rules goes on with those of the extended policy."""
    return bool(rules.items) and is_rest(rules.items[-1])


def is_rest(item: Node) -> bool:
    """Whether an item of a list of rules is the word for those of the extended policy."""
    return isinstance(item, Scalar) and item.text == REST


def _continued(rules: SequenceNode, below: Node) -> SequenceNode:
    """A list with the rules below in the place of its last item."""
    last = rules.items[-1]
    inherited = below.items if isinstance(below, SequenceNode) else (_as_rule(below, last),)
    return SequenceNode((*rules.items[:-1], *inherited), rules.mark)


def _as_rule(answer: Node, place: Node) -> MappingNode:
    """An answer that stands alone, as the rule that it is short for."""
    assert isinstance(place, Scalar), "the word for the rules below"
    name, then = (Scalar(text, place.style, place.mark, place.start, place.end) for text in ("name", "then"))
    always = Scalar(ALWAYS, place.style, place.mark, place.start, place.end)
    return MappingNode((Entry(name, always), Entry(then, answer)), answer.mark)


def is_inherited(rule: Mark, rules: SequenceNode) -> bool:
    """Whether a rule of a list comes from the extended policy."""
    return rule.source is not rules.mark.source
