"""Which records of a journal, or of a recorded run, answer a question of `muxk explain`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from muxk.kernel.journal import OrderQuestion, Record, VictimQuestion
from muxk.kernel.view import AdmitView, FormAnswer, FormView, OrderAnswer, PrefillView, RequestView, View
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
    forms, arrivals = _batches_of(records, wanted)
    own, orders = [], []
    for record in records:
        if record in forms:
            own.append(record)
        elif wanted.isdisjoint(request_ids(record)):
            continue
        elif isinstance(record.view, OrderQuestion):
            orders.append(record)
        else:
            own.append(record)
            request = _request_of(record, wanted)
            arrivals += [] if request is None else [request.arrival_ns]
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


def _batches_of(records: Sequence[Record], wanted: frozenset[int]) -> tuple[list[Record], list[int]]:
    """Answers of `form` that took a request, and the arrivals by which views name their batches.

    That is of the oldest request in it.
    Admission asks `order`, then `form` at the same moment, and takes the first ones that fit. Each question
    is read once: this may run beside the server, whose journal forgets them when they grow old.
    """
    forms: list[Record] = []
    arrivals: list[int] = []
    ordered: tuple[OrderQuestion, OrderAnswer] | None = None
    for record in records:
        view, answer = record.view, record.answer
        if isinstance(view, OrderQuestion):
            ordered = view, answer
        elif isinstance(answer, FormAnswer) and ordered is not None and ordered[0].now_ns == record.at_ns:
            taken = _taken(*ordered, answer)
            if any(request.request_id in wanted for request in taken):
                forms.append(record)
                arrivals.append(min(request.arrival_ns for request in taken))
    return forms, arrivals


def _taken(question: OrderQuestion, order: OrderAnswer, form: FormAnswer) -> list[RequestView]:
    taken: list[RequestView] = []
    tokens = 0
    for index in order.order:
        request = question.requests[index]
        tokens += request.prompt_tokens + request.generated_tokens
        if taken and (len(taken) >= form.max_requests or tokens > form.max_tokens):
            break
        taken.append(request)
    return taken


def _is_of_batch(record: Record, arrivals: Collection[int]) -> bool:
    """Whether a decision, the first of a run or the last, was about one of these batches."""
    batches: list[PrefillView | None] = []
    for view in (record.view, record.last_view):
        if isinstance(view, View):
            batches += [view.candidate, view.running, view.parked]
    return any(batch is not None and batch.arrival_ns in arrivals for batch in batches)
