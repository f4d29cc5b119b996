"""Shadow mode: a second policy is asked the same questions as the one in force, and never acts.

It sees what the policy in force sees: its SLOs change no deadline, and its classes only its own answers. What
it raises is counted; one that keeps answering slowly is given up, so that it can not hurt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from muxk.kernel.journal import OrderQuestion, ShadowAnswer, VictimQuestion
from muxk.kernel.placing import PlaceView
from muxk.kernel.policy import Policy, PolicyText
from muxk.kernel.view import AdmitView, Decision, FormView, RequestView

SLOW_NS = 2_000_000
"""An answer that takes longer holds up tokens."""
SLOW_ANSWERS_MAX = 8
"""A shadow that was slow so often is asked no more."""

QUESTIONS = ("classify", "admit", "order", "form", "decide", "victim", "retain", "place")


def ask(policy: Policy, point: str, view: Any) -> Any:
    """Ask a policy a question that was asked before, as the journal has it."""
    if point == "order":
        return policy.order(view.requests, view.now_ns, view.service)
    if point == "victim":
        return policy.victim(view.requests, view.now_ns)
    assert point in QUESTIONS, point
    return getattr(policy, point)(view)


def effects(point: str, answer: Any) -> dict[str, Any]:
    """What an answer does, by decision point: answers with the same effects agree, whatever rules said so."""
    if isinstance(answer, Decision):
        by_point: dict[str, Any] = {
            "split": answer.split,
            "preempt": answer.preempt,
            "slice": (answer.layers, answer.tokens, answer.fuse),
        }
        asked = {rule.partition("/")[0] for rule in answer.rules}
        return {name: effect for name, effect in by_point.items() if name in asked or not asked}
    if point == "classify":
        return {point: answer.chosen}
    if point == "admit":
        return {point: answer.action}
    if point == "order":
        return {point: answer.order}
    if point == "form":
        return {point: (answer.max_requests, answer.max_tokens)}
    if point == "place":
        return {point: answer.actions}
    return {point: answer.index if point == "victim" else answer.keep}


def in_classes_of(policy: Policy, point: str, view: Any) -> Any:
    """A question as a policy gets it that has other classes than the one it was put to first."""
    replace = msgspec.structs.replace

    def own(request: RequestView) -> RequestView:
        return replace(request, class_name=policy.classify(request).chosen.name)

    if isinstance(view, RequestView):
        return view if point == "classify" else own(view)
    if isinstance(view, AdmitView):
        return replace(view, request=own(view.request))
    if isinstance(view, FormView):
        return replace(view, head=own(view.head))
    if isinstance(view, OrderQuestion):
        return OrderQuestion(view.now_ns, tuple(map(own, view.requests)), {})
    if isinstance(view, VictimQuestion):
        return VictimQuestion(view.now_ns, tuple(map(own, view.requests)))
    if isinstance(view, PlaceView):
        return replace(view, queue=tuple(map(own, view.queue)))
    return view


class ShadowTally:
    """How often a shadow was asked and differed, by decision point; all actors of a server add to one."""

    def __init__(self, policy: Policy, text: PolicyText | None = None) -> None:
        self.policy = policy
        self.text = text
        self.asked: Counter[str] = Counter()
        self.differed: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        """By what it said, cut; the latest last."""
        self.slow = 0
        self.given_up = ""
        """Why it is asked no more, or empty."""

    def describe(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"policy": self.policy.name, "sha": self.policy.sha}
        for point, asked in sorted(self.asked.items()):
            differed = self.differed[point]
            shown[point] = f"{differed} of {asked} differ ({100 * differed / asked:.1f}%)"
        shown["errors"] = sum(self.errors.values())
        if self.errors:
            shown["latest errors"] = dict(list(self.errors.items())[-ERRORS_SHOWN:])
        if self.given_up:
            shown["given up"] = self.given_up
        return shown


ERRORS_KEPT = 32
OTHERS = "others"
ERRORS_SHOWN = 4
ERROR_CHARS = 200


class Shadow:
    """Asks a shadow on behalf of one actor."""

    def __init__(self, tally: ShadowTally, now_ns: Callable[[], int]) -> None:
        self._policy = tally.policy
        self.tally = tally
        self._now_ns = now_ns

    def compare(self, point: str, view: Any, answer: Any, classes: tuple[str, ...]) -> ShadowAnswer | None:
        """What the shadow says to a question where it differs from the answer of the policy in force.

        Args:
            classes: of the policy in force; when the shadow has others, requests get its own.
        """
        tally = self.tally
        if tally.given_up:
            return None
        began_ns = self._now_ns()
        try:
            if self._policy.classes != classes:
                view = in_classes_of(self._policy, point, view)
            own = ask(self._policy, point, view)
            differs = self._count(effects(point, answer), effects(point, own))
        except Exception as error:  # whatever is wrong with it, the policy in force goes on
            self._note_error(f"{point}: {error!r}")
            return None
        finally:
            self._note_time(self._now_ns() - began_ns)
        for text in own.errors:
            self._note_error(text)
        return ShadowAnswer(self._policy.sha, own, differs) if differs else None

    def _count(self, effects_of_active: dict[str, Any], effects_of_shadow: dict[str, Any]) -> tuple[str, ...]:
        """Points at which the two differ; one that only one of them was asked is no difference of its own."""
        tally = self.tally
        differs = []
        for point, effect in effects_of_active.items():
            if point in effects_of_shadow:
                tally.asked[point] += 1
                if effect != effects_of_shadow[point]:
                    tally.differed[point] += 1
                    differs.append(point)
        return tuple(differs)

    def _note_error(self, text: str) -> None:
        errors = self.tally.errors
        text = text[:ERROR_CHARS]
        name = text if text in errors or len(errors) < ERRORS_KEPT else OTHERS
        errors[name] = errors.pop(name, 0) + 1  # the latest is the last

    def _note_time(self, spent_ns: int) -> None:
        tally = self.tally
        if spent_ns > SLOW_NS:
            tally.slow += 1
            if tally.slow >= SLOW_ANSWERS_MAX:
                tally.given_up = f"{tally.slow} answers took more than {SLOW_NS // 1_000_000} ms"
