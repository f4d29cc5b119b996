"""The arbiter: where policy meets hardware.

It owns the lanes. Executors submit work (a decode step, a prefill batch); at each event the arbiter builds a
frozen `View`, asks the policy, and launches items, holds them, or changes the split. Preempting a prefill is
not launching its next layers. Invariants, whatever the policy says: a split is one that the device offers, a
lane holds at most `limits.backlog` items, decode is never held beyond the decode floor, something runs while
work exists, and a lane whose units meet those of an older item waits for it by order on the device, never by
draining the host.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from muxk.kernel.actor import Actor, Ref
from muxk.kernel.device import Device, ItemDone, ItemFailed, Lane
from muxk.kernel.estimates import Estimates
from muxk.kernel.jobs import DecodeState, Flight, PrefillJob
from muxk.kernel.messages import (
    BatchNotFormed,
    CancelPrefill,
    DecodeFailed,
    DecodeFloorReached,
    DecodeIdle,
    DecodeStepDone,
    EstimatesChanged,
    FormBatch,
    ItemMeasured,
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
from muxk.kernel.policy import Policy, PolicyBook
from muxk.kernel.view import Decision, DecodeView, KvView, PrefillView, QueueView, View
from muxk.kernel.work import DecodeWork, Item, Phase, PrefillWork, ProbeWork, Split

LAUNCHES_PER_TURN = 64
"""Bound on the decide-and-launch loop of one event; backlogs end it long before."""


class ArbiterRefs(Protocol):
    """Who the arbiter talks to."""

    @property
    def arbiter(self) -> Ref[DecodeFloorReached]: ...

    @property
    def admission(self) -> Ref[FormBatch]: ...

    @property
    def prefill(self) -> Ref[PrefillDone | PrefillFailed | PrefillCancelled]: ...

    @property
    def decode(self) -> Ref[DecodeStepDone | DecodeFailed]: ...

    @property
    def estimator(self) -> Ref[ItemMeasured | ProbeDone]: ...

    @property
    def gateway(self) -> Ref[StateReported]: ...


@dataclass
class ArbiterState:
    """All that the arbiter owns."""

    policy: Policy
    split: Split
    decode: DecodeState = field(default_factory=DecodeState)
    jobs: dict[int, PrefillJob] = field(default_factory=dict)
    running: PrefillJob | None = None
    parked: PrefillJob | None = None
    forming: bool = False
    forming_depth: int = 0
    candidate: PrefillView | None = None
    queue: QueueView = field(default_factory=lambda: QueueView(0, 0))
    kv: KvView = field(default_factory=lambda: KvView(0, 0))
    estimates: Estimates = field(default_factory=Estimates)
    flights: dict[int, Flight] = field(default_factory=dict)
    probes: deque[RunProbe] = field(default_factory=deque)
    next_item: int = 1
    last_decode_end_ns: int = 0
    floor_timer: bool = False
    split_since_ns: int = 0
    split_residency_ns: Counter[Split] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


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

    def __init__(self, device: Device, book: PolicyBook, policy_sha: str, refs: ArbiterRefs) -> None:
        self._device = device
        self._book = book
        self._refs = refs
        self._splits = device.splits()
        self._whole = Split(device.units, device.units)
        self._legal = self._legal_splits()
        self.state = ArbiterState(policy=book[policy_sha], split=self._whole)

    def _legal_splits(self) -> frozenset[Split]:
        """Disjoint splits and what is left of them when one phase is held, and the whole device."""
        legal = {self._whole, Split(self._device.units, 0), Split(0, self._device.units)}
        for split in self._splits:
            legal |= {split, Split(split.decode_units, 0), Split(0, split.prefill_units)}
        return frozenset(legal)

    # --- facts that change the view ---

    def on_run_probe(self, message: RunProbe) -> None:
        self.state.probes.append(message)
        self._turn()

    def on_estimates_changed(self, message: EstimatesChanged) -> None:
        self.state.estimates = message.estimates

    def on_policy_changed(self, message: PolicyChanged) -> None:
        self.state.policy = self._book[message.sha]
        self.state.counts["policy swaps"] += 1
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
        if job.in_flight == 0:
            self._drop_job(job)
        self._turn()

    def on_submit_decode(self, message: SubmitDecode) -> None:
        decode = self.state.decode
        if decode.launched is not None and decode.launched.step_id == message.work.step_id:
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
        flight = self.state.flights.pop(message.item_id, None)
        if flight is None:
            self.state.counts["completions of an older generation"] += 1
            return
        self._measure(flight, message)
        if flight.job is not None:
            self._prefill_item_ended(flight.job, message)
        elif isinstance(flight.work, DecodeWork):
            self._decode_step_ended(flight.work, message)
        elif isinstance(flight.work, ProbeWork):
            elapsed_ns = max(1, message.ended_ns - message.started_ns)
            self.send(self._refs.estimator, ProbeDone(flight.work.probe_id, elapsed_ns))
        self._turn()

    def on_item_failed(self, message: ItemFailed) -> None:
        flight = self.state.flights.pop(message.item_id, None)
        if flight is None:
            self.state.counts["completions of an older generation"] += 1
            return
        self.state.counts["failed items"] += 1
        if flight.job is not None:
            flight.job.in_flight -= 1
            flight.job.failure = message.reason
            if flight.job.in_flight == 0:
                self._drop_job(flight.job)
        elif isinstance(flight.work, DecodeWork):
            self._expect_decode(flight.work.rows)
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
        if job.in_flight == 0 and (job.cancelled or job.failure is not None) and not message.tokens:
            self._drop_job(job)
        elif job.layers_left == 0 and job.in_flight == 0:
            del self.state.jobs[batch_id]
            if self.state.running is job:
                self.state.running = None
            if not self.state.decode.active:
                self._expect_decode(job.work.rows)
            done = PrefillDone(batch_id, message.tokens, message.ended_ns)
            self.send(self._refs.prefill, done)

    def _decode_step_ended(self, work: DecodeWork, message: ItemDone) -> None:
        self.state.decode.launched = None
        self.state.last_decode_end_ns = message.ended_ns
        self.state.counts["decode steps"] += 1
        self._expect_decode(work.rows)
        done = DecodeStepDone(work.step_id, work.version, message.tokens, message.ended_ns)
        self.send(self._refs.decode, done)

    def _expect_decode(self, rows: int) -> None:
        self.state.decode.launched = None
        self.state.decode.expected = True
        self.state.decode.rows = rows

    def _drop_job(self, job: PrefillJob) -> None:
        """Forget a cancelled or failed batch none of whose items is in flight."""
        assert job.in_flight == 0
        state = self.state
        batch_id = job.work.batch_id
        del state.jobs[batch_id]
        if state.running is job:
            state.running = None
        if state.parked is job:
            state.parked = None
        self._device.discard(batch_id)
        if job.failure is not None:
            self.send(self._refs.prefill, PrefillFailed(batch_id, job.failure))
        else:
            self.send(self._refs.prefill, PrefillCancelled(batch_id))

    def _measure(self, flight: Flight, message: ItemDone) -> None:
        work = flight.work
        if isinstance(work, ProbeWork):
            return
        is_decode = isinstance(work, DecodeWork)
        measured = ItemMeasured(
            phase=flight.phase,
            units=len(flight.lane.units),
            rows=work.rows,
            new_tokens=work.rows if flight.job is None else flight.job.new_tokens,
            pairs=0 if flight.job is None else flight.job.pairs,
            context_tokens=work.context_tokens if is_decode else 0,
            layers=flight.layers,
            elapsed_ns=message.ended_ns - message.started_ns,
            shared=flight.shared or self._others_in_flight(flight.lane),
        )
        self.send(self._refs.estimator, measured)

    def _others_in_flight(self, lane: Lane) -> bool:
        return any(other.lane is not lane for other in self.state.flights.values())

    # --- decisions ---

    def _turn(self) -> None:
        """Decide and launch until nothing more can be launched."""
        if self.state.probes or self._probe_in_flight():
            self._launch_probe()
            return
        for _ in range(LAUNCHES_PER_TURN):
            if not self._work_exists():
                break
            decision = self._decide()
            if not self._apply(decision):
                break
        self._ensure_progress()
        self._arm_decode_floor()

    def _work_exists(self) -> bool:
        state = self.state
        return state.decode.waiting is not None or (
            not state.forming
            and (state.running is not None or state.parked is not None or state.candidate is not None)
        )

    def _decide(self) -> Decision:
        decision = self.state.policy.decide(self._view())
        counts = self.state.counts
        for rule in decision.rules:
            counts[rule] += 1
        for error in decision.errors:
            counts[f"rule error: {error}"] += 1
        return decision

    def _view(self) -> View:
        state = self.state
        running = state.running if state.running is not None and state.running.layers_left else None
        return View(
            now_ns=self.now_ns(),
            units_total=self._device.units,
            splits=self._splits,
            split=state.split,
            layers=self._device.layers,
            decode=self._decode_view(),
            running=None if running is None else running.view(),
            parked=None if state.parked is None else state.parked.view(),
            candidate=state.candidate,
            prefill_in_flight=self._prefills_in_flight(),
            queue=state.queue,
            kv=state.kv,
            estimates=state.estimates,
        )

    def _decode_view(self) -> DecodeView:
        decode = self.state.decode
        active = decode.active
        held_ns = self.now_ns() - decode.held_since_ns if decode.waiting is not None else 0
        return DecodeView(
            batch=decode.rows if active else 0,
            context_tokens=decode.context_tokens if active else 0,
            waiting=decode.waiting is not None,
            in_flight=decode.launched is not None,
            idle_ns=held_ns,
        )

    def _apply(self, decision: Decision) -> bool:
        """Launch one thing that the decision asks for; False when there is nothing to launch."""
        self._change_split(decision.split)
        if self._may_launch_decode():
            self._launch_decode()
            return True
        if not self._may_launch_prefill():
            return False
        if decision.preempt and self._may_preempt():
            self._park_running()
        return self._advance_prefill(decision.layers)

    def _change_split(self, split: Split) -> None:
        state = self.state
        if split not in self._legal:
            state.counts["illegal splits"] += 1
            split = self._whole
        if split == state.split:
            return
        now_ns = self.now_ns()
        state.split_residency_ns[state.split] += now_ns - state.split_since_ns
        state.split = split
        state.split_since_ns = now_ns
        state.counts["split changes"] += 1

    def _may_launch_decode(self) -> bool:
        decode = self.state.decode
        if decode.waiting is None or decode.launched is not None:
            return False
        return self.state.split.decode_units > 0 or self._decode_floor_passed()

    def _decode_floor_passed(self) -> bool:
        decode = self.state.decode
        held_ns = self.now_ns() - decode.held_since_ns
        return decode.waiting is not None and held_ns >= self.state.policy.limits.decode_floor_ns

    def _may_launch_prefill(self) -> bool:
        state = self.state
        if state.split.prefill_units == 0 or state.forming:
            return False
        bound = state.policy.limits.backlog
        if state.split == self._whole and state.decode.active:
            # One lane shared in time: a decode step must not queue behind more than one prefill item.
            bound = 1
        return self._prefills_in_flight() < bound

    def _may_preempt(self) -> bool:
        state = self.state
        return (
            state.running is not None
            and state.running.layers_left > 0
            and state.parked is None
            and state.candidate is not None
        )

    def _park_running(self) -> None:
        job = self.state.running
        assert job is not None and self.state.parked is None
        job.preemptions += 1
        self.state.counts["preemptions"] += 1
        self.state.parked = job
        self.state.running = None
        self._form_batch(depth=job.depth + 1)

    def _advance_prefill(self, layers: int) -> bool:
        state = self.state
        if state.forming:
            return False
        if state.running is not None and state.running.layers_left == 0:
            state.running = None
        if state.running is None and state.parked is not None:
            state.running, state.parked = state.parked, None
        if state.running is not None:
            self._launch_prefill(state.running, layers)
            return True
        if state.candidate is not None:
            self._form_batch(depth=0)
        return False

    def _form_batch(self, depth: int) -> None:
        self.state.forming = True
        self.state.forming_depth = depth
        self.send(self._refs.admission, FormBatch(self._decode_view()))

    def _ensure_progress(self) -> None:
        """Something runs while work exists, even under a policy that holds both phases."""
        state = self.state
        if state.flights or state.forming or not self._work_exists():
            return
        state.counts["forced launches"] += 1
        self._change_split(self._whole)
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

    def _prefills_in_flight(self) -> int:
        return sum(flight.phase is Phase.PREFILL for flight in self.state.flights.values())

    def _probe_in_flight(self) -> bool:
        return any(isinstance(flight.work, ProbeWork) for flight in self.state.flights.values())

    def _launch_probe(self) -> None:
        if self.state.flights:
            return
        message = self.state.probes.popleft()
        lane = self._device.lane(message.probe.phase, message.probe.units)
        self._launch(lane, message.probe.phase, message.probe, None, 0, message.layers)

    def _launch_decode(self) -> None:
        decode = self.state.decode
        work = decode.waiting
        assert work is not None and decode.launched is None
        units = self.state.split.decode_units or self._device.units
        lane = self._device.lane(Phase.DECODE, units)
        decode.waiting = None
        decode.launched = work
        self._launch(lane, Phase.DECODE, work, None, 0, self._device.layers)

    def _launch_prefill(self, job: PrefillJob, layers: int) -> None:
        first = job.next_layer
        last = min(self._device.layers, first + max(1, layers))
        lane = self._device.lane(Phase.PREFILL, self.state.split.prefill_units)
        job.next_layer = last
        job.in_flight += 1
        self._launch(lane, Phase.PREFILL, job.work, job, first, last)

    def _launch(
        self,
        lane: Lane,
        phase: Phase,
        work: PrefillWork | DecodeWork | ProbeWork,
        job: PrefillJob | None,
        first_layer: int,
        last_layer: int,
    ) -> None:
        state = self.state
        item_id = state.next_item
        state.next_item += 1
        after = [
            flight.item_id
            for flight in state.flights.values()
            if flight.lane is not lane
            and (flight.meets(lane.units) or (job is not None and flight.job is job))
        ]
        shared = self._others_in_flight(lane)
        item = Item(item_id, work, first_layer, last_layer, last_layer == self._device.layers)
        layers = last_layer - first_layer
        state.flights[item_id] = Flight(item_id, lane, phase, work, layers, job, shared)
        self._device.launch(lane, item, after)

    def describe(self) -> dict[str, Any]:
        state = self.state
        now_ns = self.now_ns()
        residency = dict(state.split_residency_ns)
        residency[state.split] = residency.get(state.split, 0) + now_ns - state.split_since_ns
        return {
            "policy": state.policy.name,
            "policy_sha": state.policy.sha,
            "device": self._device.name,
            "units": self._device.units,
            "split": {"decode": state.split.decode_units, "prefill": state.split.prefill_units},
            "split_residency_ms": {
                f"{split.decode_units}+{split.prefill_units}": ns // 1_000_000
                for split, ns in sorted(residency.items())
            },
            "lanes": [
                {
                    "lane": flight.lane.name,
                    "phase": str(flight.phase),
                    "rows": getattr(flight.work, "rows", 0),
                    "layers": flight.layers,
                    "layers_left": flight.job.layers_left if flight.job is not None else 0,
                    "tokens": flight.job.new_tokens if flight.job is not None else 0,
                }
                for flight in state.flights.values()
            ],
            "decode_batch": state.decode.rows if state.decode.active else 0,
            "decode_context_tokens": state.decode.context_tokens if state.decode.active else 0,
            "prefill_batches": len(state.jobs),
            "parked": state.parked is not None,
            "counts": dict(sorted(state.counts.items())),
        }
