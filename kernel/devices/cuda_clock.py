"""When things happened on a lane, on the host's clock.

Events are timed by the card. Of each the host knows two bounds in its own time: it happened after it was
enqueued and before it was seen to be done. Every event narrows where the lane's reference event may lie on
the host's clock. The upper bound is the sharp one, since the host looks all the time, while an event may
lie in a queue for long; so a reference is taken to be a look before its upper bound. No synchronisation is
needed while serving, a card whose clock drifts against the host's is corrected, and no time is outside of
its event's bounds.
"""

from __future__ import annotations

from collections.abc import Callable

from muxk.kernel.devices.cuda_streams import CudaEvent, CudaStream, CudaStreams

LOOK_NS = 30_000
"""From the end of an item to the host seeing it, at best."""
ANCHOR_NS = 10_000_000
RENEW_NS = 4_000_000_000
"""Age at which a reference is replaced: CUDA gives times between events as a float of 24 bits in ms, which is
0.25 us at four seconds and grows with the distance."""
DRIFT = 50e-6
"""Largest relative difference of the two clocks' rates that is expected between two references; a larger
one costs precision, not correctness."""


class LaneClock:
    """Times of one lane's events; `renew` before each item, `place` for each event in order."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._reference: CudaEvent | None = None
        self._low_ns = 0
        self._high_ns = 0
        self._renewed_ns = 0
        self._next: CudaEvent | None = None
        self._next_low_ns = 0
        self.corrections = 0
        """Events whose bounds and place did not fit: a drift that was too large, or a bound that lied."""

    def anchor(self, stream: CudaStream, now_ns: Callable[[], int]) -> None:
        """Place the first reference sharply, while nothing is in flight. Waits for it, at most ANCHOR_NS."""
        begun_ns = now_ns()
        self.renew(stream, begun_ns)
        while self._next is not None and now_ns() - begun_ns < ANCHOR_NS:
            if self._next.done():
                self._take_next(now_ns())

    def renew(self, stream: CudaStream, now_ns: int) -> None:
        """Enqueue a new reference when the one there is, is old."""
        old = self._reference is None or now_ns - self._renewed_ns >= RENEW_NS
        if self._next is not None or not old:
            return
        event = self._streams.event()
        event.record(stream)
        self._next, self._next_low_ns, self._renewed_ns = event, now_ns, now_ns

    def place(self, event: CudaEvent, low_ns: int, high_ns: int) -> int:
        """Host time of an event that is done, was enqueued at `low_ns` or later, and seen at `high_ns`."""
        if self._next is not None and low_ns >= self._next_low_ns:
            self._take_next(high_ns)  # the event comes after it on the lane, so it is done
        assert self._reference is not None, "renew before the first item"
        elapsed_ns = self._reference.elapsed_ns(event)
        self._narrow(low_ns - elapsed_ns, high_ns - elapsed_ns)
        placed_ns = max(self._low_ns, self._high_ns - LOOK_NS) + elapsed_ns
        return min(high_ns, max(low_ns, placed_ns))

    def _take_next(self, seen_ns: int) -> None:
        assert self._next is not None
        if self._reference is None:
            self._low_ns, self._high_ns = self._next_low_ns, seen_ns
        else:
            elapsed_ns = self._reference.elapsed_ns(self._next)
            drift_ns = round(elapsed_ns * DRIFT)
            self._low_ns += elapsed_ns - drift_ns
            self._high_ns += elapsed_ns + drift_ns
            self._narrow(self._next_low_ns, seen_ns)
        self._reference, self._next = self._next, None

    def _narrow(self, low_ns: int, high_ns: int) -> None:
        """To what both say; what is newer is right where they differ."""
        low, high = max(self._low_ns, low_ns), min(self._high_ns, high_ns)
        if low > high:
            self.corrections += 1
            low, high = low_ns, high_ns
        self._low_ns, self._high_ns = low, high
