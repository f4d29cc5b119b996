"""Why units that nothing is launched on are idle, from what the arbiter knows after a turn.

The split in force gives each unit to the decode lane, to the prefill lane, to one lane that both share in
time, or to nobody. Each answer below is a condition that holds; where none does it is `Cause.UNEXPLAINED`.
"""

from __future__ import annotations

from muxk.kernel.arbiter_state import ArbiterState
from muxk.kernel.idle import Cause
from muxk.kernel.lanes import LaneTable, SplitLedger

NO_WORK, NO_PAGES, DRAIN, MERGE = Cause.NO_WORK, Cause.NO_PAGES, Cause.DRAIN, Cause.MERGE
OVER_RESERVED, UNASSIGNED, PREEMPTION = Cause.OVER_RESERVED, Cause.UNASSIGNED, Cause.PREEMPTION
HOST, UNEXPLAINED = Cause.HOST, Cause.UNEXPLAINED
"""Names are found sooner than members of their class, and these are asked at each step."""


def explain_idle(state: ArbiterState, lanes: LaneTable, splits: SplitLedger, now_ns: int) -> None:
    """Tell the ledger, after a turn that left units without a launch."""
    lanes.idle.explain(idle_causes(state, lanes, splits), now_ns)


def idle_causes(state: ArbiterState, lanes: LaneTable, splits: SplitLedger) -> list[tuple[int, Cause]]:
    """(Where a region of units stops, why those of it are idle that nothing is launched on), ascending."""
    facts = _Facts(state, lanes)
    units, split = splits.whole.decode_units, splits.current
    if facts.probing:
        return [(units, facts.while_probing())]
    if splits.shares_time:
        return [(units, facts.of_shared_lane())]
    regions = []
    if split.decode_units:
        regions.append((split.decode_units, facts.of_decode_lane()))
    if split.decode_units + split.prefill_units < units:
        regions.append((units - split.prefill_units, facts.of_no_lane()))
    if split.prefill_units:
        regions.append((units, facts.of_prefill_lane()))
    return regions


class _Facts:
    """Of one moment."""

    def __init__(self, state: ArbiterState, lanes: LaneTable) -> None:
        running = state.running
        self._state = state
        self._decode = state.decode
        self._lanes = lanes
        self._prefills = lanes.prefills > 0
        self._can_prefill = (running is not None and not running.launched) or state.candidate is not None
        self.probing = bool(state.probes or lanes.probes)

    def while_probing(self) -> Cause:
        """A measurement runs alone, and what waits for it waits for the host to be ready."""
        return HOST if self._decode.active or self._can_prefill else NO_WORK

    def of_decode_lane(self) -> Cause:
        """Its units, when no step is launched on them."""
        decode = self._decode
        if decode.expected:
            return HOST
        if decode.in_flight:
            return DRAIN
        if decode.waiting is not None:
            return UNEXPLAINED
        if self._can_prefill or self._state.forming:
            return OVER_RESERVED
        if self._prefills:
            return MERGE if self._launched_beside_decode() else OVER_RESERVED
        return self._without_work()

    def of_prefill_lane(self) -> Cause:
        """Its units, when no layers are launched on them."""
        if self._state.forming:
            return self._forming()
        if self._prefills:
            return DRAIN
        if self._can_prefill:
            return UNEXPLAINED
        return self._without_prompts(OVER_RESERVED if self._decode.active else NO_WORK)

    def of_shared_lane(self) -> Cause:
        """The whole device, as far as nothing is launched on it."""
        decode = self._decode
        if decode.expected:
            return HOST
        if self._state.forming:
            return MERGE if decode.held else self._forming()
        if self._lanes.flights:
            return DRAIN
        if decode.waiting is not None or self._can_prefill:
            return UNEXPLAINED
        return self._without_work()

    def of_no_lane(self) -> Cause:
        """Units that the split gives to neither phase."""
        if self._decode.held:
            return MERGE
        if self._decode.active or self._can_prefill or self._state.forming or self._prefills:
            return UNASSIGNED
        return self._without_work()

    def _forming(self) -> Cause:
        """A batch is formed, by other actors."""
        return PREEMPTION if self._state.forming_depth else HOST

    def _launched_beside_decode(self) -> bool:
        """The prefill items in flight were launched while a decode batch used its lane: then its units wait
        for their rows. Later ones could have had the units of a lane without work."""
        last_step_ns = self._decode.held_since_ns
        return all(flight.launched_ns <= last_step_ns for flight in self._lanes.flights.values())

    def _without_work(self) -> Cause:
        return self._without_prompts(NO_WORK)

    def _without_prompts(self, cause: Cause) -> Cause:
        """No prompt can start; those that wait have no pages."""
        return NO_PAGES if self._state.queue.requests else cause
