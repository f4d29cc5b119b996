"""The arbiter: where policy meets hardware.

It owns the lanes. Executors submit work (a decode step, a prefill batch); at each event the arbiter builds a
frozen `View`, asks the policy, and launches items, holds them, or changes the split. Preempting a prefill is
not launching its next layers. Invariants, whatever the policy says: a split is one that the device offers, a
lane holds at most `limits.backlog` items, decode is never held beyond the decode floor, something runs while
work exists, and a lane whose units meet those of an older item waits for it by order on the device, never by
draining the host.
"""

from __future__ import annotations

from typing import Any

from muxk.kernel.actor import Actor
from muxk.kernel.arbiter_state import ArbiterRefs, ArbiterState
from muxk.kernel.device import Device, ItemDone, ItemFailed
from muxk.kernel.jobs import Flight, PrefillJob
from muxk.kernel.lanes import LaneTable, SplitLedger
from muxk.kernel.messages import (
    BatchNotFormed,
    CancelPrefill,
    DecodeFailed,
    DecodeFloorReached,
    DecodeIdle,
    DecodeStepDone,
    EstimatesChanged,
    FormBatch,
    KvChanged,
    PolicyChanged,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ProbeDone,
    QueueChanged,
    ReportState,
    RunProbe,
    StateReported,
    SubmitDecode,
    SubmitPrefill,
)
from muxk.kernel.policy import PolicyBook
from muxk.kernel.view import Decision
from muxk.kernel.work import DecodeWork, Phase, ProbeWork, Split

