"""An arbiter that checks itself before and after every turn."""

from __future__ import annotations

import itertools
from typing import Any

from muxk.kernel.arbiter import Arbiter


class WatchedArbiter(Arbiter):
    """Checks what holds whatever the policy answers."""

    turns = 0
    longest_hold_ns = 0
    most_parkings = 0
    most_parked_bytes = 0
    most_in_lane = 0

    def _turn(self) -> None:
        decode = self.state.decode
        if decode.held:
            self.longest_hold_ns = max(self.longest_hold_ns, self.now_ns() - decode.held_since_ns)
        super()._turn()
        self.turns += 1
        self._check_lanes()
        self._check_holds()
        self._check_parked()

    def _check_lanes(self) -> None:
        sizes = {
            units for split in self._device.splits() for units in (split.decode_units, split.prefill_units)
        }
        lanes: dict[str, list[Any]] = {}
        for flight in self._lanes.flights.values():
            assert len(flight.lane.units) in sizes | {self._device.units}
            lanes.setdefault(f"{flight.lane.name} {flight.phase}", []).append(flight)
        limits = self.state.limits
        for name, flights in lanes.items():
            bound = 1 + limits.decode_ahead if name.endswith("decode") else limits.backlog
            self.most_in_lane = max(self.most_in_lane, len(flights))
            assert len(flights) <= bound, (name, len(flights), bound)
        running = [flight for flight in self._lanes.flights.values() if not flight.waits_for]
        for one, other in itertools.combinations(running, 2):
            assert not one.meets(other.lane.units), "two items on the same units without an order"

    def _check_holds(self) -> None:
        state = self.state
        if state.decode.held:
            assert self.now_ns() - state.decode.held_since_ns < max(1, state.limits.decode_floor_ns)
        busy = self._lanes.flights or state.forming or state.decode.expected
        assert busy or not state.work_exists(), "work exists and nothing runs"

    def _check_parked(self) -> None:
        for job in self.state.jobs.values():
            self.most_parkings = max(self.most_parkings, job.preemptions)
            assert job.preemptions <= self.state.limits.preemptions
        if self.state.parked is not None:
            self.most_parked_bytes = max(self.most_parked_bytes, self.state.parked.parked_bytes)
            assert self.state.parked.parked_bytes <= self.state.limits.parked_bytes
