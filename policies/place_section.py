"""The section `place` of a policy, read: pools of devices and rules, or a plan with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muxk.policies.answer_checks import in_words
from muxk.policies.answers import MAX_KEYS, SORTABLE, Context, key_run
from muxk.policies.expressions import Expression
from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode, describe
from muxk.policies.placing import (
    DEFAULT_LABEL,
    Among,
    PlaceRule,
    Placing,
    PlanPlacing,
    Pools,
    Reuse,
    RulePlacing,
)
from muxk.policies.plans import FoundPlan, NoPlan, PlanParam, group_devices_max
from muxk.policies.problems import Mark, did_you_mean
from muxk.policies.sections import identifier
from muxk.policies.shipped_plans import PLANS
from muxk.policies.units import Type

PLACE: Mapping[str, str] = {
    "pools": "",
    "prefill": "",
    "decode": "",
    "both": "",
    "reuse": "",
    "plan": "",
    "with": "",
}
PHASES = ("prefill", "decode", "both")
"""Keys of `place` that hold rules."""
POOLS: Mapping[str, str] = {"prefill": "", "decode": ""}
PLACE_RULE: Mapping[str, str] = {"name": "", "among": "", "where": "", "by": ""}
REST = "rest"
MAX_PLACE_RULES = 32
MAX_PLACE_COST = 500
"""Of all rules together, which may all be computed for each request that waits and each device."""
_NEED_POOLS = (Among.PREFILL, Among.DECODE, Among.MIXED)


@dataclass(frozen=True, slots=True)
class PlaceSection:
    """What a section says."""

    placing: Placing
    origin: str = ""
    """Of a plan that does not ship with muxk."""


def read_place(node: Node | None, context: Context) -> PlaceSection | None:
    """The section, or None when there is none or it has mistakes, which are reported."""
    if node is None:
        return None
    found = fields(node, PLACE, "place", context.report)
    if not isinstance(node, MappingNode):
        return None
    if "plan" in found:
        return _plan(found, context)
    if "with" in found:
        hint = "it holds the parameters of a plan, such as plan: loongserve"
        context.report.add(found["with"].mark, "'with' needs 'plan'", hint)
    return _rules(node, found, context)


# --- rules ---


def _rules(node: MappingNode, found: Mapping[str, Node], context: Context) -> PlaceSection | None:
    if "prefill" not in found and "both" not in found:
        hint = "write prefill: and decode:, or both: with a list of rules, or plan: loongserve"
        if len(found) == len(node.entries):
            context.report.add(node.mark, "place needs rules", hint, "missing-key")
        return None
    if "decode" in found and "prefill" not in found:
        hint = "say which device computes the prompt, or use both:"
        context.report.add(found["decode"].mark, "'decode' needs 'prefill'", hint, "missing-key")
    pools = _pools(found["pools"], context) if "pools" in found else None
    by_phase = {phase: _rules_of(phase, found.get(phase), "pools" in found, context) for phase in PHASES}
    written = [rule for rules in by_phase.values() for rule in rules]
    _check_names(written, context)
    _check_cost(node, written, context)
    kept = {phase: tuple(r for r in rules if not r.never) for phase, rules in by_phase.items()}
    fetches = _reuse(found.get("reuse"), context) is Reuse.DECODE
    if not by_phase["decode"]:
        kept["decode"] = ()
    elif not kept["decode"] and not context.report:
        hint = "leave decode: out: a request then decodes where it was computed"
        context.report.add(found["decode"].mark, "all rules of decode are off", hint)
    return PlaceSection(RulePlacing(**kept, pools=pools, fetches_prefix=fetches))


def _rules_of(phase: str, node: Node | None, has_pools: bool, context: Context) -> tuple[PlaceRule, ...]:
    if node is None:
        return ()
    if not isinstance(node, SequenceNode) or not 0 < len(node.items) <= MAX_PLACE_RULES:
        hint = "write [{name: least, by: device.pending_tokens}]"
        context.report.add(
            node.mark, f"{phase} of place must be a list of 1 to {MAX_PLACE_RULES} rules", hint
        )
        return ()
    rules = [_rule(item, phase, has_pools, context) for item in node.items]
    return tuple(rule for rule in rules if rule is not None)


def _rule(node: Node, phase: str, has_pools: bool, context: Context) -> PlaceRule | None:
    report = context.report
    found = fields(node, PLACE_RULE, f"a rule of {phase}", report)
    if not isinstance(node, MappingNode):
        return None
    if "name" not in found:
        report.add(node.mark, f"a rule of {phase} needs 'name'", code="missing-key")
    name = identifier(found.get("name"), "a rule's name", report)
    among = _among(found.get("among"), phase, has_pools, context)
    where = context.expression(found.get("where"), Type.BOOL, "place")
    keys = _keys(found.get("by"), context)
    condition = where if where is not None and where.constant is not True else None
    return PlaceRule(
        label=f"place/{name}",
        among=among,
        where=None if condition is None else condition.run,
        by=tuple(key_run(key) for key in keys),
        mark=node.mark,
        condition=condition,
        keys=keys,
    )


def _among(node: Node | None, phase: str, has_pools: bool, context: Context) -> Among:
    if node is None:
        return Among.ALL
    words = tuple(word for word in Among if phase == "decode" or word is not Among.SAME)
    word = context.word(node, words, "among")
    among = Among.ALL if word is None else Among(word)
    if among in _NEED_POOLS and not has_pools:
        hint = "write pools: {prefill: 50%, decode: rest} above, or among: all"
        context.report.add(node.mark, f"among: {among} needs pools", hint)
    return among


def _keys(node: Node | None, context: Context) -> tuple[Expression, ...]:
    if node is None:
        return ()
    items = node.items if isinstance(node, SequenceNode) else (node,)
    if not 0 < len(items) <= MAX_KEYS:
        context.report.add(node.mark, f"1 to {MAX_KEYS} sort keys are expected, not {len(items)}")
        return ()
    keys = [context.expression(item, SORTABLE, "place", sort_key=True) for item in items]
    return tuple(key for key in keys if key is not None)


def _check_names(rules: list[PlaceRule], context: Context) -> None:
    lines: dict[str, Mark] = {}
    for rule in rules:
        other = lines.setdefault(rule.label, rule.mark)
        if other is not rule.mark and rule.label != "place/":
            name = rule.label.removeprefix("place/")
            hint = f"the other is on line {other.line}; its name tells which one answered"
            context.report.add(rule.mark, f"place has two rules named '{name}'", hint, "duplicate-name")


def _check_cost(node: Node, rules: list[PlaceRule], context: Context) -> None:
    cost = sum(expression.cost for rule in rules for expression in rule.expressions)
    if cost > MAX_PLACE_COST:
        message = f"the rules of place cost {cost:,}, more than {MAX_PLACE_COST:,}"
        context.report.add(node.mark, message, "they are computed for each request and each device")


def _reuse(node: Node | None, context: Context) -> Reuse:
    if node is None:
        return Reuse.OWN
    return Reuse(context.word(node, tuple(Reuse), "reuse") or Reuse.OWN)


def _pools(node: Node, context: Context) -> Pools | None:
    found = fields(node, POOLS, "pools", context.report)
    if not isinstance(node, MappingNode):
        return None
    rests = [key for key in POOLS if _is_rest(found.get(key))]
    hint = "write {prefill: 50%, decode: rest}"
    if len(found) < len(POOLS):
        context.report.add(node.mark, "pools needs 'prefill' and 'decode'", hint, "missing-key")
        return None
    if len(rests) != 1:
        context.report.add(node.mark, "one of the two pools must have the rest", hint)
        return None
    numbered = "decode" if rests == ["prefill"] else "prefill"
    return _numbered(found[numbered], numbered == "decode", context)


def _is_rest(node: Node | None) -> bool:
    return isinstance(node, Scalar) and node.text == REST


def _numbered(node: Node, is_of_decode: bool, context: Context) -> Pools | None:
    expression = context.expression(node, (Type.NUMBER, Type.PERCENT), "pools")
    if expression is None:
        return None
    value = expression.constant
    is_share = expression.type is Type.PERCENT
    if is_share and not 0 < value < 1:
        context.report.add(node.mark, "a share of the devices must be above 0% and below 100%")
    elif not is_share and (value != round(value) or not 1 <= value <= 1 << 16):
        context.report.add(node.mark, "a pool has a whole number of devices, at least 1")
    return Pools(float(value), is_share, is_of_decode)


# --- plans ---


def _plan(found: Mapping[str, Node], context: Context) -> PlaceSection | None:
    report, node = context.report, found["plan"]
    for key in found:
        if key not in ("plan", "with", "reuse"):
            report.add(found[key].mark, f"'{key}' and 'plan' do not go together", "a plan answers for all")
    name = identifier(node, "a plan's name", report)
    try:
        one = PLANS.find(name) if name else None
    except NoPlan as error:
        report.add(node.mark, str(error))
        return None
    if one is None:
        if name:
            names = PLANS.names()
            hint = did_you_mean(name, names, f"there are {', '.join(names)}")
            report.add(node.mark, f"there is no plan '{name}'", hint)
        return None
    values = _values(found.get("with"), one, context)
    fetches = _reuse(found.get("reuse"), context) is Reuse.DECODE
    if report:
        return None
    try:
        answer, widest = one.plan(values), group_devices_max(one.plan, values)
    except Exception as error:
        report.add(node.mark, f"plan '{name}' can not be made: {in_words(error)}")
        return None
    labels = (*one.plan.labels, DEFAULT_LABEL)
    placing = PlanPlacing(name, answer, node.mark, one.plan.devices_min, fetches, labels, widest)
    return PlaceSection(placing, one.origin)


def _values(node: Node | None, one: FoundPlan, context: Context) -> dict[str, float]:
    params = one.plan.params
    values = {name: param.default for name, param in params.items()}
    if node is None:
        return values
    for name, value in fields(node, dict.fromkeys(params, ""), f"plan '{one.name}'", context.report).items():
        given = _value(value, name, params[name], context)
        if given is not None:
            values[name] = given
    return values


def _value(node: Node, name: str, param: PlanParam, context: Context) -> float | None:
    expression = context.expression(node, param.type, "pools")
    if expression is None:
        return None
    value: float = expression.constant
    if not param.least <= value <= param.most or (param.whole and value != round(value)):
        kind = "a whole number" if param.whole else param.type.phrase
        hint = f"{param.about}; {kind} from {param.least:g} to {param.most:g}"
        context.report.add(node.mark, f"{name} can not be {describe(node)}", hint, "out-of-bounds")
        return None
    return value
