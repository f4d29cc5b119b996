"""`decode: fastest` alone: the units with the shortest estimated decode step, and for how long they stay so.

Estimates are straight lines between the knots of their ramps. While the rows, the tables and what runs beside
a step stay the same, only the context grows, by a few tokens a step: the units that are fastest now are so up
to a context that is found from the lines.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from muxk.kernel.estimates import DecodeModel, Estimates
from muxk.kernel.view import View
from muxk.kernel.work import Split
from muxk.policies.scopes import DecideScope, estimate_decode_on, has_prefill

APART = 1e-9
"""Times that are nearer to each other than this part of themselves may change places by rounding."""
SURE = 0.999
"""Of the way to where two lines cross."""


class Known(NamedTuple):
    """An answer, and when it is the same."""

    estimates: Estimates
    splits: tuple[Split, ...]
    batch: int
    first: int
    last: int
    """Of the context, both included."""
    units: int

    def holds(self, view: View) -> bool:
        """Whether it is the answer to a view for sure."""
        decode = view.decode
        return (
            self.first <= decode.context_tokens <= self.last
            and self.batch == decode.batch
            and self.estimates is view.estimates
            and self.splits is view.splits
            and not has_prefill(view)
        )


class FastestAlone:
    """The closure. It remembers one answer, which it would find again."""

    def __init__(self) -> None:
        self.known: Known | None = None
        """That answer."""

    def __call__(self, scope: DecideScope) -> Split:
        """All units on a cold start, and where no others are faster."""
        view, known = scope.view, self.known
        if known is not None and known.holds(view):
            return Split(known.units, 0)
        decode = view.decode
        best = view.units_total
        if view.estimates.decode and view.splits:
            estimate_decode_on(scope, [*(split.decode_units for split in view.splits), best])
            best = _fastest(scope)
            if decode.batch and not has_prefill(view):
                last = _same_until(scope, best)
                context, splits = decode.context_tokens, view.splits
                self.known = Known(view.estimates, splits, decode.batch, context, last, best)
        return Split(best, 0)


def _fastest(scope: DecideScope) -> int:
    best = scope.view.units_total
    least_ns = scope.step_ns[best]
    for split in reversed(scope.view.splits):
        step_ns = scope.step_ns[split.decode_units]
        if step_ns < least_ns:
            best, least_ns = split.decode_units, step_ns
    return best


def _same_until(scope: DecideScope, best: int) -> int:
    """The longest context up to which the units that are fastest now surely are."""
    view = scope.view
    context, best_ns = view.decode.context_tokens, scope.step_ns[best]
    best_slope, last = _line(view, best)
    for units, step_ns in scope.step_ns.items():
        if units == best:
            continue
        slope, end = _line(view, units)
        last = min(last, end)
        lead_ns = step_ns - best_ns
        if lead_ns <= APART * best_ns:
            return context
        if slope < best_slope:
            last = min(last, context + SURE * lead_ns / (best_slope - slope))
    return int(last)


def _line(view: View, units: int) -> tuple[float, float]:
    """ns for each token of context on some units, and up to which context."""
    model = _model(view.estimates, units)
    if model.rows is None or model.context is None:
        return model.per_context_token_ns * model.guard, float(1 << 62)
    knots = model.context.knots
    place = bisect_right(knots, view.decode.context_tokens)
    return model.context.slopes[place - 1] * model.guard, knots[place] - 1 if place < len(knots) else 1 << 62


def _model(estimates: Estimates, units: int) -> DecodeModel:
    """The one of the most measured units that are not more."""
    found = estimates.decode[0]
    for model in estimates.decode:
        if model.units > units:
            break
        found = model
    return found
