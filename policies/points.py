"""From rules as written to compiled decision points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muxk.policies.answers import POINTS, Answer, Context
from muxk.policies.expressions import Expression
from muxk.policies.marks import Scalar, written
from muxk.policies.names import ASKED
from muxk.policies.problems import Mark
from muxk.policies.rules import OnError, Point, Rule, reachable
from muxk.policies.schema import PolicySource, Rules, RuleSource
from muxk.policies.sections import ClassSource
from muxk.policies.units import Type

CLASSES = "classes"
"""The point that puts a request into a class; its answer is the rank."""
MAX_POINT_COST = 5_000
"""Of all rules of a point, which may all be computed for one answer: about half a millisecond."""


def compile_points(source: PolicySource, context: Context) -> dict[str, Point]:
    """All decision points of a policy, and `classes`; what is wrong goes to the report."""
    points = {name: _point(name, rules, source, context) for name, rules in source.points.items()}
    points[CLASSES] = _classes(source, context)
    return points


def _point(name: str, rules: Rules, source: PolicySource, context: Context) -> Point:
    base: Point | None = None
    for depth, below in reversed(tuple(enumerate(source.bases, start=1))):
        if name in below.points:
            label = name + depth * "/base"
            base = _compiled(name, label, below.points[name], below.on_error, base, context)
    return _compiled(name, name, rules, source.on_error, base, context)


def _compiled(
    name: str, label: str, rules: Rules, on_error: OnError, base: Point | None, context: Context
) -> Point:
    compiled: list[Rule] = []
    cost = 0
    for source in rules:
        rule = _rule(name, label, source, context)
        if rule is not None:
            compiled.append(rule)
            cost += rule.cost
        if cost > MAX_POINT_COST:
            message = f"the rules of {name} up to here cost {cost:,}, more than {MAX_POINT_COST:,}"
            context.report.add(source.mark, message, f"they may all be computed {ASKED[name].about}")
            break
    written_rules = tuple(compiled)
    return Point(name, reachable(written_rules), POINTS[name].fallback, on_error, written_rules, base)


def _rule(point: str, label: str, rule: RuleSource, context: Context) -> Rule | None:
    """A compiled rule, or None for one that is wrong."""
    condition = _condition(rule.when, point, context)
    context = replace(context, expressions=[])
    then = POINTS[point].parse(rule.then, context) if rule.then is not None else None
    if then is None or (rule.when is not None and condition is None):
        if rule.then is not None and not context.report:
            context.report.add(rule.then.mark, f"this is no answer of {point}")
        return None
    assert rule.then is not None, "a rule with an answer"
    return make_rule(
        f"{label}/{rule.name}",
        rule.when,
        condition,
        then,
        written(rule.then),
        tuple(context.expressions),
        rule.mark,
    )


def _condition(when: Scalar | None, point: str, context: Context) -> Expression | None:
    return context.expression(when, Type.BOOL, point)


def make_rule(
    label: str,
    when: Scalar | None,
    condition: Expression | None,
    then: Answer,
    then_text: str,
    expressions: tuple[Expression, ...],
    mark: Mark,
) -> Rule:
    """A rule; a condition that is true under the params in force is none."""
    parts = expressions if condition is None else (condition, *expressions)
    names = frozenset(name for part in parts for name in part.names)
    always = condition is None or condition.constant is True
    run = None if condition is None or always else condition.run
    when_text = "" if when is None else written(when)
    return Rule(label, run, then, names, mark, when_text, then_text, when, condition, expressions)


def _classes(source: PolicySource, context: Context) -> Point:
    """The classes as a point: a class whose condition fails does not match."""
    rows = source.classes.rows
    last = rows[-1].rank
    if not source.class_sources:
        only = make_rule(f"{CLASSES}/{rows[0].name}", None, None, _answer(0), "", (), source.spec.mark)
        return Point(CLASSES, (only,), _answer(last), OnError.NEXT, (only,))
    written_rules = tuple(
        _class_rule(one, row.rank, context) for one, row in zip(source.class_sources, rows, strict=True)
    )
    return Point(CLASSES, reachable(written_rules), _answer(last), OnError.NEXT, written_rules)


def _class_rule(one: ClassSource, rank: int, context: Context) -> Rule:
    condition = _condition(one.when, CLASSES, context)
    return make_rule(f"{CLASSES}/{one.name}", one.when, condition, _answer(rank), one.name, (), one.mark)


def _answer(rank: int) -> Answer:
    return lambda scope: rank


def quoted_in(point: Point) -> tuple[str, ...]:
    """Names in quotes that the conditions of a point mention, each once."""
    found: dict[str, None] = {}
    for rule in point.rules:
        if rule.condition is not None:
            found.update(dict.fromkeys(rule.condition.quoted))
    return tuple(found)


def mentions(points: Mapping[str, Point], names: frozenset[str]) -> bool:
    """Whether a rule that can be reached mentions one of the names."""
    return any(names & rule.names for point in points.values() for rule in point.rules)


def params_in_force(source: PolicySource) -> dict[str, Any]:
    """Values of the params by name."""
    prefix = "params."
    constants = source.constants.items()
    return {name.removeprefix(prefix): known.value for name, known in constants if name.startswith(prefix)}
