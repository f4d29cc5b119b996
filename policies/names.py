"""What expressions may name at each decision point, and the scopes that those names read.

A scope is what the closures of one decision get: the view itself (admit, form), or a small object around it.
A new name is one row here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from muxk.kernel.view import PrefillView, RequestView, View
from muxk.kernel.work import PAGE_SIZE, Split
from muxk.policies.problems import ABSENT, RuleError
from muxk.policies.units import Type
from muxk.policies.vocabulary import Constant, Function, Name, Vocabulary

_N, _D, _M, _B = Type.NUMBER, Type.DURATION, Type.MOMENT, Type.BOOL


class DecideScope:
    """Scope of split, preempt and slice; filled in while `decide` goes from one to the next."""

    __slots__ = ("batch", "layer_ns", "split", "step_ns", "units", "view")

    def __init__(self, view: View) -> None:
        self.view = view
        self.split = view.split
        """In force at first; then the one that the split rule chose, or tries."""
        self.units = 0
        """Units of the phase that `fewest` looks for, in the split it tries."""
        self.batch: PrefillView | None = view.running or view.parked or view.candidate
        """The prefill batch whose layers would be launched next."""
        self.step_ns: dict[int, float] = {}
        self.layer_ns: dict[tuple[int, int, int], float] = {}
        """Estimates asked so far, by units and by (units, tokens, pairs); rules ask for the same again."""


class RequestScope:
    """Scope of sort keys and of retain; one object serves all requests of a sort."""

    __slots__ = ("now_ns", "request")

    def __init__(self, request: RequestView, now_ns: int) -> None:
        self.request = request
        self.now_ns = now_ns


class SortScope:
    """Scope of the conditions of order and victim."""

    __slots__ = ("now_ns", "requests")

    def __init__(self, requests: int, now_ns: int) -> None:
        self.requests = requests
        self.now_ns = now_ns


def prefill_time_ns(scope: DecideScope, batch: PrefillView) -> float:
    """Estimated time of what a batch has left, on the prefill units in force (else on all), in ns.

    The layers left of the chunk that was begun, and all layers of the tokens of no chunk yet, as one chunk.

    Raises:
        RuleError: nothing was measured yet.
    """
    units = scope.split.prefill_units or scope.view.units_total
    begun_ns = rest_ns = 0.0
    if batch.chunk_tokens:
        begun_ns = batch.layers_left * _layer_ns(scope, units, batch.chunk_tokens, batch.chunk_pairs)
    if batch.tokens_left:
        rest_ns = scope.view.layers * _layer_ns(scope, units, batch.tokens_left, batch.pairs_left)
    return begun_ns + rest_ns


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
    step_ns = _time(view.estimates.decode_ns(whole, view.decode.batch, view.decode.context_tokens))
    scope.step_ns[whole] = step_ns
    return step_ns


def estimate_prefill_layer(scope: DecideScope, units: float) -> float:
    """Time of one layer of the chunk that runs next on a number of units, in ns.

    That is the chunk that was begun, else all that is left of the batch that runs next.

    Raises:
        RuleError: no units, no batch, or nothing was measured yet.
    """
    if units < 1:
        raise RuleError("estimate.prefill_layer needs at least 1 unit")
    batch = _next_batch(scope)
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
    batch = _next_batch(scope)
    fits, fails = 0, batch.tokens_left + 1
    while fails - fits > 1:
        tokens = (fits + fails) // 2
        layer_ns = _layer_ns(scope, int(units), tokens, _first_pairs(batch, tokens))
        if layer_ns * scope.view.layers <= time_ns:
            fits = tokens
        else:
            fails = tokens
    return fits


def _first_pairs(batch: PrefillView, tokens: int) -> int:
    """Query-key pairs of the first of the tokens left: exact for one prompt, near it for several."""
    left, pairs = batch.tokens_left, batch.pairs_left
    before = max(0.0, pairs / left - (left + 1) / 2)
    return min(pairs, tokens * (tokens + 1) // 2 + round(tokens * before))


def _next_batch(scope: DecideScope) -> PrefillView:
    if scope.batch is None:
        raise RuleError("there is no prefill batch; ask prefill.pending first")
    return scope.batch


def _batch_names(root: str, presence: str, attribute: str) -> dict[str, Name]:
    """Names of one prefill batch of the view; `presence` says whether it is there."""
    get: Callable[[Any], Any] = attrgetter(attribute)
    needs = f"{root}.{presence}"

    def plain(field: str, type_: Type, about: str) -> Name:
        return Name(type_, attrgetter(f"{attribute}.{field}"), about, needs)

    def derived(type_: Type, read: Callable[[Any, Any], Any], about: str) -> Name:
        return Name(type_, lambda scope: read(scope, get(scope)), about, needs)

    fields = {
        "requests": plain("requests", _N, "requests in the batch"),
        "new_tokens": plain("new_tokens", _N, "tokens to compute, from first to last"),
        "reused_tokens": plain("reused_tokens", _N, "tokens whose KV is there already"),
        "pairs": plain("pairs", _N, "query-key pairs to compute per head, from first to last"),
        "layers_left": plain("layers_left", _N, "layers not launched yet, of the chunk that was begun"),
        "chunk_tokens": plain("chunk_tokens", _N, "of the chunk that was begun; 0 between chunks"),
        "chunk_pairs": plain("chunk_pairs", _N, "query-key pairs of that chunk"),
        "tokens_left": plain("tokens_left", _N, "tokens to compute that are in no chunk yet"),
        "pairs_left": plain("pairs_left", _N, "query-key pairs of those"),
        "arrival": plain("arrival_ns", _M, "of its oldest request"),
        "deadline": plain("deadline_ns", _M, "earliest TTFT deadline"),
        "depth": plain("depth", _N, "1 if it preempted another batch, else 0"),
        "preemptions": plain("preemptions", _N, "how often it was parked"),
        "age": derived(_D, lambda scope, batch: scope.view.now_ns - batch.arrival_ns, "now - arrival"),
        "time_left": derived(_D, _time_left, "estimated time of all that is left, on the prefill units"),
        "slack": derived(_D, _slack, "deadline - now - time_left"),
    }
    names = {f"{root}.{field}": name for field, name in fields.items()}
    names[needs] = Name(_B, lambda scope: get(scope) is not None, "true when there is one")
    return names


def _time_left(scope: DecideScope, batch: PrefillView) -> float:
    _present(batch)
    return prefill_time_ns(scope, batch)


def _slack(scope: DecideScope, batch: PrefillView) -> float:
    _present(batch)
    return batch.deadline_ns - scope.view.now_ns - prefill_time_ns(scope, batch)


def _present(batch: PrefillView | None) -> None:
    if batch is None:
        raise RuleError(f"a value is absent: {ABSENT}")


def _candidate_fits(scope: DecideScope) -> bool:
    view, candidate = scope.view, scope.view.candidate
    if candidate is None:
        return False
    room = view.kv.pages_free * PAGE_SIZE
    return candidate.new_tokens + candidate.requests * PAGE_SIZE <= room


def _prefill_pending(scope: DecideScope) -> bool:
    return scope.batch is not None


def _resource_names(prefix: str) -> dict[str, Name]:
    """Names of the queue and the pool, in a scope that holds them under a prefix, `` or `view.`."""
    return {
        "queue.requests": Name(_N, attrgetter(prefix + "queue.requests"), "requests that wait for prefill"),
        "queue.tokens": Name(_N, attrgetter(prefix + "queue.tokens"), "their prompt tokens"),
        "kv.total": Name(_N, attrgetter(prefix + "kv.pages_total"), "pages of the pool"),
        "kv.free": Name(_N, attrgetter(prefix + "kv.pages_free"), "pages that an allocation can take"),
    }


def _decode_names(prefix: str) -> dict[str, Name]:
    """Names of the decode batch, in a scope that holds it under a prefix."""
    rows = (
        ("batch", "batch", _N, "rows of the decode step; 0 when nothing decodes"),
        ("context_tokens", "context_tokens", _N, "context of all rows"),
        ("waiting", "waiting", _B, "a step is submitted and not launched"),
        ("in_flight", "in_flight", _B, "a step runs"),
        ("idle", "idle_ns", _D, "time since the last step ended"),
    )
    return {
        f"decode.{key}": Name(type_, attrgetter(f"{prefix}decode.{field}"), about)
        for key, field, type_, about in rows
    }


def _request_names(root: str, attribute: str) -> dict[str, Name]:
    """Names of one request, `request` or `head`, at `attribute` of the scope."""
    rows = (
        ("arrival", "arrival_ns", _M, "when it arrived"),
        ("deadline", "deadline_ns", _M, "when its first token is due"),
        ("prompt_tokens", "prompt_tokens", _N, "tokens of the prompt"),
        ("generated_tokens", "generated_tokens", _N, "tokens it got so far"),
        ("max_tokens", "max_tokens", _N, "tokens it may get"),
        ("pages", "pages", _N, "KV pages it holds, or needs for its prompt"),
        ("priority", "priority", _N, "lower is sooner"),
        ("recomputes", "recomputes", _N, "how often it lost its pages"),
    )
    return {
        f"{root}.{key}": Name(type_, attrgetter(f"{attribute}.{field}"), about)
        for key, field, type_, about in rows
    }


def _timed_request_names(root: str) -> dict[str, Name]:
    """Names of a request that need the time; the scope has `now_ns`."""
    get: Callable[[Any], Any] = attrgetter(root)
    return {
        f"{root}.age": Name(_D, lambda scope: scope.now_ns - get(scope).arrival_ns, "now - arrival"),
        f"{root}.slack": Name(_D, lambda scope: get(scope).deadline_ns - scope.now_ns, "deadline - now"),
    }


_NOW: Mapping[str, Name] = {"now": Name(_M, attrgetter("now_ns"), "the time")}
_DECIDE: Mapping[str, Name] = {
    "now": Name(_M, attrgetter("view.now_ns"), "the time"),
    "units.total": Name(_N, attrgetter("view.units_total"), "units of the device"),
    "layers.total": Name(_N, attrgetter("view.layers"), "layers of the model"),
    **_decode_names("view."),
    **_resource_names("view."),
    "prefill.pending": Name(_B, _prefill_pending, "a batch runs, is parked, or could be formed"),
    "prefill.in_flight": Name(_N, attrgetter("view.prefill_in_flight"), "prefill items on the device"),
    **_batch_names("running", "active", "view.running"),
    **_batch_names("parked", "waiting", "view.parked"),
    **_batch_names("candidate", "waiting", "view.candidate"),
    "candidate.fits": Name(_B, _candidate_fits, "there is a candidate, and pages for all of it"),
    "estimate.known": Name(_B, attrgetter("view.estimates.known"), "false until something was measured"),
}
_SPLIT_CHOSEN: Mapping[str, Name] = {
    "decode.units": Name(_N, attrgetter("split.decode_units"), "of the split just chosen"),
    "prefill.units": Name(_N, attrgetter("split.prefill_units"), "of the split just chosen"),
}
_UNITS = ("units", _N)
_ESTIMATES: Mapping[str, Function] = {
    "estimate.decode": Function(
        (_UNITS,), _D, estimate_decode, "decode step of the running batch on so many units", 10
    ),
    "estimate.prefill_layer": Function(
        (_UNITS,), _D, estimate_prefill_layer, "one layer of the chunk that runs next", 10
    ),
    "estimate.chunk": Function(
        (_UNITS, ("time", _D)), _N, estimate_chunk, "tokens that fit into a time, through all layers", 80
    ),
}
_SORT_NAMES: Mapping[str, Name] = {
    **_NOW,
    "queue.requests": Name(_N, attrgetter("requests"), "requests to choose from"),
}
_KEY_NAMES: Mapping[str, Name] = {
    **_NOW,
    **_request_names("request", "request"),
    **_timed_request_names("request"),
}

PLACES: Mapping[str, Mapping[str, Name]] = {
    "admit": {
        **_NOW,
        **_request_names("request", "request"),
        **_timed_request_names("request"),
        **_resource_names(""),
        "queue.bound": Name(_N, attrgetter("queue_bound"), "limits.queue of the policy"),
    },
    "order": _SORT_NAMES,
    "a key of order": _KEY_NAMES,
    "form": {
        **_NOW,
        **_request_names("head", "head"),
        **_timed_request_names("head"),
        **_resource_names(""),
        **_decode_names(""),
    },
    "split": _DECIDE,
    "fewest": {**_DECIDE, "units": Name(_N, attrgetter("units"), "units that are tried for this phase")},
    "preempt": {**_DECIDE, **_SPLIT_CHOSEN},
    "slice": {**_DECIDE, **_SPLIT_CHOSEN},
    "victim": _SORT_NAMES,
    "a key of victim": _KEY_NAMES,
    "retain": _request_names("request", "request"),
    "limits": {},
    "slo": {},
}
"""Names of each place that holds expressions."""

_WITH_ESTIMATES = ("split", "fewest", "preempt", "slice")


def vocabulary(place: str, constants: Mapping[str, Constant]) -> Vocabulary:
    """What expressions of a place may name; `constants` are the policy's params and SLOs."""
    functions = _ESTIMATES if place in _WITH_ESTIMATES else {}
    elsewhere = {name: other for other, names in PLACES.items() for name in names}
    return Vocabulary(place, {**PLACES[place], **constants}, functions, elsewhere)


def shared(view: View) -> Split:
    """One lane over the whole device, shared in time: legal on every device."""
    return Split(view.units_total, view.units_total)