LAUNCHES_PER_TURN = 64  # bound on the decide-and-launch loop of one event; backlogs end it long before


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
        | CancelPrefill
        | SubmitDecode
        | DecodeIdle
        | ItemDone
        | ItemFailed
        | DecodeFloorReached
        | ReportState
    )

    def __init__(
        self, device: Device, book: PolicyBook, policy_sha: str, refs: ArbiterRefs, first_item: int = 1
    ) -> None:
        """Items are numbered from `first_item`, so that no completion of a crashed arbiter fits this one."""
        self._device = device
        self._book = book
        self._refs = refs
        self._lanes = LaneTable(device, first_item)
        self._splits = SplitLedger(device)
        self.state = ArbiterState(policy=book[policy_sha])

    def started(self) -> None:
        self._splits.begin(self.now_ns())

    # --- facts that change the view ---

    def on_run_probe(self, message: RunProbe) -> None:
        self.state.probes.append(message)
        self._turn()

    def on_estimates_changed(self, message: EstimatesChanged) -> None:
        self.state.estimates = message.estimates

    def on_policy_changed(self, message: PolicyChanged) -> None:
        self.state.policy = self._book[message.sha]
        self.state.forget_rules()
        self.state.counts["policy swaps"] += 1
        self.state.floor_timer = False  # its floor may be shorter
        self._turn()

    def on_queue_changed(self, message: QueueChanged) -> None:
        self.state.queue = message.queue
        self.state.candidate = message.candidate
        self._turn()

    def on_kv_changed(self, message: KvChanged) -> None:
        self.state.kv = message.kv

    # --- work from the executors ---

    def on_batch_not_formed(self, message: BatchNotFormed) -> None:
        self.state.forming = False
        self._turn()

    def on_submit_prefill(self, message: SubmitPrefill) -> None:
        state = self.state
        assert state.running is None or state.running.layers_left == 0, "a batch was formed unasked"
        job = PrefillJob(
            message.work, message.arrival_ns, message.deadline_ns, state.forming_depth, self._device.layers
        )
        state.jobs[message.work.batch_id] = job
        state.running = job
        state.forming = False
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
        launched = 0 if decode.launched is None else decode.launched.step_id
        if message.work.step_id <= max(launched, decode.ended_step):
            self.state.counts["late decode versions"] += 1
            return
        if decode.waiting is None:
            decode.held_since_ns = self.now_ns()
        decode.waiting = message.work
        decode.expected = False
        decode.rows = message.work.rows
        decode.context_tokens = message.work.context_tokens
        self._turn()

    def on_decode_idle(self, message: DecodeIdle) -> None:
        decode = self.state.decode
        decode.expected = False
        if decode.waiting is None and decode.launched is None:
            decode.rows = 0
            decode.context_tokens = 0
        self._turn()

    # --- completions from the device ---

    def on_item_done(self, message: ItemDone) -> None:
        flight = self._ended(message.item_id)
        if flight is None:
            return
        measured = self._lanes.measured(flight, message)
        if measured is not None:
            self.send(self._refs.estimator, measured)
        if flight.job is not None:
            self._prefill_item_ended(flight.job, message)
        elif isinstance(flight.work, DecodeWork):
            self._decode_step_ended(flight.work, message)
        elif isinstance(flight.work, ProbeWork):
            elapsed_ns = max(1, message.ended_ns - message.started_ns)
            self.send(self._refs.estimator, ProbeDone(flight.work.probe_id, elapsed_ns))
        self._turn()

    def _ended(self, item_id: int) -> Flight | None:
        flight = self._lanes.ended(item_id)
        if flight is None:
            self.state.counts["completions of an older generation"] += 1
        return flight

    def on_item_failed(self, message: ItemFailed) -> None:
        flight = self._ended(message.item_id)
        if flight is None:
            return
        self.state.counts["failed items"] += 1
        if flight.job is not None:
            flight.job.in_flight -= 1
            # The first reason is the cause; items that were queued behind it fail for want of its result.
            flight.job.failure = flight.job.failure or message.reason
            self._give_up(flight.job)
        elif isinstance(flight.work, DecodeWork):
            self._expect_decode(flight.work)
            failed = DecodeFailed(flight.work.step_id, flight.work.version, message.reason)
            self.send(self._refs.decode, failed)
        elif isinstance(flight.work, ProbeWork):
            self.send(self._refs.estimator, ProbeDone(flight.work.probe_id, 0))
        self._turn()

    def on_decode_floor_reached(self, message: DecodeFloorReached) -> None:
        self.state.floor_timer = False
        self._turn()

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, "arbiter", self.describe()))

    def _prefill_item_ended(self, job: PrefillJob, message: ItemDone) -> None:
        job.in_flight -= 1
        batch_id = job.work.batch_id
        if job.failure is not None or (job.cancelled and not message.tokens):
            self._give_up(job)
        elif job.layers_left == 0 and job.in_flight == 0:
            self._forget(job)
            if not self.state.decode.active:
                self.state.decode.expected = True
                self.state.decode.rows = job.work.rows
            busy = self.state.decode.launched is not None
            self.send(self._refs.prefill, PrefillDone(batch_id, message.tokens, message.ended_ns, busy))

    def _decode_step_ended(self, work: DecodeWork, message: ItemDone) -> None:
        self.state.counts["decode steps"] += 1
        self._expect_decode(work)
        done = DecodeStepDone(work.step_id, work.version, message.tokens, message.ended_ns)
        self.send(self._refs.decode, done)

    def _expect_decode(self, ended: DecodeWork) -> None:
        decode = self.state.decode
        decode.launched = None
        decode.ended_step = ended.step_id
        decode.expected = True

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

    # --- decisions ---

    def _turn(self) -> None:
        """Decide and launch until nothing more can be launched."""
        if self.state.probes or self._lanes.probing():
            self._launch_probe()
            return
        for _ in range(LAUNCHES_PER_TURN):
            self.state.resume_parked()
            if not self.state.work_exists():
                break
            decision = self._decide()
            if not self._apply(decision):
                break
        self._ensure_progress()
        self._arm_decode_floor()

    def _decide(self) -> Decision:
        decision = self.state.policy.decide(
            self.state.view(self._device, self._lanes, self._splits, self.now_ns())
        )
        counts = self.state.counts
        for rule in decision.rules:
            counts[rule] += 1
        for error in decision.errors:
            counts[f"rule error: {error}"] += 1
        return decision

    def _apply(self, decision: Decision) -> bool:
        """Launch one thing that the decision asks for; False when there is nothing to launch."""
        self._change_split(decision.split)
        if self._may_launch_decode():
            self._launch_decode()
            return True
        if not self._may_launch_prefill():
            return False
        if decision.preempt and self.state.may_preempt():
            self._park_running()
        return self._advance_prefill(decision.layers)

    def _change_split(self, split: Split) -> None:
        state = self.state
        if split not in self._splits.legal:
            state.counts["illegal splits"] += 1
            split = self._splits.whole
        if split != self._splits.current:
            self._splits.change(split, self.now_ns())
            state.counts["split changes"] += 1

    def _may_launch_decode(self) -> bool:
        decode = self.state.decode
        if decode.waiting is None or decode.launched is not None:
            return False
        return self._splits.current.decode_units > 0 or self.state.decode_floor_passed(self.now_ns())

    def _may_launch_prefill(self) -> bool:
        state = self.state
        if self._splits.current.prefill_units == 0 or state.forming:
            return False
        bound = state.policy.limits.backlog
        if self._splits.shares_time and state.decode.active:
            # One lane shared in time: a decode step must not queue behind more than one prefill item.
            bound = 1
        return self._lanes.prefills() < bound

    def _park_running(self) -> None:
        job = self.state.running
        assert job is not None
        assert self.state.parked is None
        job.preemptions += 1
        self.state.counts["preemptions"] += 1
        self.state.parked = job
        self.state.running = None
        self._form_batch(depth=job.depth + 1)

    def _advance_prefill(self, layers: int) -> bool:
        state = self.state
        if state.forming:
            return False
        if state.running is not None:
            self._launch_prefill(state.running, layers)
            return True
        if state.candidate is not None:
            self._form_batch(depth=0)
        return False

    def _form_batch(self, depth: int) -> None:
        self.state.forming = True
        self.state.forming_depth = depth
        self.send(self._refs.admission, FormBatch(self.state.decode_view(self.now_ns())))

    def _ensure_progress(self) -> None:
        """Something runs while work exists, even under a policy that holds both phases."""
        state = self.state
        if self._lanes.flights or state.forming or not self.state.work_exists():
            return
        state.counts["forced launches"] += 1
        self._change_split(self._splits.whole)
        if state.decode.waiting is not None:
            self._launch_decode()
        else:
            self._advance_prefill(layers=1)

    def _arm_decode_floor(self) -> None:
        state = self.state
        if state.decode.waiting is None or state.floor_timer or state.decode.launched is not None:
            return
        floor_ns = state.policy.limits.decode_floor_ns
        left_ns = floor_ns - (self.now_ns() - state.decode.held_since_ns)
        state.floor_timer = True
        self.send_after(max(1, left_ns), self._refs.arbiter, DecodeFloorReached())

    # --- launches ---

    def _launch_probe(self) -> None:
        if self._lanes.flights:
            return
        message = self.state.probes.popleft()
        probe = message.probe
        self._lanes.launch(probe.phase, probe.units, probe, range(message.layers))

    def _launch_decode(self) -> None:
        decode = self.state.decode
        assert decode.launched is None
        assert decode.waiting is not None
        decode.launched, decode.waiting = decode.waiting, None
        units = self._splits.current.decode_units or self._device.units
        self._lanes.launch(Phase.DECODE, units, decode.launched, range(self._device.layers))

    def _launch_prefill(self, job: PrefillJob, layers: int) -> None:
        span = range(job.next_layer, min(self._device.layers, job.next_layer + max(1, layers)))
        job.next_layer = span.stop
        job.in_flight += 1
        units = self._splits.current.prefill_units
        self._lanes.launch(Phase.PREFILL, units, job.work, span, job)

    def describe(self) -> dict[str, Any]:
        state, split = self.state, self._splits.current
        decode = state.decode_view(self.now_ns())
        return {
            "policy": state.policy.name,
            "policy_sha": state.policy.sha,
            "device": self._device.name,
            "units": self._device.units,
            "split": {"decode": split.decode_units, "prefill": split.prefill_units},
            "split_residency_ms": self._splits.residency_ms(self.now_ns()),
            "lanes": self._lanes.describe(),
            "decode_batch": decode.batch,
            "decode_context_tokens": decode.context_tokens,
            "prefill_batches": len(state.jobs),
            "parked": state.parked is not None,
            "counts": dict(sorted(state.counts.items())),
        }
