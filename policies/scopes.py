"""The scopes that expressions read, and the functions that they may call.

A scope is what the closures of one decision get: the view itself (admit, form), or a small object around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from muxk.kernel.estimates import Estimates
from muxk.kernel.view import AdmitView, FormView, PrefillView, RequestView, View
from muxk.kernel.work import PrefillShape, Split
from muxk.policies.problems import RuleError

KNOWN_MAX = 256
"""Times that are kept from one decision to the next; then all are forgotten and found again."""
NO_BATCH = "there is no prefill batch; ask prefill.pending first"


class DecideScope:
    """Scope of split, preempt and slice; filled in while `decide` goes from one to the next."""

    __slots__ = ("batch", "cell", "layer_ns", "split", "step_ns", "units", "view")

    def __init__(self, view: View, known: KnownLayers | None = None) -> None:
        """`known` are estimates that were asked for in earlier decisions."""
        self.view = view
        self.split = view.split
        """In force at first; then the one that the split rule chose, or tries."""
        self.units = 0
        """Units of the phase that `fewest` looks for, in the split it tries."""
        self.batch: PrefillView | None = view.running or view.parked or view.candidate
        """The prefill batch whose layers would be launched next."""
        self.cell: int | None = None
        """Of the guard's table; found when a step is estimated for the first time."""
        self.step_ns: dict[int, float] = {}
        self.layer_ns = {} if known is None else known.of(view.estimates)
        """Estimates asked so far, by units and by (units, tokens, pairs); rules ask for the same again."""


class KnownLayers:
    """Times of prefill layers from one decision to the next, which often ask for those of the same chunk."""

    def __init__(self) -> None:
        self._estimates: Estimates | None = None
        self._layer_ns: dict[tuple[int, int, int], float] = {}

    def of(self, estimates: Estimates) -> dict[tuple[int, int, int], float]:
        """Those by these tables, to look up and to add to: by (units, tokens, pairs)."""
        if estimates is not self._estimates or len(self._layer_ns) > KNOWN_MAX:
            self._estimates, self._layer_ns = estimates, {}
        return self._layer_ns


def has_prefill(view: View) -> bool:
    """Whether a decode step has to share the device with a prefill, now or soon."""
    return not (
        view.running is None and view.leaving is None and view.parked is None and view.candidate is None
    )


def _beside(view: View) -> PrefillShape | None:
    """The prefill that a decode step has to share the device with: the one whose layers go on, else the one
    that is about to leave, else the one that would begin."""
    batch = view.running
    if batch is None and view.leaving is not None:
        return view.leaving
    batch = batch or view.parked or view.candidate
    return None if batch is None else PrefillShape(batch.new_tokens, batch.reused_tokens)


class RequestScope:
    """Scope of sort keys, classes and retain; one object serves all requests of a sort."""

    __slots__ = ("now_ns", "request")

    def __init__(self, request: RequestView, now_ns: int) -> None:
        self.request = request
        self.now_ns = now_ns


class SortScope:
    """Scope of order and victim: conditions see how many requests there are, the answer sorts them."""

    __slots__ = ("count", "now_ns", "requests")

    def __init__(self, requests: Sequence[RequestView], now_ns: int) -> None:
        self.requests = requests
        self.count = len(requests)
        self.now_ns = now_ns


def prefill_time_ns(scope: DecideScope, batch: PrefillView) -> float:
    """Estimated time of what a batch has left, on the prefill units in force (else on all), in ns.

    The layers in flight as if none had run yet, the layers left of the chunk that was begun, and all layers
    of the tokens of no chunk yet, as one chunk.

    Raises:
        RuleError: nothing was measured yet.
    """
    units = scope.split.prefill_units or scope.view.units_total
    flight_ns = begun_ns = rest_ns = 0.0
    if batch.layers_launched:
        layer_ns = _layer_ns(scope, units, batch.launched_tokens, batch.launched_pairs)
        flight_ns = batch.layers_launched * layer_ns
    if batch.chunk_tokens:
        begun_ns = batch.layers_left * _layer_ns(scope, units, batch.chunk_tokens, batch.chunk_pairs)
    if batch.tokens_left:
        rest_ns = scope.view.layers * _layer_ns(scope, units, batch.tokens_left, batch.pairs_left)
    return _time(flight_ns + begun_ns + rest_ns)


def _layer_ns(scope: DecideScope, units: int, tokens: int, pairs: int) -> float:
    key = (units, tokens, pairs)
    known = scope.layer_ns.get(key)
    if known is not None:
        return known
    estimates = scope.view.estimates
    if not estimates.prefill:
        raise RuleError("no prefill was measured yet; ask estimate.known first")
    layer_ns = _time(estimates.prefill_layer_ns(units, tokens, pairs))
    scope.layer_ns[key] = layer_ns
    return layer_ns


