"""What is to come in virtual time: a heap of deliveries by (time, sequence), and a queue of those of now.

Most messages are sent for the very moment in which they are sent. They arrive in the order of their sending,
so that a queue keeps them and the heap only those of later: timers, completions of devices, offloaded work.
With jitter the order of one moment is drawn from a seed, and all go through the heap.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from muxk.kernel.actor import Message
from muxk.kernel.supervisor import Child

TIE_STEP = 1 << 16
"""With jitter, how far apart (at most) two ties of the same pair are drawn."""

TIES_KEPT = 1024
"""With jitter, pairs remembered before those of the past are dropped."""

CANCELLED_MIN = 64
"""Cancelled timers that may lie about, however few others there are."""


@dataclass(eq=False, slots=True)
class VirtualInbox:
    """The inbox of one generation of an actor: only a count, the messages are in the agenda."""

    name: str
    child: Child
    handlers: dict[type[Message], Callable[[Any], None]]
    """Of the child."""
    decode: Callable[[bytes], Message]
    bound: int
    is_open: bool = True
    depth: int = 0


Sent = tuple[int, VirtualInbox, Message, "bytes | None"]
"""A message for the present moment: its sequence, the generation it is for, itself, and its encoded form,
which is what arrives (None where `encode_every` skips it)."""


class Delivery(msgspec.Struct, eq=False):
    """One entry of the heap."""

    target: str
    inbox: VirtualInbox | None
    """The generation it is for; None for what comes from outside: whichever lives then."""
    owner: VirtualInbox | None
    """The generation that set the timer, if it is one."""
    message: Message
    frame: bytes | None
    """Its encoded form, which is what arrives; None where `encode_every` skips it."""
    queued: bool
    """True when it counts towards the depth of the inbox."""
    failure: Exception | None = None
    """What an offloaded function raised, instead of a message."""
    cancelled: bool = False

    @property
    def void(self) -> bool:
        """True when nobody is to see it any more."""
        inbox, owner = self.inbox, self.owner
        if inbox is not None and not inbox.is_open:
            return True
        return self.cancelled or (owner is not None and not owner.is_open)


class Agenda:
    """Deliveries of one run, and its clock."""

    def __init__(self, jitter: random.Random | None) -> None:
        self.now_ns = 0
        self.sequence = 0
        """Of the last delivery that was added."""
        self._jitter = jitter
        self._due: deque[Sent] = deque()
        """What was sent for the present moment. Empty with jitter."""
        self._heap: list[tuple[int, int, int, Delivery]] = []
        self._timers: dict[int, Delivery] = {}
        self._cancelled = 0
        self._ties_ns = 0
        self._ties: dict[tuple[int, str, str], int] = {}

    def __len__(self) -> int:
        """Cancelled ones that lie about included."""
        return len(self._due) + len(self._heap)

    def send(self, sender: str, inbox: VirtualInbox, message: Message, frame: bytes | None) -> None:
        """Behind all that was sent for this moment before."""
        if self._jitter is None:
            self.sequence += 1
            self._due.append((self.sequence, inbox, message, frame))
        else:
            self.add(self.now_ns, sender, Delivery(inbox.name, inbox, None, message, frame, queued=True))

    def add(self, at_ns: int, sender: str, delivery: Delivery) -> int:
        """Its sequence, by which it can be cancelled if it has an owner."""
        self.sequence += 1
        tie = 0 if self._jitter is None else self._tie(self._jitter, at_ns, sender, delivery.target)
        heapq.heappush(self._heap, (at_ns, tie, self.sequence, delivery))
        if delivery.owner is not None:
            self._timers[self.sequence] = delivery
        return self.sequence

    def take_sent(self) -> Sent | None:
        """The next message of the present moment, unless a timer comes before it."""
        due, heap = self._due, self._heap
        if not due:
            return None
        # A timer that was set before, for this moment, comes first.
        while heap and heap[0][0] <= self.now_ns and heap[0][2] < due[0][0]:
            if not heap[0][3].void:
                return None
            self._pop()
        return due.popleft()

    def take_timer(self) -> Delivery | None:
        """The next one of the heap that is due and that somebody is to see, after `take_sent` found none."""
        while self._heap and self._heap[0][0] <= self.now_ns:
            delivery = self._pop()
            if not delivery.void:
                return delivery
        return None

    def next_ns(self) -> int | None:
        """When the next one is due, after `take_sent` and `take_timer` found no more."""
        while self._heap and self._heap[0][3].void:
            self._pop()
        return self._heap[0][0] if self._heap else None

    def next_beside(self, sequence: int) -> int | None:
        """When the next one is due but for this timer; None when there is no other."""
        if self._due:
            return self.now_ns
        times = [at_ns for at_ns, _, number, later in self._heap if number != sequence and not later.void]
        return min(times, default=None)

    def is_busy(self, until_ns: int | None) -> bool:
        """There is one that is due until then."""
        next_ns = self.now_ns if self._due else self.next_ns()
        return next_ns is not None and (until_ns is None or next_ns <= until_ns)

    def _pop(self) -> Delivery:
        at_ns, _, sequence, delivery = heapq.heappop(self._heap)
        assert at_ns >= self.now_ns or delivery.void, "time went back"
        self._timers.pop(sequence, None)
        return delivery

    def postpone(self, ns: int) -> None:
        """Time passes in which nothing happens, and all that is to come comes so much later."""
        assert not self._due, "the present moment is not over"
        self.now_ns += ns
        self._heap = [(at_ns + ns, tie, number, later) for at_ns, tie, number, later in self._heap]

    def cancel(self, sequence: int) -> None:
        """One that came, or was cancelled, is ignored."""
        delivery = self._timers.pop(sequence, None)
        if delivery is not None:
            delivery.cancelled = True
            self._compact()

    def _compact(self) -> None:
        """Cancelled timers stay in the heap until they come up; do not let them outnumber the others."""
        self._cancelled += 1
        if self._cancelled > CANCELLED_MIN + len(self._heap) // 2:
            self._cancelled = 0
            self._heap = [entry for entry in self._heap if not entry[3].void]
            heapq.heapify(self._heap)
            self._timers = {sequence: timer for sequence, timer in self._timers.items() if not timer.void}

    def _tie(self, jitter: random.Random, at_ns: int, sender: str, target: str) -> int:
        """A random rank among the deliveries of `at_ns`, above the earlier ones of the same pair."""
        if self._ties_ns < self.now_ns and len(self._ties) > TIES_KEPT:
            self._ties_ns = self.now_ns
            self._ties = {key: tie for key, tie in self._ties.items() if key[0] >= self.now_ns}
        key = (at_ns, sender, target)
        last = self._ties.get(key, jitter.randrange(TIE_STEP * 16))
        self._ties[key] = last + 1 + jitter.randrange(TIE_STEP)
        return self._ties[key]
