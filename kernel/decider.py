"""Where actors ask the policy: the one in force answers, and its answers are counted and noted in a journal.

Each actor that decides owns one. Counts are by rule, so that whoever reads the state sees which rules fire. A
shadow policy, when there is one, is asked the same and never acts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muxk.kernel.journal import OrderQuestion, Questions, ShadowAnswer, VictimQuestion
from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.policy import Policy, PolicyBook
from muxk.kernel.sane import sane_class, sane_limits, sane_order, sane_place, sane_victim
from muxk.kernel.shadow import Shadow
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    Decision,
    FormAnswer,
    FormView,
    Limits,
    OrderAnswer,
    RequestClass,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)

COUNTS_MAX = 1024
"""Names that are counted by themselves: those of a policy written in Python may be without end."""
OTHERS = "others"
NO_SERVICE: Mapping[str, float] = {}


def _stands_still() -> int:
    return 0


class Decider:
    """Asks on behalf of one actor."""

    def __init__(
        self, book: PolicyBook, sha: str, actor: str = "", now_ns: Callable[[], int] = _stands_still
    ) -> None:
        """`now_ns` is the actor's: the moment of questions that do not hold one."""
        self._book = book
        self._journal = book.journal
        self._actor = actor
        self._now_ns = now_ns
        self._shadow: Shadow | None = None
        self.policy: Policy = book[sha]
        """The one in force."""
        self.limits: Limits = sane_limits(self.policy.limits)
        """Its limits, within what the kernel can enforce."""
        self._sha = self.policy.sha
        self.counts: Counter[str] = Counter()
        """Answers by `point/rule`, and errors by `rule error: ...`, of the policy in force."""

    def use(self, sha: str) -> None:
        """Ask this policy of the book from now on."""
        self.policy = self._book[sha]
        self.limits = sane_limits(self.policy.limits)
        self._sha = self.policy.sha
        self.counts.clear()

    @property
    def rule_errors(self) -> int:
        return sum(count for name, count in self.counts.items() if name.startswith("rule error"))

    def classify(self, request: RequestView) -> RequestClass:
        answer = sane_class(self.policy.classify(request), self.policy.classes)
        self._count((answer.rule,), answer.errors)
        self._note("classify", self._now_ns(), request, answer)
        return answer.chosen

    def admit(self, view: AdmitView) -> AdmitAnswer:
        answer = self.policy.admit(view)
        self._count((answer.rule,), answer.errors)
        self._note("admit", view.now_ns, view, answer)
        return answer

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float] = NO_SERVICE
    ) -> OrderAnswer:
        """The waiting queue; the caller must not change `requests` afterwards, which the journal keeps."""
        answer = self.peek_order(requests, now_ns, service)
        self._count((answer.rule,), answer.errors)
        if requests:
            self._note_many("order", OrderQuestion(now_ns, requests, dict(service)), answer)
        return answer

    def peek_order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float] = NO_SERVICE
    ) -> OrderAnswer:
        """`order`, on the side: it is not counted."""
        return sane_order(self.policy.order(requests, now_ns, service), len(requests))

    def form(self, view: FormView) -> FormAnswer:
        answer = self.policy.form(view)
        self._count((answer.rule,), answer.errors)
        self._note("form", view.now_ns, view, answer)
        return answer

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        self.take(view, decision)
        return decision

    def take(self, view: View, decision: Decision) -> None:
        """Count and note a decision."""
        self._count(decision.rules, decision.errors)
        shadow = None if self._book.shadow is None else self._compare("decide", view, decision)
        self._journal.note_run(self._actor, self._sha, view.now_ns, view, decision, shadow)

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        """Who is recomputed later; the caller must not change `requests` afterwards."""
        answer = sane_victim(self.policy.victim(requests, now_ns), len(requests))
        self._count((answer.rule,), answer.errors)
        self._note_many("victim", VictimQuestion(now_ns, requests), answer)
        return answer

    def retain(self, request: RequestView) -> RetainAnswer:
        answer = self.policy.retain(request)
        self._count((answer.rule,), answer.errors)
        self._note("retain", self._now_ns(), request, answer)
        return answer

    def place(self, view: PlaceView) -> PlaceAnswer:
        """Where requests go; asked often, so what does nothing and says nothing is not noted."""
        answer = sane_place(self.policy.place(view), view)
        self._count(answer.rules, answer.errors)
        if answer.actions or answer.errors:
            self._note_many("place", view, answer)
        return answer

    def _count(self, rules: tuple[str, ...], errors: tuple[str, ...]) -> None:
        counts = self.counts
        for rule in rules:
            if rule in counts:
                counts[rule] += 1
            else:
                self._count_name(rule)
        for error in errors:
            self._count_name(f"rule error: {error}")

    def _count_name(self, name: str) -> None:
        counts = self.counts
        counts[name if name in counts or len(counts) < COUNTS_MAX else OTHERS] += 1

    def _note(self, point: str, at_ns: int, view: Any, answer: Any) -> None:
        shadow = None if self._book.shadow is None else self._compare(point, view, answer)
        self._journal.note(self._actor, point, self.policy.sha, at_ns, view, answer, shadow)

    def _note_many(self, point: str, question: Questions, answer: Any) -> None:
        shadow = None if self._book.shadow is None else self._compare(point, question, answer)
        self._journal.note_of_many(self._actor, point, self.policy.sha, question, answer, shadow)

    def _compare(self, point: str, view: Any, answer: Any) -> ShadowAnswer | None:
        """What the shadow policy says where it differs; that policy may change between two questions."""
        tally = self._book.shadow
        assert tally is not None
        if self._shadow is None or self._shadow.tally is not tally:
            self._shadow = Shadow(tally, self._now_ns)
        return self._shadow.compare(point, view, answer, self.policy.classes)
