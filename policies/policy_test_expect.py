"""The expectations of a PolicyTest, read from its document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muxk.policies.expectations import AT_A_MOMENT, OF_A_RULE, OF_REQUESTS, vocabulary
from muxk.policies.expressions import compile_expression
from muxk.policies.loader import fields, is_torn, torn_text
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode, describe
from muxk.policies.policy_choice import PolicyChoice
from muxk.policies.policy_test_load import items_of
from muxk.policies.policy_test_spec import Arrivals, Expectation, Swap
from muxk.policies.policy_test_values import Values
from muxk.policies.problems import Report, did_you_mean
from muxk.policies.units import Type

EXPECTATIONS_MAX = 200
EXPECT: Mapping[str, str] = dict.fromkeys(("that", "for", "class", "at", "rule", "because"), "")


@dataclass(frozen=True, slots=True)
class Known:
    """What the policies of a test have; None where it can not be known before the run."""

    rules: tuple[str, ...] | None
    classes: tuple[str, ...]

    @staticmethod
    def of(choice: PolicyChoice | None, swaps: Sequence[Swap]) -> Known | None:
        """Of the policy of a test and those that replace it."""
        if choice is None:
            return None
        choices = [choice, *(swap.choice for swap in swaps)]
        rules: list[str] = []
        for each in choices:
            if each.rules is None:
                return Known(None, _classes(choices))
            rules += each.rules
        return Known(tuple(dict.fromkeys(rules)), _classes(choices))


def _classes(choices: Sequence[PolicyChoice]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for choice in choices for name in choice.policy.classes))


class ExpectationReader:
    """Reads the expectations of one test."""

    def __init__(self, arrivals: Sequence[Arrivals], known: Known | None, report: Report) -> None:
        self._sizes = {group.name: group.count for group in arrivals}
        self._known = known
        self._report = report
        self._values = Values(report)

    def expectations(self, node: Node | None, spec: Node) -> tuple[Expectation, ...]:
        items = items_of(node, "expect", self._report)
        if not items:
            hint = "write expect: [tbt.max <= 50ms]"
            self._report.add(spec.mark if node is None else node.mark, "a test needs 'expect'", hint)
        if len(items) > EXPECTATIONS_MAX and node is not None:
            self._report.add(node.mark, f"more than {EXPECTATIONS_MAX} expectations in a test")
        found = [self._expectation(item) for item in items[:EXPECTATIONS_MAX]]
        return tuple(expectation for expectation in found if expectation is not None)

    def _expectation(self, node: Node) -> Expectation | None:
        if isinstance(node, Scalar):
            return self._compiled(node, OF_REQUESTS, {})
        if self._is_torn(node):
            return None
        found = fields(node, EXPECT, "an expectation", self._report)
        if not isinstance(node, MappingNode):
            return None
        that = found.get("that")
        if not isinstance(that, Scalar):
            mark = node.mark if that is None else that.mark
            message = "an expectation needs 'that'" if that is None else "'that' must be an expression"
            self._report.add(mark, message, "such as {for: chat, that: tbt.p99 <= 50ms}")
            return None
        place = self._place(found)
        if place is None:
            return None
        return self._compiled(that, place, self._about(found))

    def _is_torn(self, node: Node) -> bool:
        """Whether a comma inside { } cut a text in two: YAML takes the rest for a key without a value."""
        entries = node.entries if isinstance(node, MappingNode) else ()
        for before, entry in zip((None, *entries), entries, strict=False):
            if entry.key.text not in EXPECT and is_torn(entry):
                self._report.add(entry.key.mark, *torn_text(before), code="torn-text")
                return True
        return False

    def _place(self, found: Mapping[str, Node]) -> str | None:
        """Which kind of expectation it is; None, with a report, for a mixture."""
        requests = [key for key in ("for", "class") if key in found]
        kinds = [*(key for key in ("at", "rule") if key in found), *requests[:1]]
        if len(kinds) > 1:
            first, second = kinds[:2]
            self._report.add(
                found[second].mark, f"'{first}' and '{second}' do not go together", "write two expectations"
            )
            return None
        return {"at": AT_A_MOMENT, "rule": OF_A_RULE}.get(kinds[0] if kinds else "", OF_REQUESTS)

    def _about(self, found: Mapping[str, Node]) -> dict[str, Any]:
        at_ns = self._values.duration(found["at"], "at", 0) if "at" in found else None
        return {
            "groups": self._groups(found.get("for")),
            "class_name": self._class(found.get("class")),
            "at_ns": at_ns,
            "rule": self._rule(found.get("rule")),
            "because": self._values.text(found.get("because"), "'because'"),
        }

    def _compiled(self, that: Scalar, place: str, about: Mapping[str, Any]) -> Expectation | None:
        names = vocabulary(place)
        expression = compile_expression(that, Type.BOOL, names, self._report)
        if expression is None:
            return None
        if not expression.names:
            hint = f"names here: {', '.join(names.names)}"
            self._report.add(that.mark, "this says nothing about the run", hint)
            return None
        return Expectation(" ".join(that.text.split()), that.mark, expression, **about)

    def _groups(self, node: Node | None) -> tuple[str, ...]:
        items = node.items if isinstance(node, SequenceNode) else () if node is None else (node,)
        if isinstance(node, SequenceNode) and not items:
            self._report.add(node.mark, "'for' names no group of arrivals")
        found: list[str] = []
        for item in items:
            name = item.text if isinstance(item, Scalar) else ""
            if self._is_group_or_request(name):
                found.append(name)
            else:
                known = ", ".join(self._sizes)
                hint = did_you_mean(name, self._sizes, f"groups of this test: {known}")
                self._report.add(item.mark, f"there is no group of arrivals {describe(item)}", hint)
        return tuple(found)

    def _is_group_or_request(self, name: str) -> bool:
        if name in self._sizes:
            return True
        group, _, number = name.rpartition("-")
        counts = number.isdecimal() and number.isascii() and len(number) < 8 and str(int(number)) == number
        return counts and 0 < int(number) <= self._sizes.get(group, 0)

    def _class(self, node: Node | None) -> str:
        name = self._values.word(node, "class")
        if node is not None and name and self._known is not None and name not in self._known.classes:
            classes = self._known.classes
            hint = did_you_mean(name, classes, f"classes of the policy: {', '.join(classes)}")
            self._report.add(node.mark, f"the policy has no class '{name}'", hint)
        return name

    def _rule(self, node: Node | None) -> str:
        label = self._values.text(node, "'rule'")
        rules = None if self._known is None else self._known.rules
        if node is not None and label and rules is not None and label not in rules:
            point = [rule for rule in rules if rule.split("/")[0] == label.split("/")[0]]
            hint = did_you_mean(label, rules, f"rules are: {', '.join(point or rules)}")
            self._report.add(node.mark, f"the policy has no rule '{label[:60]}'", hint)
        return label
