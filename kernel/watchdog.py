"""Which items take far longer than they should: the progress watchdog of the arbiter.

An item can not be taken back from a device. What the watchdog can do is to say so: its requests fail with
the reason, its pages stay where they are until it ends, and `muxk state` shows the lane.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muxk.kernel.estimates import Estimates
from muxk.kernel.jobs import Flight
from muxk.kernel.messages import LaneStuck
from muxk.kernel.work import DecodeWork, Phase, PrefillWork

LOOK_EVERY_NS = 1_000_000_000
STUCK_AFTER_NS = 30_000_000_000
"""Time that any item is given, however short it should be."""
STUCK_FACTOR = 20.0
"""Times its estimate that an item is given."""
UNMEASURED_FACTOR = 10
"""Before anything was measured an item is given so many times STUCK_AFTER_NS: it may be a large model."""


@dataclass(frozen=True)
class Watchdog:
    """Knows how long an item may take."""

    stuck_after_ns: int = STUCK_AFTER_NS

    def overdue(self, flights: Iterable[Flight], estimates: Estimates, now_ns: int) -> list[Flight]:
        """Items that run for too long and were not found before; those that wait for others do not run."""
        flights = list(flights)
        pending = {flight.item_id for flight in flights}
        return [
            flight
            for flight in flights
            if not flight.stuck
            and pending.isdisjoint(flight.waits_for)
            and now_ns - flight.runnable_ns > self.allowed_ns(flight, estimates)
        ]

    def allowed_ns(self, flight: Flight, estimates: Estimates) -> float:
        """Time that an item may take on its lane."""
        if not estimates.known:
            return self.stuck_after_ns * UNMEASURED_FACTOR
        return max(self.stuck_after_ns, STUCK_FACTOR * _expected_ns(flight, estimates))


def excuse(flights: Iterable[Flight], late_ns: int) -> None:
    """Take the time off in which nobody could look: a process that was stopped has stopped lanes as well."""
    if late_ns > LOOK_EVERY_NS:
        for flight in flights:
            flight.runnable_ns += late_ns


def _expected_ns(flight: Flight, estimates: Estimates) -> float:
    units = len(flight.lane.units)
    expected_ns = 0.0
    if isinstance(flight.work, PrefillWork):
        load = flight.load
        expected_ns += flight.layers * estimates.prefill_layer_ns(units, load.new_tokens, load.pairs)
    step = flight.work if isinstance(flight.work, DecodeWork) else flight.decode
    if step is not None:
        expected_ns += estimates.decode_ns(units, step.rows, step.context_tokens)
    return expected_ns


def lane_stuck(flight: Flight, units: int, now_ns: int) -> LaneStuck:
    """What the gateway is told of an item on a device of so many units."""
    return LaneStuck(
        lane=flight.lane.name,
        requests=flight.requests,
        decoding=flight.phase is Phase.DECODE or len(flight.lane.units) == units,
        reason=stuck_reason(flight, now_ns),
    )


def stuck_reason(flight: Flight, now_ns: int) -> str:
    """For clients and the log."""
    seconds = (now_ns - flight.runnable_ns) / 1e9
    what = "a fused step" if flight.decode is not None else f"a {flight.phase} item"
    if flight.phase is Phase.PREFILL:
        what += f" of {flight.layers} layers, {flight.load.new_tokens} tokens"
    return f"lane {flight.lane.name} hangs: {what} has not ended for {seconds:.0f} s"
