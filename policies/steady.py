"""The decision that is the last one again: while nothing but a decode batch runs, for most of its steps.

Where the answer is `decode: fastest` and the conditions up to it read nothing but what stays the same, only
the context grows from one question to the next, and `FastestAlone` knows how far its answer holds.
"""

from __future__ import annotations

from muxk.kernel.view import Decision, View
from muxk.policies.fastest import FastestAlone, Known
from muxk.policies.rules import Rule

SAME = frozenset({"decode.batch", "decode.coming", "prefill.pending", "prefill.in_flight"})
"""Names whose values are those of the question before: `Known.holds` compares the batch, and there is no
prefill."""


class Steady:
    """Remembers one decision of a policy with these rules of split."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._fastest: dict[str, FastestAlone] = {}
        """By label, answers that depend on nothing that changes from step to step but the context."""
        for rule in rules:
            if not rule.names <= SAME:
                break
            if isinstance(rule.then, FastestAlone):
                self._fastest[rule.label] = rule.then
        self._decision: Decision | None = None
        self._known: Known | None = None
        """How far it holds; None while nothing is remembered."""

    def again(self, view: View) -> Decision | None:
        """The decision, if it is the remembered one for sure."""
        known = self._known
        if known is None or view.prefill_in_flight or view.decode.coming:
            return None
        return self._decision if known.holds(view) else None

    def remember(self, view: View, decision: Decision) -> None:
        """What was decided with no prefill batch in the view."""
        self._known = None
        answer = self._fastest.get(decision.rules[0])
        if answer is None or decision.errors or view.prefill_in_flight or view.decode.coming:
            return
        if answer.known is not None and answer.known.holds(view):
            self._decision, self._known = decision, answer.known
