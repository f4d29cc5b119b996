"""The arbiter: where policy meets hardware.

It owns the lanes. Executors submit work (a decode step, a prefill batch); at each event the arbiter builds a
frozen `View`, asks the policy, and launches items, holds them, or changes the split. Preempting a prefill is
not launching its next layers. Invariants, whatever the policy says: a split is one that the device offers, a
lane holds at most `limits.backlog` items, decode is never held beyond the decode floor, a batch is parked at
most `limits.preemptions` times and keeps at most `limits.parked` bytes then, something runs while work
exists, and a lane whose units meet those of an older item waits for it by order on the device, never by
draining the host.
"""

from __future__ import annotations

from typing import Any

from muxk.kernel.actor import Actor
from muxk.kernel.arbiter_report import ArbiterReport, described
from muxk.kernel.arbiter_state import ArbiterRefs, ArbiterState
from muxk.kernel.decider import Decider
from muxk.kernel.device import (
    Device,
    DeviceFailed,
    DeviceLost,
    ElasticDevice,
    ForeseeingDevice,
    ItemDone,
    ItemFailed,
)
from muxk.kernel.dispatch import Dispatcher
from muxk.kernel.idle import IdleReport
from muxk.kernel.idle_causes import explain_idle
from muxk.kernel.jobs import Flight, PrefillJob
from muxk.kernel.lanes import LaneTable, SplitLedger
from muxk.kernel.messages import (
    BatchClassified,
    BatchNotFormed,
    CancelPrefill,
    DecodeFailed,
    DecodeFloorReached,
    DecodeIdle,
    DecodeStepDone,
    EstimatesChanged,
    KvChanged,
    LaneMoved,
    LookForStuckItems,
    MoreSteps,
    PolicyChanged,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ProbeDone,
    QueueChanged,
    ReportRequests,
    ReportState,
    RequestsReported,
    ResizeGroup,
    RunProbe,
    StateReported,
    SubmitDecode,
    SubmitPrefill,
)
from muxk.kernel.policy import PolicyBook
from muxk.kernel.resizing import Resizing
from muxk.kernel.steady import SteadyDecode
from muxk.kernel.watchdog import LOOK_EVERY_NS, Watchdog, excuse, lane_stuck
from muxk.kernel.work import DecodeWork, ProbeWork, StepOutput

DEFAULT_WATCHDOG = Watchdog()


