"""How much of a load waits for its next token, over the time in which the load came.

A request waits from its arrival to its first token, and through each stall afterwards: a system that computes
a prompt at once and then holds it back for minutes, until there is room to decode it, has the same queue in
another place. With answers of thousands of tokens such a wait is one gap of many, which no quantile of the
gaps shows.

Whether a queue grows can not be read off one moment: at the last arrival one request waits for certain, and a
long prompt that happens to come then is most of all that waits. So it is judged by the mean over the last
quarter of the time in which requests came. A queue that grows evenly holds on average 7/8 of its last size
there: over 7/8 of all requests, the mean is the share of requests that such a queue would hold at the end.

Memory does not grow with the number of requests: events are kept as sums by bins of time, whose width doubles
when there are too many. Those sums give the integral of the waiting exactly at each border of a bin.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

BINS_MAX = 512
"""Of the time in which requests came; there are at least half as many once that is a microsecond."""
WINDOW = 4
"""The last part, of so many, of that time."""
GROWING_MEAN = 1 - 1 / (2 * WINDOW)
"""Of what an evenly growing queue holds at the end: its mean over the window."""


class WaitingLoad:
    """Takes requests in any order. Times in ns; a load is a number of requests, or of tokens."""

    def __init__(self) -> None:
        self._total = 0
        self._first_ns: int | None = None
        self._last_ns = 0
        """Arrivals."""
        self._width_ns = 1
        self._bins: dict[int, tuple[int, int]] = {}
        """By time // width: (load that began to wait less load that ended it, the same times its time)."""
        self._later: list[tuple[int, int]] = []
        """Heap of (when, load that waits from then on), of what was after the last arrival seen so far."""

    def add(self, arrival_ns: int, first_token_ns: int | None, load: int) -> None:
        """One request; `first_token_ns` is None when it never had one."""
        self._total += load
        self._first_ns = arrival_ns if self._first_ns is None else min(self._first_ns, arrival_ns)
        self._last_ns = max(self._last_ns, arrival_ns)
        while self._last_ns // self._width_ns - self._first_ns // self._width_ns >= BINS_MAX:
            self._widen()
        self._note(arrival_ns, load)
        if first_token_ns is not None:
            heapq.heappush(self._later, (first_token_ns, -load))
        while self._later and self._later[0][0] <= self._last_ns:
            self._note(*heapq.heappop(self._later))

    def stalled(self, since_ns: int, until_ns: int | None, load: int) -> None:
        """A request that was added waited again; `until_ns` is None when no token came any more."""
        self._change(since_ns, load)
        if until_ns is not None:
            self._change(until_ns, -load)

    def _change(self, at_ns: int, load: int) -> None:
        if at_ns <= self._last_ns:
            self._note(at_ns, load)
        else:
            heapq.heappush(self._later, (at_ns, load))

    def _note(self, at_ns: int, load: int) -> None:
        place = at_ns // self._width_ns
        loads, moments = self._bins.get(place, (0, 0))
        self._bins[place] = (loads + load, moments + load * at_ns)

    def _widen(self) -> None:
        narrow, self._bins = self._bins, {}
        self._width_ns *= 2
        for place, (loads, moments) in narrow.items():
            beside = self._bins.get(place // 2, (0, 0))
            self._bins[place // 2] = (beside[0] + loads, beside[1] + moments)

    @property
    def share(self) -> float:
        """Of all load: what waits at the end of the arrivals, by the mean over their last quarter.

        1 where all came at one moment, so that there is no such time.
        """
        if self._first_ns is None:
            return 0.0
        end = self._last_ns // self._width_ns
        window_ns = self._last_ns - (self._last_ns - self._first_ns) // WINDOW
        start = -(-window_ns // self._width_ns)
        if start >= end:
            return 1.0
        waited = self._integral(end) - self._integral(start)
        mean = waited / ((end - start) * self._width_ns)
        return min(1.0, mean / (GROWING_MEAN * self._total))

    def _integral(self, border: int) -> int:
        """Load times ns that was waited before the start of a bin."""
        at_ns = border * self._width_ns
        before: Iterator[tuple[int, int]] = (held for place, held in self._bins.items() if place < border)
        return sum(loads * at_ns - moments for loads, moments in before)
