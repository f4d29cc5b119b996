"""Which records of a journal, or of a recorded run, answer a question of `muxk explain`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from muxk.kernel.journal import OrderQuestion, Record, VictimQuestion
from muxk.kernel.view import AdmitView, FormAnswer, FormView, PrefillView, RequestView, View
from muxk.policies.explain import request_ids

ORDERS_TOLD = 2
"""Answers of `order` that are told of one request: it may have been in hundreds."""


def latest(records: Sequence[Record], count: int) -> list[Record]:
    """The last ones to happen, in the order of time."""
    return sorted(records, key=lambda record: record.last_at_ns)[-count:]


def around(records: Sequence[Record], at_ns: int, count: int) -> list[Record]:
    """Those nearest to a moment, in the order of time; a run of equal decisions may span it."""
    nearest = sorted(records, key=lambda record: _distance_ns(record, at_ns))[:count]
    return sorted(nearest, key=lambda record: record.at_ns)


def _distance_ns(record: Record, at_ns: int) -> int:
    return max(record.at_ns - at_ns, at_ns - record.last_at_ns, 0)


def about(records: Sequence[Record], requests: Collection[int], count: int) -> list[Record]:
    """Those that touched a request: its own, then where it stood in the queue, then those of its batch."""
    wanted = frozenset(requests)
    own, orders, arrivals = [], [], dict.fromkeys(_led_batches(records, wanted))
    for record in records:
        if wanted.isdisjoint(request_ids(record)):
            continue
        if isinstance(record.view, OrderQuestion):
            orders.append(record)
            continue
        own.append(record)
        request = _request_of(record, wanted)
        if request is not None:
            arrivals[request.arrival_ns] = None
    batches = [record for record in records if _is_of_batch(record, arrivals)]
    chosen = [*own[:count], *orders[-ORDERS_TOLD:]]
    chosen += batches[-max(0, count - len(chosen)) :] if len(chosen) < count else []
    kept = {id(record) for record in chosen}
    return [record for record in records if id(record) in kept]


def _request_of(record: Record, wanted: frozenset[int]) -> RequestView | None:
    view = record.view
    if isinstance(view, RequestView):
        return view
    if isinstance(view, AdmitView):
        return view.request
    if isinstance(view, FormView):
        return view.head
    if isinstance(view, VictimQuestion):
        return next(request for request in view.requests if request.request_id in wanted)
    return None


def _led_batches(records: Sequence[Record], wanted: frozenset[int]) -> list[int]:
    """Arrivals of the oldest requests of the batches that took a request: views name a batch by that.

    Admission asks `order`, then `form` at the same moment, and takes the first ones that fit.
    """
    found = []
    ordered: Record | None = None
    for record in records:
        if isinstance(record.view, OrderQuestion):
            ordered = record
        elif isinstance(record.answer, FormAnswer) and ordered is not None and ordered.at_ns == record.at_ns:
            taken = _taken(ordered, record.answer)
            if any(request.request_id in wanted for request in taken):
                found.append(min(request.arrival_ns for request in taken))
    return found


def _taken(ordered: Record, form: FormAnswer) -> list[RequestView]:
    taken: list[RequestView] = []
    tokens = 0
    for index in ordered.answer.order:
        request = ordered.view.requests[index]
        tokens += request.prompt_tokens + request.generated_tokens
        if taken and (len(taken) >= form.max_requests or tokens > form.max_tokens):
            break
        taken.append(request)
    return taken


def _is_of_batch(record: Record, arrivals: Collection[int]) -> bool:
    view = record.view
    if not isinstance(view, View):
        return False
    batches: tuple[PrefillView | None, ...] = (view.candidate, view.running, view.parked)
    return any(batch is not None and batch.arrival_ns in arrivals for batch in batches)
