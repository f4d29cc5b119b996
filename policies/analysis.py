"""What is odd about a policy that works: `muxk check` tells it as warnings and notes.

A warning is about what can not be meant; a note about what may be. Only what stands in the file itself is
told, not what it takes over from the policy it extends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from muxk.policies.answers import Context
from muxk.policies.engine import CompiledPolicy
from muxk.policies.expressions import Expression
from muxk.policies.formulas import Budget, Numbers
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode
from muxk.policies.problems import Mark, Report
from muxk.policies.rule_analysis import CheckedRule, Ranges, RuleAnalysis
from muxk.policies.rules import OnError, Point, Rule
from muxk.policies.schema import PolicySource
from muxk.policies.units import Type, UnitError, parse_quantity

MAX_STEPS = 60_000
"""Of reasoning about one file: well under a second."""
_MENTION = re.compile(r"\b(params|vars)\.([A-Za-z_]\w*)", re.ASCII)
_OF_SPLIT = ("units", "decode.units", "prefill.units")
_READ_THE_TTFT_SLO = (".deadline", ".slack")
_READ_CLASSES = ("request.class", "head.class", "class.", ".class_rank")


def analyse(policy: CompiledPolicy, report: Report) -> None:
    """Warn of what is odd about a policy that was compiled from YAML."""
    assert policy.source is not None, "compiled from YAML"
    _Analysis(policy.source, policy.points, report).run()


class _Analysis:
    """All that is looked at, for one policy."""

    def __init__(self, source: PolicySource, points: Mapping[str, Point], report: Report) -> None:
        self._source = source
        self._points = points
        self._context = Context(Report(), source.constants, source.classes, source.variables)
        self._report = report
        self._budget = Budget(MAX_STEPS)
        self._params = _bounds_of_params(source.spec.get("params"))
        self._options = _unset_switches(source)

    def run(self) -> None:
        """Everything, in no order: the report sorts."""
        for name, point in self._points.items():
            rules = [self._checked(rule) for rule in point.written]
            ranges = Ranges(self._context.vocabulary(name), self._params, options=self._options)
            skips_failing = point.on_error is OnError.NEXT
            RuleAnalysis(name, ranges, skips_failing, self._report, self._budget).check(rules)
            if name == "split":
                self._fewest(rules)
        self._unused()
        self._fixed_params()
        self._idle_classes()

    def _own(self, mark: Mark) -> bool:
        return mark.source is self._source.spec.mark.source

    def _checked(self, rule: Rule) -> CheckedRule:
        name = rule.label.partition("/")[2]
        return CheckedRule(name, rule.mark, rule.condition, rule.expressions, self._own(rule.mark))

    # --- the condition of `fewest` ---

    def _fewest(self, rules: Sequence[CheckedRule]) -> None:
        """`fewest where` tries splits: its condition should depend on them, and can hold or not."""
        for rule in rules:
            for condition in rule.then if rule.own else ():
                if condition.type is Type.BOOL:
                    self._one_fewest(condition)

    def _one_fewest(self, condition: Expression) -> None:
        mark, report = condition.scalar.mark_at(0), self._report
        tried = CheckedRule("fewest", mark, condition, (), True)
        found = Report()
        ranges = Ranges(self._context.vocabulary("fewest"), self._params)
        RuleAnalysis("fewest", ranges, False, found, self._budget).check([tried])
        codes = [problem.code for problem in found.problems]
        if "never-true" in codes:
            hint = "write what `otherwise` says instead"
            report.warn(
                mark, "no split can meet this condition: `otherwise` always answers", hint, "never-true"
            )
        elif "always-true" in codes:
            hint = "write a number of units, or correct the condition"
            report.warn(
                mark, "every split meets this condition: `otherwise` is never used", hint, "always-true"
            )
        elif not any(name in _OF_SPLIT or name.endswith(("time_left", ".slack")) for name in condition.names):
            hint = "such as fewest where estimate.decode(units) <= slo.tbt"
            report.warn(
                mark, "this condition is the same for every split that is tried", hint, "fewest-without-units"
            )

    # --- what nobody reads ---

    def _unused(self) -> None:
        mentioned = {match[0] for text in _texts(self._source.spec) for match in _MENTION.finditer(text)}
        for section, root, noun in (("params", "params", "param"), ("variables", "vars", "variable")):
            node = self._source.spec.get(section)
            for entry in node if isinstance(node, MappingNode) else ():
                name = entry.key.text
                if f"{root}.{name}" not in mentioned and self._own(entry.key.mark):
                    hint = f"take it out, or use {root}.{name} in a rule"
                    message = f"{noun} '{name}' is used nowhere"
                    self._report.warn(entry.key.mark, message, hint, f"unused-{noun}")

    def _fixed_params(self) -> None:
        """A param that can have one value only."""
        params = self._source.spec.get("params")
        for entry in params if isinstance(params, MappingNode) else ():
            bounds = self._params.get(f"params.{entry.key.text}")
            if bounds is not None and bounds.low == bounds.high and self._own(entry.key.mark):
                message = f"param '{entry.key.text}' can only be {_written(entry.value, 'min')}"
                self._report.warn(entry.key.mark, message, "min and max are the same", "fixed-param")

    def _idle_classes(self) -> None:
        """Classes that change nothing, and SLOs of classes that no rule looks at."""
        node = self._source.spec.get("classes")
        if not isinstance(node, SequenceNode) or not self._own(node.mark) or len(node.items) < 2:
            return
        keys = [entry.key.text for item in node.items if isinstance(item, MappingNode) for entry in item]
        names = [name for point in self._points.values() for rule in point.rules for name in rule.names]
        reads = any(name.endswith(_READ_CLASSES) or name.startswith("class.") for name in names)
        if not reads and not any(key in keys for key in ("slo", "share", "max_wait")):
            hint = "give them an slo, share or max_wait, or name request.class or class.rank in a rule"
            self._report.warn(node.mark, "these classes change nothing", hint, "idle-classes")
        for item in node.items:
            slo = item.get("slo") if isinstance(item, MappingNode) else None
            if isinstance(slo, MappingNode):
                self._unread_slo(slo, names)

    def _unread_slo(self, slo: MappingNode, names: Sequence[str]) -> None:
        for entry in slo:
            if entry.key.text == "tbt" and not self._reads_tbt():
                hint = "split, slice or preempt can: decode: fit, or a condition with slo.tbt"
                message = "no rule looks at the TBT SLO: this one is for reports only"
                self._report.note(entry.key.mark, message, hint, "unread-slo")
            if entry.key.text == "ttft" and not any(name.endswith(_READ_THE_TTFT_SLO) for name in names):
                hint = "order can, by request.deadline or request.slack"
                message = "no rule looks at a deadline: this TTFT SLO is for reports only"
                self._report.note(entry.key.mark, message, hint, "unread-slo")

    def _reads_tbt(self) -> bool:
        points = [self._source.spec.get(name) for name in self._points]
        texts = [text for node in points if node is not None for text in _texts(node)]
        variables = self._source.spec.get("variables")
        texts += _texts(variables) if variables is not None else ()
        return any("slo.tbt" in text or text.strip() == "fit" for text in texts)


def _texts(node: Node) -> Iterator[str]:
    """Texts of all scalars under a node."""
    if isinstance(node, Scalar):
        yield node.text
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _texts(item)
    else:
        for entry in node:
            yield from _texts(entry.value)


def _bounds_of_params(node: Node | None) -> dict[str, Numbers]:
    """From `params.name` to the values that it may have."""
    bounds: dict[str, Numbers] = {}
    for entry in node if isinstance(node, MappingNode) else ():
        if isinstance(entry.value, MappingNode):
            low, high = _quantity(entry.value.get("min")), _quantity(entry.value.get("max"))
            known = Numbers()
            known = known if low is None else Numbers(low=low)
            known = known if high is None else Numbers(low=known.low, high=high)
            bounds[f"params.{entry.key.text}"] = known
    return bounds


def _unset_switches(source: PolicySource) -> tuple[str, ...]:
    """The params of type bool that have their default, as `params.name`."""
    node = source.spec.get("params")
    switches = {
        f"params.{entry.key.text}": _written(entry.value, "default") == "true"
        for entry in (node if isinstance(node, MappingNode) else ())
        if _written(entry.value, "type") == "bool"
    }
    return tuple(name for name, default in switches.items() if source.constants[name].value == default)


def _quantity(node: Node | None) -> float | None:
    if not isinstance(node, Scalar):
        return None
    text = node.text.strip()
    try:
        value = parse_quantity(text.removeprefix("-")).value
    except UnitError:
        return None
    return -value if text.startswith("-") else value


def _written(node: Node, key: str) -> str:
    value = node.get(key) if isinstance(node, MappingNode) else None
    return value.text if isinstance(value, Scalar) else ""
