"""Where actors ask the policy: the one in force answers, and what it answered is counted.

Each actor that decides owns one. Counts are by rule, so that whoever reads the state sees which rules fire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from muxk.kernel.policy import Policy, PolicyBook
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    Decision,
    FormAnswer,
    FormView,
    OrderAnswer,
    RequestClass,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)

NO_SERVICE: Mapping[str, float] = {}


class Decider:
    """Asks on behalf of one actor."""

    def __init__(self, book: PolicyBook, sha: str) -> None:
        self._book = book
        self.policy: Policy = book[sha]
        """The one in force."""
        self.counts: Counter[str] = Counter()
        """Answers by `point/rule`, and errors by `rule error: ...`, of the policy in force."""

    def use(self, sha: str) -> None:
        """Ask this policy of the book from now on."""
        self.policy = self._book[sha]
        self.counts.clear()

    @property
    def rule_errors(self) -> int:
        return sum(count for name, count in self.counts.items() if name.startswith("rule error"))

    def classify(self, request: RequestView) -> RequestClass:
        answer = self.policy.classify(request)
        self._count((answer.rule,), answer.errors)
        return answer.chosen

    def admit(self, view: AdmitView) -> AdmitAnswer:
        answer = self.policy.admit(view)
        self._count((answer.rule,), answer.errors)
        return answer

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float] = NO_SERVICE
    ) -> OrderAnswer:
        answer = self.policy.order(requests, now_ns, service)
        self._count((answer.rule,), answer.errors)
        return answer

    def form(self, view: FormView) -> FormAnswer:
        answer = self.policy.form(view)
        self._count((answer.rule,), answer.errors)
        return answer

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        self._count(decision.rules, decision.errors)
        return decision

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        answer = self.policy.victim(requests, now_ns)
        self._count((answer.rule,), answer.errors)
        return answer

    def retain(self, request: RequestView) -> RetainAnswer:
        answer = self.policy.retain(request)
        self._count((answer.rule,), answer.errors)
        return answer

    def _count(self, rules: tuple[str, ...], errors: tuple[str, ...]) -> None:
        for rule in rules:
            self.counts[rule] += 1
        for error in errors:
            self.counts[f"rule error: {error}"] += 1
