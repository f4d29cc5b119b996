"""What a policy is told, and may answer, where one server has several devices: the `place` decision.

A *group* is a set of devices that work as one: one arbiter, one KV pool, one running batch. There is one for
each device, which leads it and gives it its number; a group without devices sleeps, since its leader works in
another one. In the beginning each group has its leader and nothing else. Devices of a group with more than
one compute a prefill and a decode step together (sequence parallelism); only elastic devices can do that.
"""

from __future__ import annotations

import msgspec
from muxk.kernel.estimates import Estimates
from muxk.kernel.view import RequestView

PLACE_QUEUE_MAX = 64
"""Requests of the queue that `place` sees."""


class GroupView(msgspec.Struct, frozen=True):
    """A group and what it has to do."""

    group: int
    """Index of the device that leads it."""
    devices: tuple[int, ...]
    """Ascending; empty while it sleeps."""
    waiting: int
    """Requests that were sent to it and whose prompts are not computed."""
    pending_tokens: int
    """Of their prompts."""
    incoming: int
    """Requests that decode here later: they are computed elsewhere, or their KV is on its way."""
    decoding: int
    """Requests of its running batch."""
    context_tokens: int
    """Of the running batch."""
    promised_pages: int
    """Pages that all of these hold or will need for their prompts and longest answers."""
    pages_total: int
    pages_free: int
    since_ns: int = 0
    """When it got its present devices, computed its last prompts, or lost its last work: the latest."""
    leaving: tuple[int, ...] = ()
    """Of its devices, those that it gives up as soon as their pages are free."""
    prefill_since_ns: int = 0
    """When the first of the prompts that wait here was sent."""
    answers_since_ns: int = 0
    """When the rows of its running batch began to decode, on the mean."""
    newest_since_ns: int = 0
    """When the last one did that came to it."""

    @property
    def idle(self) -> bool:
        """It has devices and nothing to do."""
        return bool(self.devices) and not (self.waiting or self.incoming or self.decoding)


class PlaceView(msgspec.Struct, frozen=True):
    """What `Policy.place` sees."""

    now_ns: int
    queue: tuple[RequestView, ...]
    """The first PLACE_QUEUE_MAX requests that were sent to no group yet, by arrival. `pages` of each are
    those of its prompt."""
    waiting: int
    """All of them."""
    groups: tuple[GroupView, ...]
    """By number; one for each device."""
    layers: int
    units: int
    """Of one device."""
    elastic: bool
    """Whether a group may have several devices."""
    page_tokens: int
    page_bytes: int
    """KV of one page on one device: what a migration moves."""
    link_bytes_per_ns: float
    """Between two devices; 0 where it is not known."""
    answer_tokens: float
    """Mean length of the answers that ended, 0 before the first."""
    width_factors: tuple[float, ...] = ()
    """By number of devices, from 1: measured time of a prefill by so many over the estimate for one divided
    by the number; 1 where nothing was measured."""
    estimates: Estimates = Estimates()
    """Of one device."""
    overtaken: int = 0
    """Answers in a row that sent a request before one that came earlier; 0 after one in order."""

    @property
    def between_groups(self) -> int:
        """Devices that one group gave up and another does not have yet; `place` is asked when it does."""
        return len(self.groups) - sum(len(group.devices) for group in self.groups) if self.elastic else 0


class Assign(msgspec.Struct, frozen=True, tag=True):
    """Send requests of the queue to a group."""

    requests: tuple[int, ...]
    """By id; at least one."""
    group: int
    devices: tuple[int, ...] = ()
    """Devices of groups with nothing to do that it gets first. A sleeping group needs its leader among them,
    or it is the leader of another one's: then the request is refused as illegal."""
    keep: int | None = None
    """How many of its devices it keeps when these prompts are computed, its leader first: their KV is placed
    there (proactive scale-down of LoongServe); None: all."""
    decode: int | None = None
    """The group that decodes them, after a migration of their KV; None: the same one."""


class Grow(msgspec.Struct, frozen=True, tag=True):
    """Give a group devices of groups that have nothing to do."""

    group: int
    devices: tuple[int, ...]


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """Take devices from a group as soon as their pages are free; their own groups wake up."""

    group: int
    devices: tuple[int, ...]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Migrate the requests that decode in a group to another one, and its KV with them."""

    group: int
    to: int


Action = Assign | Grow | Shrink | Move


class PlaceAnswer(msgspec.Struct, frozen=True):
    """What is done, in this order; an empty one leaves things as they are until something changes."""

    actions: tuple[Action, ...]
    rules: tuple[str, ...] = ()
    """`place/rule` of each rule that fired."""
    errors: tuple[str, ...] = ()
