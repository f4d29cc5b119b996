"""What the kernel takes of an answer that breaks its contract.

Policies of the language can not give such answers; one written in Python can. Each function returns the
answer itself when it keeps the contract, else the nearest one that does, with an error that is counted. The
errors are few and fixed, as counts are kept by their text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from muxk.kernel.view import ClassAnswer, Limits, OrderAnswer, VictimAnswer

BACKLOG_MAX = 4
DECODE_AHEAD_MAX = 1
DECODE_FLOOR_MAX_NS = 600_000_000_000
QUEUE_BOUND_MAX = 1_000_000
PREEMPTIONS_MAX = 1_000_000
PARKED_BYTES_MAX = 1 << 50
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


def _within(value: int, least: int, most: int) -> int:
    return min(most, max(least, value))
