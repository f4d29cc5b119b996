"""What classes add to the order of the waiting queue: long waits first, then shares of the prefill tokens.

Between classes whoever got the least service for its share goes next, and is charged for what it sends
(start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996). Within a class the sort keys of the policy
hold. The head of the answer is the same whether all requests are asked about or it and any other: the class
with the least service goes first, whoever else waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from muxk.kernel.view import RequestView
from muxk.policies.classes import Classes


def with_classes(
    order: Sequence[int],
    requests: Sequence[RequestView],
    classes: Classes,
    now_ns: int,
    service: Mapping[str, float],
) -> tuple[int, ...]:
    """The order of a queue once classes have their say.

    Args:
        order: indices of `requests`, as the sort keys have them.
        service: prefill tokens that each class got, over its share. A class that is not named counts as the
            one with the least.
    """
    overdue: list[int] = []
    rest = list(order)
    if classes.has_max_wait:
        overdue, rest = _overdue(order, requests, classes, now_ns)
    if classes.has_shares:
        rest = _interleaved(overdue, rest, requests, classes, service)
    return (*overdue, *rest)


def _overdue(
    order: Sequence[int], requests: Sequence[RequestView], classes: Classes, now_ns: int
) -> tuple[list[int], list[int]]:
    """Requests that waited longer than their class allows, by when that was; and the others."""
    due_ns: dict[int, int] = {}
    rest = []
    for index in order:
        request = requests[index]
        max_wait_ns = classes.named(request.class_name).max_wait_ns
        if max_wait_ns is not None and request.arrival_ns + max_wait_ns <= now_ns:
            due_ns[index] = request.arrival_ns + max_wait_ns
        else:
            rest.append(index)
    return sorted(due_ns, key=due_ns.__getitem__), rest


def _interleaved(
    first: Sequence[int],
    order: Sequence[int],
    requests: Sequence[RequestView],
    classes: Classes,
    service: Mapping[str, float],
) -> list[int]:
    """Requests of all classes, the class with the least service next; `first` goes before and is charged."""
    least = min(service.values(), default=0.0)
    got = [service.get(row.name, least) for row in classes.rows]

    def charge(index: int) -> int:
        row = classes.named(requests[index].class_name)
        got[row.rank] += _tokens(requests[index]) / row.weight
        return row.rank

    for index in first:
        charge(index)
    queues: list[list[int]] = [[] for _ in classes.rows]
    for index in reversed(order):
        queues[classes.named(requests[index].class_name).rank].append(index)
    heap = [(got[rank], rank) for rank, queue in enumerate(queues) if queue]
    heapq.heapify(heap)
    answer = []
    while heap:
        _, rank = heap[0]
        index = queues[rank].pop()
        answer.append(index)
        charge(index)
        if queues[rank]:
            heapq.heapreplace(heap, (got[rank], rank))
        else:
            heapq.heappop(heap)
    return answer


def _tokens(request: RequestView) -> int:
    """What its prefill computes, at most: a prefix that is there already is not known here."""
    return max(1, request.prompt_tokens + request.generated_tokens)
