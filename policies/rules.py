"""Compiled rules: what a decision point asks, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from muxk.policies.answers import Answer
from muxk.policies.closures import Run
from muxk.policies.expressions import Expression
from muxk.policies.marks import Scalar
from muxk.policies.problems import Mark, explain
from muxk.policies.vocabulary import Name


class OnError(StrEnum):
    """Who answers when a rule fails."""

    DEFAULT = "default"
    """The built-in answer of the point."""
    NEXT = "next"
    """The next rule that matches."""
    BASE = "base"
    """The rules of the extended policy."""


@dataclass(frozen=True)
class Rule:
    """A compiled rule; `when` is None for one that always matches."""

    label: str
    """`point/name`."""
    when: Run | None
    then: Answer
    names: frozenset[str]
    """Names of the decision point that its condition and its answer mention."""
    mark: Mark
    when_text: str = ""
    """As written; empty for a rule without a condition."""
    then_text: str = ""
    when_node: Scalar | None = None
    condition: Expression | None = None
    """The checked condition, where there is one."""
    expressions: tuple[Expression, ...] = ()
    """Those of its answer."""

    @property
    def never(self) -> bool:
        """Whether its condition is false under the params in force."""
        return self.condition is not None and self.condition.constant is False

    @property
    def cost(self) -> int:
        """Of its condition and its answer together."""
        own = 0 if self.condition is None else self.condition.cost
        return own + sum(expression.cost for expression in self.expressions)

    @cached_property
    def when_reads(self) -> Mapping[str, Name]:
        """How to read what the condition mentions from the scope of its point, by its text."""
        return {} if self.condition is None else self.condition.reads

    @cached_property
    def then_reads(self) -> Mapping[str, Name]:
        """The same of the answer; sort keys read the scope of one request."""
        return {name: read for expression in self.expressions for name, read in expression.reads.items()}

    @cached_property
    def reads(self) -> Mapping[str, Name]:
        """Both."""
        return {**self.when_reads, **self.then_reads}


@dataclass(frozen=True, slots=True)
class Point:
    """The compiled rules of a decision point."""

    name: str
    rules: tuple[Rule, ...]
    """Those that can be reached."""
    fallback: Answer
    on_error: OnError
    written: tuple[Rule, ...] = field(default=())
    """All rules in the order of the file, those that can not be reached included."""
    base: Point | None = None
    """The rules that answer with `on_error: base`."""

    def ask(self, scope: Any, errors: list[str]) -> tuple[str, Any]:
        """The label of the rule that answers, and its answer; what went wrong is added to `errors`."""
        for rule in self.rules:
            try:
                if rule.when is None or rule.when(scope):
                    return rule.label, rule.then(scope)
            except Exception as error:  # a rule must never stop serving, whatever a view holds
                errors.append(f"{rule.label}: {explain(error)}")
                if self.on_error is not OnError.NEXT:
                    break
        if self.base is not None:
            return self.base.ask(scope, errors)
        return f"{self.name}/default", self.fallback(scope)


def reachable(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules up to the first that always matches, without those that never do."""
    reached: list[Rule] = []
    for rule in rules:
        if not rule.never:
            reached.append(rule)
            if rule.when is None:
                break
    return tuple(reached)