class Arbiter(Actor):
    """One a device."""

    Accepts = (
        RunProbe
        | EstimatesChanged
        | PolicyChanged
        | QueueChanged
        | KvChanged
        | BatchNotFormed
        | SubmitPrefill
        | BatchClassified
        | CancelPrefill
        | SubmitDecode
        | MoreSteps
        | DecodeIdle
        | ItemDone
        | ItemFailed
        | DeviceFailed
        | DecodeFloorReached
        | LookForStuckItems
        | ResizeGroup
        | ReportState
        | ReportRequests
    )

    def __init__(
        self,
        device: Device,
        book: PolicyBook,
        policy_sha: str,
        refs: ArbiterRefs,
        first_item: int = 1,
        watchdog: Watchdog = DEFAULT_WATCHDOG,
        elastic: ElasticDevice | None = None,
        foreseeing: ForeseeingDevice | None = None,
    ) -> None:
        """Items are numbered from `first_item`, so that no completion of a crashed arbiter fits this one.

        The last two are the device again: where placement may give it others to work with, and where it knows
        its completions at their launch.
        """
        self._elastic = elastic
        self._foreseeing = foreseeing
        self._device = device
        self._refs = refs
        self._watchdog = watchdog
        self._lanes = LaneTable(device, first_item)
        self._splits = SplitLedger(device)
        self.state = ArbiterState(decider=Decider(book, policy_sha, "arbiter", self.now_ns))

    def started(self) -> None:
        self._splits.begin(self.now_ns())
        self._lanes.idle.begin(self.now_ns())
        self._dispatcher = Dispatcher(
            self._device, self.state, self._lanes, self._splits, self._refs, self.context
        )
        self._resizing = Resizing(self._elastic, self.state, self._lanes, self._refs, self.context)
        self._steady = SteadyDecode(
            self._foreseeing, self.state, self._lanes, self._splits, self._refs, self.context
        )

    # --- facts that change the view ---

    def on_run_probe(self, message: RunProbe) -> None:
        self.state.probes.append(message)
        self._turn()

    def on_estimates_changed(self, message: EstimatesChanged) -> None:
        self.state.estimates = message.estimates

    def on_policy_changed(self, message: PolicyChanged) -> None:
        self.state.decider.use(message.sha)
        self.state.counts["policy swaps"] += 1
        self.state.floor_timer = False  # its floor may be shorter
        self._turn()

    def on_queue_changed(self, message: QueueChanged) -> None:
        self.state.take_queue(message, self._device)
        self._turn()

    def on_kv_changed(self, message: KvChanged) -> None:
        self.state.kv = message.kv

    # --- work from the executors ---

    def on_batch_not_formed(self, message: BatchNotFormed) -> None:
        self.state.forming = False
        self._turn()

    def on_submit_prefill(self, message: SubmitPrefill) -> None:
        state = self.state
        assert state.running is None or state.running.launched, "a batch was formed unasked"
        job = PrefillJob(
            message.work,
            message.arrival_ns,
            message.deadline_ns,
            state.forming_depth,
            self._device.layers,
            message.class_rank,
            message.tbt_slo_ns,
            self._device.parked_bytes_per_token,
        )
        state.jobs[message.work.batch_id] = job
        state.running = job
        state.forming = False
        self._turn()

    def on_batch_classified(self, message: BatchClassified) -> None:
        job = self.state.jobs.get(message.batch_id)
        if job is not None:
            job.class_rank, job.deadline_ns = message.class_rank, message.deadline_ns
            job.tbt_slo_ns = message.tbt_slo_ns
            self._turn()

    def on_cancel_prefill(self, message: CancelPrefill) -> None:
        job = self.state.jobs.get(message.batch_id)
        if job is None:
            # Its last item ended at the same moment: PrefillDone is on its way and frees the pages.
            self.state.counts["late cancels"] += 1
            return
        job.cancelled = True
        self._give_up(job)
        self._turn()

    def on_submit_decode(self, message: SubmitDecode) -> None:
        decode = self.state.decode
        if message.work.step_id <= decode.newest_step:
            self.state.counts["late decode versions"] += 1
            return
        if decode.waiting is None:
            decode.held_since_ns = self.now_ns()
        decode.waiting = message.work
        decode.expected = False
        decode.rows = message.work.rows
        decode.context_tokens = message.work.context_tokens
        decode.tbt_slo_ns = message.tbt_slo_ns
        decode.more, decode.pages = message.more, None
        self._turn()

    def on_more_steps(self, message: MoreSteps) -> None:
        decode = self.state.decode
        holds = message.step_id == decode.newest_step and decode.waiting is None
        decode.more, decode.pages = (message.more, message.pages) if holds else (0, None)

    def on_decode_idle(self, message: DecodeIdle) -> None:
        decode = self.state.decode
        decode.expected = False
        if decode.waiting is None and not decode.in_flight:
            decode.rows = 0
            decode.context_tokens = 0
        self._turn()

    # --- completions from the device ---

    def on_item_done(self, message: ItemDone) -> None:
        if not self._steady.run(message, self.now_ns()):
            self._take_completion(message)

    def on_item_failed(self, message: ItemFailed) -> None:
        self._take_completion(message)

    def on_device_failed(self, message: DeviceFailed) -> None:
        """Pages, parked prefills and cached prefixes are lost: only a restart of all makes that true here."""
        raise DeviceLost(message.reason)

    def _take_completion(self, message: ItemDone | ItemFailed) -> None:
        """Completions in the order in which items ended, where that order means anything.

        Each lane posts from a thread of its own, so that of two messages which wait here the later one may
        come out first. Tokens of a row, and rows of a batch, must not change places by that.
        """
        self._lanes.early[message.item_id] = message
        while self._lanes.early and (due := self._lanes.next_completion()) is not None:
            if isinstance(due, ItemDone):
                self._item_done(due)
            else:
                self._item_failed(due)
        self._turn()

    def _item_done(self, message: ItemDone) -> None:
        if (flight := self._ended(message)) is None:
            return
        told = None if flight.stuck or flight.width != 1 else self._lanes.measured(flight, message)
        if told is not None:
            self.send(self._refs.estimator, told)
        if flight.job is not None:
            self._prefill_item_ended(flight, flight.job, message)
        elif isinstance(flight.work, DecodeWork):
            output = StepOutput(message.tokens, message.logprobs)
            self.send(self._refs.decode, self._step_done(flight.work, output, message.ended_ns))
        elif isinstance(flight.work, ProbeWork):
            elapsed_ns = max(1, message.ended_ns - message.started_ns)
            self.send(self._refs.estimator, ProbeDone(flight.work.probe_id, elapsed_ns))

    def on_resize_group(self, message: ResizeGroup) -> None:
        self._resizing.begin(message.width)

    def _ended(self, message: ItemDone | ItemFailed) -> Flight | None:
        flight = self._lanes.ended(message, self.now_ns())
        self._resizing.look()
        if flight is None:
            self.state.counts["completions of an older generation"] += 1
        elif flight.stuck:
            self.send(self._refs.gateway, LaneMoved(flight.lane.name))
        return flight

    def _item_failed(self, message: ItemFailed) -> None:
        flight = self._ended(message)
        if flight is None:
            return
        self.state.counts["failed items"] += 1
        if flight.job is not None:
            flight.job.item_ended(flight.layers)
            # The first reason is the cause; items that were queued behind it fail for want of its result.
            flight.job.failure = flight.job.failure or message.reason
            self._give_up(flight.job)
        step = flight.work if isinstance(flight.work, DecodeWork) else flight.decode
        if step is not None:
            self._expect_decode()
            self.send(self._refs.decode, DecodeFailed(step.step_id, step.version, message.reason))
        elif isinstance(flight.work, ProbeWork):
            self.send(self._refs.estimator, ProbeDone(flight.work.probe_id, 0))

    def on_decode_floor_reached(self, message: DecodeFloorReached) -> None:
        self.state.floor_timer = False
        self._turn()

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, self._refs.arbiter.name, self.describe()))

    def on_report_requests(self, message: ReportRequests) -> None:
        report = ArbiterReport(self.state, self._lanes, self._splits, self.now_ns(), message.request_ids)
        self.send(self._refs.gateway, RequestsReported.of(report.made(), message.ticket))

    def _prefill_item_ended(self, flight: Flight, job: PrefillJob, message: ItemDone) -> None:
        """Hand on the rows that ended, and the decode step of the same item with them."""
        job.item_ended(flight.layers)
        ended = job.launched and job.in_flight == 0
        step = None
        if flight.decode is not None:
            step = self._step_done(flight.decode, message.decode or StepOutput(), message.ended_ns)
        if job.failure is None and (ended or message.tokens or message.prompt_logprobs):
            # Of a cancelled batch too: prefill counts its rows by these messages.
            self.send(self._refs.prefill, self._prefill_done(job, message, step))
        elif step is not None:
            self.send(self._refs.decode, step)
        if job.failure is not None or (job.cancelled and not ended):
            self._give_up(job)
        elif ended:
            self._forget(job)

    def _prefill_done(self, job: PrefillJob, message: ItemDone, step: DecodeStepDone | None) -> PrefillDone:
        decode = self.state.decode
        if message.tokens and not decode.active:
            decode.expected = True
            decode.rows = len(message.tokens) // 4
            decode.tbt_slo_ns = job.tbt_slo_ns
        return PrefillDone(
            batch_id=job.work.batch_id,
            tokens=message.tokens,
            ended_ns=message.ended_ns,
            decode_running=bool(decode.in_flight),
            logprobs=message.logprobs,
            prompt_logprobs=message.prompt_logprobs,
            step=step,
        )

    def _step_done(self, work: DecodeWork, output: StepOutput, ended_ns: int) -> DecodeStepDone:
        self.state.counts["decode steps"] += 1
        self._expect_decode()
        before, self.state.decode.ran = self.state.decode.ran, None
        return DecodeStepDone(work.step_id, work.version, output.tokens, ended_ns, output.logprobs, before)

    def _expect_decode(self) -> None:
        """The oldest step ended; the executor answers with the next one unless it was submitted already."""
        decode = self.state.decode
        decode.in_flight.popleft()
        if not decode.in_flight:
            decode.held_since_ns = self.now_ns()
        decode.expected = decode.waiting is None and not decode.in_flight

    def _turn(self) -> None:
        self._dispatcher.turn()
        if self._lanes.idle.has_free:
            explain_idle(self.state, self._lanes, self._splits, self.now_ns())
        if self._lanes.flights and not self.state.stuck_timer:
            self.state.stuck_timer = True
            self.state.look_due_ns = self.now_ns() + LOOK_EVERY_NS
            self.send_after(LOOK_EVERY_NS, self._refs.arbiter, LookForStuckItems())

    def on_look_for_stuck_items(self, message: LookForStuckItems) -> None:
        state, now_ns = self.state, self.now_ns()
        state.stuck_timer = False
        flights = self._lanes.flights.values()
        excuse(flights, now_ns - state.look_due_ns)
        for flight in self._watchdog.overdue(flights, state.estimates, now_ns):
            flight.stuck = True
            state.counts["stuck items"] += 1
            self.send(self._refs.gateway, lane_stuck(flight, self._device.units, now_ns))
        self._turn()

    def _give_up(self, job: PrefillJob) -> None:
        """Launch no more of a cancelled or failed batch, and end it when nothing of it is in flight."""
        if job.in_flight:
            self.state.unslot(job)
            return
        self._forget(job)
        batch_id = job.work.batch_id
        self._device.discard(batch_id)
        if job.failure is not None:
            self.send(self._refs.prefill, PrefillFailed(batch_id, job.failure))
        else:
            self.send(self._refs.prefill, PrefillCancelled(batch_id))

    def _forget(self, job: PrefillJob) -> None:
        assert job.in_flight == 0
        del self.state.jobs[job.work.batch_id]
        self.state.unslot(job)

    def idle_report(self) -> IdleReport:
        return self._lanes.idle.report(self.now_ns())

    def describe(self) -> dict[str, Any]:
        return described(self.state, self._device, self._lanes, self._splits, self.now_ns())
