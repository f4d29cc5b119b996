"""From a policy's decision to launches: the half of the arbiter that acts.

`Dispatcher.turn` builds a view, asks the policy, and launches, until there is nothing more to launch. What it
launches is decode steps, layers of prefill chunks, or both in one fused pass.
"""

from __future__ import annotations

from muxk.kernel.actor import Context
from muxk.kernel.arbiter_state import ArbiterRefs, ArbiterState
from muxk.kernel.device import Device
from muxk.kernel.jobs import PrefillJob
from muxk.kernel.lanes import LaneTable, SplitLedger
from muxk.kernel.messages import DecodeFloorReached, FormBatch, StepLaunched
from muxk.kernel.view import Decision
from muxk.kernel.work import DecodeWork, Split

LAUNCHES_PER_TURN = 64  # bound on the decide-and-launch loop of one event; backlogs end it long before


class Dispatcher:
    """Owned by the arbiter, whose state it works on."""

    def __init__(
        self,
        device: Device,
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

    def turn(self) -> None:
        """Decide and launch until nothing more can be launched."""
        state = self._state
        if state.probes or self._lanes.probes:
            self._launch_probe()
            return
        for _ in range(LAUNCHES_PER_TURN):
            if state.running is not None or state.parked is not None:
                state.resume_parked()
            if not state.work_exists():
                break
            if not self._apply(self._decide()):
                break
        if not self._lanes.flights:
            self._ensure_progress()
        if state.decode.waiting is not None:
            self._arm_decode_floor()

    def _decide(self) -> Decision:
        state = self._state
        view = state.view(self._device, self._lanes, self._splits, self._context.now_ns())
        state.decision = state.decider.decide(view)
        return state.decision

    def _apply(self, decision: Decision) -> bool:
        """Launch one thing that the decision asks for; False when there is nothing to launch."""
        # A fused step is one pass over the whole device, so that is the split it runs on.
        self._change_split(self._splits.whole if decision.fuse else decision.split)
        if decision.fuse:
            return self._apply_fused(decision)
        if self._may_launch_decode():
            self._launch_decode()
            return True
        if not self._may_launch_prefill():
            return False
        if self._preempts(decision):
            self._park_running(decision)
        return self._advance_prefill(decision)

    def _change_split(self, split: Split) -> None:
        state = self._state
        if split == self._splits.current:
            return
        if split not in self._splits.legal:
            state.counts["illegal splits"] += 1
            split = self._splits.whole
        if split != self._splits.current:
            self._splits.change(split, self._context.now_ns())
            state.counts["split changes"] += 1

    # --- separate lanes, or one shared in time ---

    def _may_launch_decode(self) -> bool:
        decode = self._state.decode
        if decode.waiting is None or len(decode.in_flight) > self._decode_ahead():
            return False
        return self._splits.current.decode_units > 0 or self._decode_floor_passed()

    def _decode_ahead(self) -> int:
        device, policy = self._device.decode_ahead, self._state.decider.limits.decode_ahead
        return device if device < policy else policy

    def _decode_floor_passed(self) -> bool:
        return self._state.decode_floor_passed(self._context.now_ns())

    def _may_launch_prefill(self) -> bool:
        state = self._state
        if self._splits.current.prefill_units == 0 or state.forming:
            return False
        bound = state.limits.backlog
        if self._splits.shares_time and state.decode.active:
            # One lane shared in time: a decode step must not queue behind more than one prefill item.
            bound = 1
        return self._lanes.prefills < bound

    def _preempts(self, decision: Decision) -> bool:
        """The policy wants it, there is a batch for another, and the limits allow it."""
        if not decision.preempt or not self._state.may_preempt():
            return False
        refused = self._state.preemption_refused()
        if refused is not None:
            self._state.counts[refused] += 1
        return refused is None

    def _park_running(self, decision: Decision) -> None:
        state = self._state
        job = state.running
        assert job is not None
        assert state.parked is None
        job.preemptions += 1
        job.parked_by = decision.rule("preempt")
        state.counts["preemptions"] += 1
        state.parked = job
        state.running = None
        self._form_batch(depth=job.depth + 1)

    def _advance_prefill(self, decision: Decision) -> bool:
        state = self._state
        if state.forming:
            return False
        if state.running is not None:
            self._launch_prefill(state.running, decision)
            return True
        if state.candidate is not None:
            self._form_batch(depth=0)
        return False

    def _form_batch(self, depth: int) -> None:
        self._state.forming = True
        self._state.forming_depth = depth
        now_ns = self._context.now_ns()
        self._context.send(self._refs.admission, FormBatch(self._state.decode_view(now_ns)))

    # --- fused steps ---

    def _apply_fused(self, decision: Decision) -> bool:
        state = self._state
        if not state.forming and self._preempts(decision):
            self._park_running(decision)
        if state.forming or state.may_wait_for_decode():
            return self._launch_decode_at_floor()  # who is formed now, or decodes next, shares the step
        if state.running is None and state.candidate is not None:
            self._form_batch(depth=0)
            return False
        if state.decode.waiting is None:
            return self._launch_chunk_alone(decision)
        if state.running is None:
            may = self._may_launch_decode()
            if may:
                self._launch_decode()
            return may
        if state.decode.in_flight or self._lanes.prefills:
            return self._launch_decode_at_floor()  # a step was queued ahead, or a chunk runs alone
        if state.running.between_chunks:
            self._launch_fused(state.running, decision)
            return True
        # Another policy left it in the middle of a chunk: its layers run by themselves, behind a step.
        self._launch_decode()
        self._launch_prefill(state.running, decision)
        return True

    def _launch_decode_at_floor(self) -> bool:
        """A step that waited for too long goes without a chunk."""
        passed = self._decode_floor_passed()
        if passed:
            self._launch_decode()
        return passed

    def _launch_chunk_alone(self, decision: Decision) -> bool:
        """Nobody decodes: the chunk goes through all layers, as far as the backlog allows."""
        state = self._state
        if state.running is None or self._lanes.prefills >= state.limits.backlog:
            return False
        self._launch_prefill(state.running, decision)
        return True

    def _launch_fused(self, job: PrefillJob, decision: Decision) -> None:
        decode = self._take_waiting()
        job.begin_chunk(self._chunk_tokens(job, decision))
        self._state.counts["fused steps"] += 1
        self._lanes.launch_fused(job, decode, self._context.now_ns())

    # --- progress ---

    def _ensure_progress(self) -> None:
        """Something runs while work exists, even under a policy that holds both phases."""
        state = self._state
        if state.forming or state.decode.expected or not state.work_exists():
            return
        state.counts["forced launches"] += 1
        self._change_split(self._splits.whole)
        if state.decode.waiting is not None:
            self._launch_decode()
        else:
            self._advance_prefill(Decision(self._splits.whole, layers=1, preempt=False, rules=()))

    def _arm_decode_floor(self) -> None:
        state = self._state
        if not state.decode.held or state.floor_timer:
            return
        floor_ns = state.limits.decode_floor_ns
        left_ns = floor_ns - (self._context.now_ns() - state.decode.held_since_ns)
        state.floor_timer = True
        self._context.send_after(max(1, left_ns), self._refs.arbiter, DecodeFloorReached())

    # --- launches ---

    def _launch_probe(self) -> None:
        if self._lanes.flights:
            return
        self._lanes.launch_probe(self._state.probes.popleft(), self._context.now_ns())

    def _launch_decode(self) -> None:
        work = self._take_waiting()
        units = self._splits.current.decode_units or self._device.units
        self._lanes.launch_decode(units, work, self._context.now_ns())
        if self._decode_ahead():
            self._context.send(self._refs.decode, StepLaunched(work.step_id, work.version))

    def _take_waiting(self) -> DecodeWork:
        decode = self._state.decode
        assert decode.waiting is not None
        work, decode.waiting = decode.waiting, None
        decode.in_flight.append(work)
        decode.newest_step = work.step_id
        return work

    def _launch_prefill(self, job: PrefillJob, decision: Decision) -> None:
        if job.between_chunks:
            job.begin_chunk(self._chunk_tokens(job, decision))
        units = self._splits.current.prefill_units
        layers = self._device.layers if decision.fuse else decision.layers
        self._lanes.launch_prefill(units, job, layers, self._context.now_ns())

    def _chunk_tokens(self, job: PrefillJob, decision: Decision) -> int:
        """As many as the policy wants and the device's scratch memory allows."""
        wanted = job.left.new_tokens if decision.tokens is None else max(1, decision.tokens)
        return min(wanted, self._device.chunk_tokens_max)
