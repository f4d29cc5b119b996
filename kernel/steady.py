"""Decode steps between which nothing else happens, taken all at once.

While the same rows decode and nobody else is served, the end of a step leads to the launch of the next but
one and to nothing more. In virtual time the device knows when each will end, and the runtime what comes
next. So where a step ends in silence, the arbiter goes on to the next end by itself: it books, asks the
policy and launches as ever, for the same times, and tells decode of all of these steps when the last of them
has ended. The executor says how many steps it has nothing to add to (`SubmitDecode.more`). Messages are left
out and nothing else: `tests/simulation/test_steady.py` holds runs with and without this to the same results.

Clients get the tokens with their times (`TokenIds.at_ns`), but only when the last step has ended: one that
acts on a token in the middle of an answer would do so late. Those of studies act on ends, which are never
part of this.
"""

from __future__ import annotations

from collections import deque

from muxk.kernel.actor import Context
from muxk.kernel.arbiter_state import ArbiterRefs, ArbiterState
from muxk.kernel.device import Device, ForeseeingDevice, ItemDone, StepAhead
from muxk.kernel.lanes import LaneTable, SplitLedger
from muxk.kernel.messages import StepsRan
from muxk.kernel.steps_in_flight import StepsInFlight
from muxk.kernel.view import DecodeView, View
from muxk.kernel.work import DECODE, DecodeWork, RowPages, int32_bytes, int32_values

FIRST_VERSION = 1
AHEAD = 2
"""Steps in flight where one runs and the next is queued behind it."""


class SteadyDecode:
    """Owned by the arbiter, whose state it works on."""

    def __init__(
        self,
        device: ForeseeingDevice | None,
        state: ArbiterState,
        lanes: LaneTable,
        splits: SplitLedger,
        refs: ArbiterRefs,
        context: Context,
    ) -> None:
        """`device` is None where it knows no ends of what it was given: then nothing is ever steady."""
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
        device = self._device
        if device is None or not self._is_steady(device, done):
            return False
        decode, lanes = self._state.decode, self._lanes
        oldest, newest = lanes.flights.values()
        ahead = device.steps_behind(newest.lane, newest.item_id, decode.in_flight[1], decode.pages)
        first = StepAhead(done.item_id, done.started_ns, done.ended_ns, now_ns, int32_values(done.tokens))
        steps = StepsInFlight(oldest, newest, [first, ahead.newest])
        tell = False
        while not tell and self._agrees(steps):
            at_ns = steps.next_known_ns
            steps.launched(ahead.launch(lanes.next_item, at_ns))
            lanes.next_item += 1
            tell = steps.ended == decode.more or steps.next_known_ns >= ahead.quiet_until_ns
        if not steps.ended:
            return False
        device.commit(ahead)
        self._commit(steps)
        self._tell(steps, steps.last_known_ns - now_ns if tell else None)
        return True

    def _is_steady(self, device: Device, done: ItemDone) -> bool:
        """The oldest of two decode steps of one batch ended, and there is nothing but them."""
        state, decode, flights = self._state, self._state.decode, self._lanes.flights
        if not decode.more or decode.waiting is not None or len(flights) != AHEAD:
            return False
        if state.jobs or state.running is not None or state.candidate is not None or state.forming:
            return False
        if state.probes or state.resizing or not state.stuck_timer or self._lanes.early:
            return False
        oldest, newest = flights.values()
        lane = device.lane(DECODE, self._splits.current.decode_units or device.units)
        return (
            oldest.item_id == done.item_id
            and len(decode.in_flight) == AHEAD
            and decode.in_flight[0].requests == decode.in_flight[1].requests
            and oldest.lane is lane
            and newest.lane is lane
            and not (oldest.shared or newest.shared or oldest.stuck)
            and self._lanes.width == oldest.width == newest.width == 1
        )

    def _agrees(self, steps: StepsInFlight) -> bool:
        """The policy has the next step launched as those before; if it wants more, it is asked again.

        The estimator, when it is to hear of the step that ended, may have it say something else.
        """
        if len(self._lanes.untold) + steps.ended + 1 >= self._lanes.told_at:
            return False
        decider = self._state.decider
        view = self._view(steps)
        decision = decider.policy.decide(view)
        if decision.fuse or decision.split != self._splits.current or not decision.split.decode_units:
            return False
        decider.take(view, decision)
        self._state.decision = decision
        return True

    def _view(self, steps: StepsInFlight) -> View:
        """As `ArbiterState.view` has it when the next step is submitted."""
        state, decode, splits = self._state, self._state.decode, self._splits
        context_tokens = decode.context_tokens + decode.rows * (steps.ended + 1)
        return View(
            steps.next_known_ns,
            splits.whole.decode_units,
            splits.disjoint,
            splits.current,
            self._lanes.device.layers,
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

    def _commit(self, steps: StepsInFlight) -> None:
        """Book the steps that ended; two are in flight."""
        state, decode = self._state, self._state.decode
        count = steps.ended
        work = decode.in_flight[1]
        works = (step_after(work, count - 1, decode.pages), step_after(work, count, decode.pages))
        self._lanes.steps_ended(steps, decode.in_flight[0].context_tokens, works)
        state.counts["decode steps"] += count
        decode.more -= count
        decode.held_since_ns = steps.last_known_ns
        decode.context_tokens = works[1].context_tokens
        decode.newest_step = works[1].step_id
        decode.in_flight = deque(works)

    def _tell(self, steps: StepsInFlight, delay_ns: int | None) -> None:
        """Decode, so much later, or with the end of the next step."""
        oldest, newest = self._state.decode.in_flight
        ended = steps.steps[: steps.ended]
        tokens = int32_bytes([token for step in ended for token in step.tokens])
        ran = StepsRan(tokens, tuple([step.known_ns for step in ended]), (oldest, newest))
        if delay_ns is None:
            self._state.decode.ran = ran
        elif delay_ns:
            self._context.send_after(delay_ns, self._refs.decode, ran)
        else:
            self._context.send(self._refs.decode, ran)


def step_after(work: DecodeWork, steps: int, pages: RowPages | None) -> DecodeWork:
    """A step so many behind one, of the same rows, which takes its tokens on the device; their pages, if they
    are others."""
    if not steps:
        return work
    rows = work.rows
    places = int32_bytes(list(range(rows)))
    return DecodeWork(
        step_id=work.step_id + steps,
        version=FIRST_VERSION,
        requests=work.requests,
        tokens=bytes(len(places)),
        positions=int32_bytes([position + steps for position in int32_values(work.positions)]),
        page_table=work.page_table if pages is None else pages.table,
        pages_per_row=work.pages_per_row if pages is None else pages.per_row,
        context_tokens=work.context_tokens + rows * steps,
        sampling=work.sampling,
        after_step=work.step_id + steps - 1,
        carried_rows=places,
        carried_from=places,
    )