def _time(value: float) -> float:
    if not 0 <= value < math.inf:
        raise RuleError("an estimate is not a time")
    return value


def estimate_decode(scope: DecideScope, units: float) -> float:
    """Guarded time of a decode step of the running batch on a number of units, in ns.

    The guard may look at the prefill beside it: the batch that runs, else who leaves or comes next. With no
    step running it is that of the rows that are coming.

    Raises:
        RuleError: no units, or nothing was measured yet.
    """
    known = scope.step_ns.get(whole := int(units))
    if known is not None:
        return known
    if whole < 1:
        raise RuleError("estimate.decode needs at least 1 unit")
    view = scope.view
    if not view.estimates.decode:
        raise RuleError("no decode step was measured yet; ask estimate.known first")
    decode = view.decode
    load = (decode.batch, decode.context_tokens) if decode.batch else (decode.coming, decode.coming_tokens)
    if not scope.step_ns:
        guarded = view.estimates.contention is not None
        scope.cell = view.estimates.cell(*load, _beside(view)) if guarded else None
    step_ns = _time(view.estimates.decode_in_cell_ns(whole, *load, scope.cell))
    scope.step_ns[whole] = step_ns
    return step_ns


def estimate_decode_on(scope: DecideScope, units: Sequence[int]) -> None:
    """`estimate_decode` on several numbers of units, ascending, at once: they are known from then on.

    Raises:
        RuleError: nothing was measured yet.
    """
    estimate_decode(scope, units[-1])
    decode = scope.view.decode
    load = (decode.batch, decode.context_tokens) if decode.batch else (decode.coming, decode.coming_tokens)
    for whole, step_ns in zip(
        units, scope.view.estimates.decode_times_ns(units, *load, scope.cell), strict=True
    ):
        scope.step_ns[whole] = _time(step_ns)


def estimate_prefill_layer(scope: DecideScope, units: float) -> float:
    """Time of one layer of the chunk that runs next on a number of units, in ns.

    That is the chunk that was begun, else all that is left of the batch that runs next.

    Raises:
        RuleError: no units, no batch, or nothing was measured yet.
    """
    if units < 1:
        raise RuleError("estimate.prefill_layer needs at least 1 unit")
    batch = scope.batch
    if batch is None:
        raise RuleError(NO_BATCH)
    if batch.chunk_tokens:
        return _layer_ns(scope, int(units), batch.chunk_tokens, batch.chunk_pairs)
    return _layer_ns(scope, int(units), batch.tokens_left, batch.pairs_left)


def estimate_chunk(scope: DecideScope, units: float, time_ns: float) -> int:
    """Most tokens that a chunk may have to run through all layers on a number of units within a time.

    Of the tokens in no chunk yet of the batch that runs next; 0 when not even one fits.

    Raises:
        RuleError: no units, no batch, or nothing was measured yet.
    """
    if units < 1:
        raise RuleError("estimate.chunk needs at least 1 unit")
    batch = scope.batch
    if batch is None:
        raise RuleError(NO_BATCH)
    fits, fails = 0, batch.tokens_left + 1
    while fails - fits > 1:
        tokens = (fits + fails) // 2
        layer_ns = _layer_ns(scope, int(units), tokens, _first_pairs(batch, tokens))
        if layer_ns * scope.view.layers <= time_ns:
            fits = tokens
        else:
            fails = tokens
    return fits


def estimate_prefill(view: AdmitView | FormView, requests: float, tokens: float) -> float:
    """Time to prefill prompts with so many tokens in all, one after the other on the whole device, in ns.

    They are taken to be alike in length: the sum of their lengths is known, that of the squares is not.

    Raises:
        RuleError: no requests, or nothing was measured yet.
    """
    if requests < 1:
        raise RuleError("estimate.prefill needs at least 1 request")
    estimates = view.estimates
    if not estimates.known:
        raise RuleError("no prefill was measured yet; ask estimate.known first")
    length = tokens / requests
    layer_ns = estimates.prefill[-1].layer_ns(round(length), round(length * (length + 1) / 2))
    return _time(requests * estimates.layers * layer_ns)


def _first_pairs(batch: PrefillView, tokens: int) -> int:
    """Query-key pairs of the first of the tokens left: exact for one prompt, near it for several."""
    left, pairs = batch.tokens_left, batch.pairs_left
    before = max(0.0, pairs / left - (left + 1) / 2)
    return min(pairs, tokens * (tokens + 1) // 2 + round(tokens * before))


def shared(view: View) -> Split:
    """One lane over the whole device, shared in time: legal on every device."""
    return Split(view.units_total, view.units_total)
