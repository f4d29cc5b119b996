"""Decode steps between which nothing else happens, taken all at once.

While the same rows decode and nobody else is served, the end of a step leads to the launch of the next but
one and to nothing more. In virtual time the device knows when each will end, and the runtime what comes
next. So where a step ends in silence, the arbiter goes on to the next end by itself: it books, asks the policy
and launches as ever, at the same times, and tells decode of all of these steps with the end of the last.
Only messages are left out: `tests/kernel/test_steady.py` holds runs with and without this to the same results.
The executor says how many steps it has nothing to add to (`SubmitDecode.more`).
"""

from __future__ import annotations

from muxk.kernel.actor import Context
from muxk.kernel.arbiter_state import ArbiterRefs, ArbiterState
from muxk.kernel.device import ForeseeingDevice, ItemDone
from muxk.kernel.jobs import Flight
from muxk.kernel.lanes import LaneTable, SplitLedger
from muxk.kernel.messages import RowPages, StepsRan
from muxk.kernel.view import Decision, DecodeView, View
from muxk.kernel.work import DECODE, DecodeWork, int32_bytes, int32_values

FIRST_VERSION = 1
AHEAD = 2
"""Steps in flight where one runs and the next is queued behind it."""


class SteadyDecode:
    """Owned by the arbiter, whose state it works on."""

    def __init__(
        self,
        device: ForeseeingDevice,
        state: ArbiterState,
        lanes: LaneTable,
        splits: SplitLedger,
        refs: ArbiterRefs,
        context: Context,
    ) -> None:
        self._device = device
        self._state = state
        self._lanes = lanes
        self._splits = splits
        self._refs = refs
        self._context = context

    def run(self, done: ItemDone, now_ns: int) -> bool:
        """Go on from a step that ended now; False when it is to be handled as any other is.

        When true, its end and those of steps after it are booked, and decode hears of them when the last is
        known: by a message for that time, or with the end of the next step, which is posted.
        """
        if not self._is_steady(done):
            return False
        newest = self._newest()
        until_ns = self._device.quiet_until_ns(newest.item_id)
        tokens, known_ns, at_ns = [], [], now_ns
        while (decision := self._decided(newest, at_ns)) is not None:
            next_ns, next_done = self._device.foresee(newest.item_id)
            self._end(done, at_ns)
            tokens.append(done.tokens)
            known_ns.append(at_ns)
            newest = self._launch(newest, decision, at_ns)
            if not self._state.decode.more or next_ns >= until_ns:
                self._tell(self._ran(tokens, known_ns), at_ns - now_ns)
                return True
            done, at_ns = next_done, next_ns
        if tokens:
            self._state.decode.ran = self._ran(tokens, known_ns)
            self._post_foreseen()
        return bool(tokens)

    def _is_steady(self, done: ItemDone) -> bool:
        """The oldest of two decode steps of one batch ended, and there is nothing but them."""
        state, decode, flights = self._state, self._state.decode, self._lanes.flights
        if not decode.more or decode.waiting is not None or len(flights) != AHEAD:
            return False
        if state.jobs or state.running is not None or state.candidate is not None or state.forming:
            return False
        if state.probes or state.resizing or not state.stuck_timer or self._lanes.early:
            return False
        oldest, newest = flights.values()
        lane = self._device.lane(DECODE, self._splits.current.decode_units or self._device.units)
        return (
            oldest.item_id == done.item_id
            and len(decode.in_flight) == AHEAD
            and decode.in_flight[0].requests == decode.in_flight[1].requests
            and oldest.lane is lane
            and newest.lane is lane
            and not oldest.stuck
            and self._lanes.width == oldest.width == newest.width == 1
        )

    def _newest(self) -> Flight:
        _, newest = self._lanes.flights.values()
        return newest

    def _decided(self, newest: Flight, now_ns: int) -> Decision | None:
        """What the policy says of the step after the newest.

        None when it wants more than its launch, which is then not counted: it will be asked again. And when
        the estimator is to hear of the step that ended, after which it may say something else.
        """
        if len(self._lanes.untold) + 1 >= self._lanes.told_at:
            return None
        view = self._view(newest, now_ns)
        decision = self._state.decider.policy.decide(view)
        if decision.fuse or decision.split != self._splits.current or not decision.split.decode_units:
            return None
        self._state.decider.take(view, decision)
        return decision

    def _view(self, newest: Flight, now_ns: int) -> View:
        """As `ArbiterState.view` has it when that step was submitted."""
        state, decode = self._state, self._state.decode
        context_tokens = decode.context_tokens + decode.rows
        return View(
            now_ns,
            self._device.units,
            self._splits.disjoint,
            self._splits.current,
            self._device.layers,
            DecodeView(decode.rows, context_tokens, True, True, 0, decode.tbt_slo_ns, 0, 0),
            None,
            None,
            None,
            0,
            state.queue,
            state.kv,
            state.estimates,
            None,
        )

    def _end(self, done: ItemDone, now_ns: int) -> None:
        self._device.take(done.item_id)
        flight = self._lanes.ended(done, now_ns)
        assert flight is not None
        told = self._lanes.measured(flight, done)
        assert told is None
        self._state.counts["decode steps"] += 1
        self._state.decode.in_flight.popleft()

    def _launch(self, newest: Flight, decision: Decision, now_ns: int) -> Flight:
        """The step after the newest, behind it."""
        state, decode = self._state, self._state.decode
        assert isinstance(newest.work, DecodeWork)
        work = step_after(newest.work, decode.pages)
        state.decision = decision
        decode.more -= 1
        decode.held_since_ns = now_ns
        decode.context_tokens = work.context_tokens
        decode.newest_step = work.step_id
        decode.in_flight.append(work)
        flight, item = self._lanes.queue_decode(newest, work, now_ns)
        self._device.launch_ahead(flight.lane, item, now_ns)
        return flight

    def _ran(self, tokens: list[bytes], known_ns: list[int]) -> StepsRan:
        oldest, newest = self._state.decode.in_flight
        return StepsRan(tuple(tokens), tuple(known_ns), (oldest, newest))

    def _tell(self, ran: StepsRan, delay_ns: int) -> None:
        if delay_ns:
            self._context.send_after(delay_ns, self._refs.decode, ran)
        else:
            self._context.send(self._refs.decode, ran)
        self._post_foreseen()

    def _post_foreseen(self) -> None:
        for item_id in self._lanes.flights:
            self._device.post_foreseen(item_id)


def step_after(work: DecodeWork, pages: RowPages | None) -> DecodeWork:
    """The next step of the same rows, which takes its tokens on the device; their pages, if they are others."""
    rows = work.rows
    places = work.carried_rows if len(work.carried_rows) == len(work.positions) else int32_bytes(list(range(rows)))
    return DecodeWork(
        step_id=work.step_id + 1,
        version=FIRST_VERSION,
        requests=work.requests,
        tokens=bytes(len(places)),
        positions=int32_bytes([position + 1 for position in int32_values(work.positions)]),
        page_table=work.page_table if pages is None else pages.table,
        pages_per_row=work.pages_per_row if pages is None else pages.per_row,
        context_tokens=work.context_tokens + rows,
        sampling=work.sampling,
        after_step=work.step_id,
        carried_rows=places,
        carried_from=places,
    )
