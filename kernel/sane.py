"""What the kernel takes of an answer that breaks its contract.

Policies of the language can not give such answers; one written in Python can. Each function returns the
answer itself when it keeps the contract, else the nearest one that does, with an error that is counted. The
errors are few and fixed, as counts are kept by their text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec
from muxk.kernel.placing import Action, Assign, Grow, Move, PlaceAnswer, PlaceView, Shrink
from muxk.kernel.view import ClassAnswer, Limits, OrderAnswer, VictimAnswer

BACKLOG_MAX = 4
DECODE_AHEAD_MAX = 1
DECODE_FLOOR_MAX_NS = 600_000_000_000
QUEUE_BOUND_MAX = 1_000_000
PREEMPTIONS_MAX = 1_000_000
PARKED_BYTES_MAX = 1 << 50
ACTIONS_MAX = 256
"""Of one answer of `place`; more than any plan for as many devices needs."""
SHARE_MAX = 1e9
SHARE_MIN = 1e-9


def sane_limits(limits: Limits) -> Limits:
    """The limits within what the kernel can enforce."""
    return Limits(
        backlog=_within(limits.backlog, 1, BACKLOG_MAX),
        decode_floor_ns=_within(limits.decode_floor_ns, 0, DECODE_FLOOR_MAX_NS),
        queue_bound=_within(limits.queue_bound, 1, QUEUE_BOUND_MAX),
        decode_ahead=_within(limits.decode_ahead, 0, DECODE_AHEAD_MAX),
        preemptions=_within(limits.preemptions, 0, PREEMPTIONS_MAX),
        parked_bytes=_within(limits.parked_bytes, 0, PARKED_BYTES_MAX),
    )


def sane_order(answer: OrderAnswer, count: int) -> OrderAnswer:
    """Each index once; those that are missing go last, in the sequence that was given."""
    order = answer.order
    if len(order) == count and all(0 <= index < count for index in order) and len(set(order)) == count:
        return answer
    kept = dict.fromkeys(index for index in order if 0 <= index < count)
    kept |= dict.fromkeys(range(count))
    errors = (*answer.errors, "order: the answer does not name each request once")
    return msgspec.structs.replace(answer, order=tuple(kept), errors=errors)


def sane_victim(answer: VictimAnswer, count: int) -> VictimAnswer:
    """An index of the requests; the last one when it is none."""
    if 0 <= answer.index < count:
        return answer
    errors = (*answer.errors, "victim: the answer is no index of the requests")
    return msgspec.structs.replace(answer, index=count - 1, errors=errors)


def sane_class(answer: ClassAnswer, classes: Sequence[str]) -> ClassAnswer:
    """A class of the policy, with a share that can be divided by and times that can be waited for."""
    chosen = answer.chosen
    errors = list(answer.errors)
    name = chosen.name
    if name not in classes:
        errors.append("classes: the answer is no class of the policy")
        name = classes[-1] if classes else "default"
    share = chosen.share
    if not SHARE_MIN <= share <= SHARE_MAX:
        errors.append("classes: a share that is not above 0, or too large")
        share = SHARE_MIN if share < SHARE_MIN else SHARE_MAX if math.isfinite(share) else 1.0
    waits_ns = [chosen.tbt_slo_ns, chosen.ttft_slo_ns, chosen.max_wait_ns or 0]
    if chosen.rank < 0 or min(waits_ns) < 0:
        errors.append("classes: a rank or a time below 0")
    if len(errors) == len(answer.errors):
        return answer
    sane = msgspec.structs.replace(
        chosen,
        name=name,
        rank=max(0, chosen.rank),
        tbt_slo_ns=max(0, chosen.tbt_slo_ns),
        ttft_slo_ns=max(0, chosen.ttft_slo_ns),
        share=share,
        max_wait_ns=None if chosen.max_wait_ns is None else max(0, chosen.max_wait_ns),
    )
    return msgspec.structs.replace(answer, chosen=sane, errors=tuple(errors))


def sane_place(answer: PlaceAnswer, view: PlaceView) -> PlaceAnswer:
    """Actions about requests of the queue, each sent once, and about devices and groups that are there."""
    waiting = {request.request_id for request in view.queue}
    kept: list[Action] = []
    for action in answer.actions[:ACTIONS_MAX]:
        sane = _sane_action(action, view, waiting)
        if sane is not None:
            kept.append(sane)
            if isinstance(sane, Assign):
                waiting.difference_update(sane.requests)
    if tuple(kept) == answer.actions:
        return answer
    errors = (*answer.errors, "place: the answer names what is not there")
    return msgspec.structs.replace(answer, actions=tuple(kept), errors=errors)


def _sane_action(action: Action, view: PlaceView, waiting: Collection[int]) -> Action | None:
    """What of an action can be done; None for nothing."""
    count = len(view.groups)
    if not 0 <= action.group < count:
        return None
    if isinstance(action, Move):
        return action if 0 <= action.to < count and action.to != action.group else None
    devices = tuple(dict.fromkeys(device for device in action.devices if 0 <= device < count))
    if isinstance(action, Grow | Shrink):
        sane = msgspec.structs.replace(action, devices=devices)
        return sane if devices and view.elastic else None
    requests = tuple(dict.fromkeys(request for request in action.requests if request in waiting))
    decode = action.decode
    known = decode is None or 0 <= decode < count
    keep = action.keep if view.elastic and action.keep is not None else None
    return (
        Assign(
            requests,
            action.group,
            devices if view.elastic else (),
            None if keep is None else max(1, keep),
            decode if known else None,
        )
        if requests
        else None
    )


def _within(value: int, least: int, most: int) -> int:
    return min(most, max(least, value))
