"""Why a request is where it is: the reasons that actors give, and how theirs are put together.

Every request that was accepted and has not ended is reported by at least one actor, unless it is on its way
between two. Some are reported by two: admission knows the place of the queue's head, the arbiter why its
batch is not formed. `Reason` is in the order in which they count: of two reasons the later one says more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

STATUSES_MAX = 256
"""Requests that an actor reports unasked, first those that are served first."""


class Reason(StrEnum):
    """The closed set of codes; of two for one request the later one in this list counts."""

    ENCODING = "encoding"
    """tokenizer: its prompt is not tokens yet."""
    PLACING = "placing"
    """placement: no group of devices was chosen for it yet."""
    QUEUED = "queued"
    """admission: it waits for prefill, others go first in the policy's order."""
    CLASS_SHARE = "class_share"
    """admission: others go first because its class got more than its share lately."""
    EVICTED = "evicted"
    """admission, decode: its pages went to others; it waits to be computed again."""
    NO_PAGES = "no_pages"
    """admission: it is first, and its prompt needs more KV pages than are free."""
    FORMING = "forming"
    """admission, arbiter, prefill: its batch is being put together."""
    LANE_BUSY = "lane_busy"
    """arbiter: it is first, and a batch runs that is not preempted for it."""
    PREFILL_HELD = "prefill_held"
    """arbiter: the split in force has no units for prefill."""
    PREFILLING = "prefilling"
    """arbiter: layers of its batch run, or are next."""
    PARKED = "parked"
    """arbiter: its batch was preempted and goes on later."""
    MIGRATING = "migrating"
    """migration: its KV moves to the device that decodes it, or waits for pages there."""
    DECODING = "decoding"
    """decode: it gets a token with each step."""
    DECODE_HELD = "decode_held"
    """arbiter: the decode step it is in is held, the split in force has no units for decode."""
    NO_PAGE = "no_page"
    """decode: it has no slot for its next token until the pool has a page for it."""
    ENDING = "ending"
    """decode: it has ended or is being stopped; a step that it is in has not."""


class RequestStatus(msgspec.Struct, frozen=True):
    """What one actor knows of one request."""

    request_id: int
    """The server's own id of one choice."""
    where: str
    """The actor that reports it."""
    code: Reason
    detail: str
    """A sentence for people, with the figures of the moment."""
    rule: str | None = None
    """`point/rule` of the policy's rule that decided it, if one did."""


class StatusReport:
    """What one actor reports: its first requests, and those that were asked for."""

    def __init__(self, where: str, asked: Collection[int]) -> None:
        self.where = where
        self._asked = frozenset(asked)
        self.statuses: list[RequestStatus] = []
        self.total = 0
        """Requests it was told of, reported or not."""

    def wants(self, request_id: int) -> bool:
        """Count a request; True when `add` is to be called for it."""
        self.total += 1
        return len(self.statuses) < STATUSES_MAX or request_id in self._asked

    def add(self, request_id: int, code: Reason, detail: str, rule: str | None = None) -> None:
        self.statuses.append(RequestStatus(request_id, self.where, code, detail, rule))


def strongest(statuses: Iterable[RequestStatus]) -> dict[int, RequestStatus]:
    """By request the status that counts, of all that actors reported."""
    order = {reason: place for place, reason in enumerate(Reason)}
    found: dict[int, RequestStatus] = {}
    for status in statuses:
        known = found.get(status.request_id)
        if known is None or order[status.code] > order[known.code]:
            found[status.request_id] = status
    return found
