"""Pending timers of the realtime runtime: a heap with lazy cancellation."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Entry = TypeVar("Entry")

TIMERS_PENDING = 65_536
"""Timers that may wait at once; one more is an error of the actor that sets it."""


class TimersFull(RuntimeError):
    """Over `TIMERS_PENDING` timers wait."""


class TimerHeap(Generic[Entry]):
    """Entries by deadline; equal deadlines in the order of `add`."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._live: dict[int, Entry] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, deadline_ns: int, entry: Entry) -> int:
        """Queue an entry and return its id, which is never used again."""
        if len(self._live) >= TIMERS_PENDING:
            raise TimersFull(f"{TIMERS_PENDING} timers are pending")
        self._last_id += 1
        heapq.heappush(self._heap, (deadline_ns, self._last_id))
        self._live[self._last_id] = entry
        return self._last_id

    def cancel(self, timer_id: int) -> None:
        """Forget an entry; an unknown id is ignored."""
        self._live.pop(timer_id, None)
        # Cancelled entries stay in the heap until they come up; do not let them outnumber the live ones.
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [item for item in self._heap if item[1] in self._live]
            heapq.heapify(self._heap)

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        heap = self._heap
        while heap and heap[0][1] not in self._live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_ns: int) -> Entry | None:
        """The first entry whose deadline has come, or None."""
        deadline_ns = self.next_ns()
        if deadline_ns is None or deadline_ns > now_ns:
            return None
        return self._live.pop(heapq.heappop(self._heap)[1])
