"""All that the arbiter owns, who it talks to, and the view it builds for a decision."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from muxk.kernel.actor import Ref
from muxk.kernel.decider import Decider
from muxk.kernel.device import Device
from muxk.kernel.estimates import Estimates
from muxk.kernel.jobs import DecodeState, PrefillJob
from muxk.kernel.lanes import LaneTable, SplitLedger
from muxk.kernel.messages import (
    DecodeFailed,
    DecodeFloorReached,
    DecodeStepDone,
    FormBatch,
    GroupResized,
    ItemsMeasured,
    LaneMoved,
    LaneStuck,
    LookForStuckItems,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ProbeDone,
    QueueChanged,
    RequestsReported,
    RunProbe,
    StateReported,
    StepLaunched,
    StepsRan,
)
from muxk.kernel.policy import Policy
from muxk.kernel.view import Decision, DecodeView, KvView, Limits, PrefillView, QueueView, View
from muxk.kernel.work import PrefillShape


class ArbiterRefs(Protocol):
    """Who the arbiter talks to."""

    @property
    def arbiter(self) -> Ref[DecodeFloorReached | LookForStuckItems]: ...

    @property
    def admission(self) -> Ref[FormBatch]: ...

    @property
    def prefill(self) -> Ref[PrefillDone | PrefillFailed | PrefillCancelled]: ...

    @property
    def decode(self) -> Ref[DecodeStepDone | StepsRan | DecodeFailed | StepLaunched]: ...

    @property
    def estimator(self) -> Ref[ItemsMeasured | ProbeDone]: ...

    @property
    def placement(self) -> Ref[GroupResized] | None: ...

    @property
    def group(self) -> int: ...

    @property
    def gateway(self) -> Ref[StateReported | RequestsReported | LaneStuck | LaneMoved]: ...


@dataclass
class ArbiterState:
    """All that the arbiter owns."""

    decider: Decider
    decode: DecodeState = field(default_factory=DecodeState)
    jobs: dict[int, PrefillJob] = field(default_factory=dict)
    running: PrefillJob | None = None
    parked: PrefillJob | None = None
    forming: bool = False
    forming_depth: int = 0
    candidate: PrefillView | None = None
    head: int | None = None
    """The request that the candidate would begin with."""
    decision: Decision | None = None
    """The last one."""
    queue: QueueView = field(default_factory=lambda: QueueView(0, 0))
    kv: KvView = field(default_factory=lambda: KvView(0, 0))
    estimates: Estimates = field(default_factory=Estimates)
    probes: deque[RunProbe] = field(default_factory=deque)
    floor_timer: bool = False
    stuck_timer: bool = False
    look_due_ns: int = 0
    """When that timer is due."""
    resizing: int = 0
    """Changes of its width that placement waits for."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def policy(self) -> Policy:
        """The one in force."""
        return self.decider.policy

    @property
    def limits(self) -> Limits:
        """Of that policy, within what the kernel can enforce."""
        return self.decider.limits

    def take_queue(self, message: QueueChanged, device: Device) -> None:
        """The candidate with the hidden state that it would keep when parked: that of its first chunk."""
        candidate = message.candidate
        if candidate is not None:
            tokens = min(candidate.new_tokens, device.chunk_tokens_max)
            parked_bytes = tokens * device.parked_bytes_per_token
            candidate = msgspec.structs.replace(candidate, parked_bytes=parked_bytes)
        self.queue, self.candidate, self.head = message.queue, candidate, message.head

    def work_exists(self) -> bool:
        """Something could be launched if the policy and the bounds allowed."""
        return self.decode.waiting is not None or (
            not self.forming and (self.running is not None or self.candidate is not None)
        )

    def may_wait_for_decode(self) -> bool:
        """A decode step runs or is about to be submitted, so that a fused step has to wait for the next."""
        return self.decode.waiting is None and self.decode.active

    def decode_floor_passed(self, now_ns: int) -> bool:
        return self.decode.held and now_ns - self.decode.held_since_ns >= self.limits.decode_floor_ns

    def may_preempt(self) -> bool:
        """One level: somebody runs, nobody is parked, and somebody waits."""
        return self.running is not None and self.parked is None and self.candidate is not None

    def preemption_refused(self) -> str | None:
        """What the limits have against parking the batch that runs, as it is counted; None: nothing."""
        assert self.running is not None
        if self.running.preemptions >= self.limits.preemptions:
            return "preemptions over the limit"
        if self.running.parked_bytes > self.limits.parked_bytes:
            return "preemptions over the limit of parked bytes"
        return None

    def resume_parked(self) -> None:
        """Before each decision, so that the policy may prefer a newcomer once more."""
        if self.running is not None and self.running.launched:
            self.running = None
        if self.running is None and self.parked is not None and not self.forming:
            self.running, self.parked = self.parked, None

    def unslot(self, job: PrefillJob) -> None:
        """Make sure that no more layers of this batch are launched."""
        if self.running is job:
            self.running = None
        if self.parked is job:
            self.parked = None

    def decode_view(self, now_ns: int) -> DecodeView:
        decode = self.decode
        coming = [job for job in self.jobs.values() if job.hands_over] if self.jobs else ()
        coming_rows = coming_tokens = 0
        for job in coming:
            coming_rows += job.work.rows
            coming_tokens += job.context_tokens
        if not decode.active:
            return DecodeView(0, 0, False, False, 0, None, coming_rows, coming_tokens)
        waiting, in_flight = decode.waiting is not None, bool(decode.in_flight)
        return DecodeView(
            decode.rows,
            decode.context_tokens,
            waiting,
            in_flight,
            now_ns - decode.held_since_ns if waiting and not in_flight else 0,
            decode.tbt_slo_ns,
            coming_rows,
            coming_tokens,
        )

    def _leaving(self) -> PrefillShape | None:
        return next((job.shape for job in self.jobs.values() if job.hands_over), None)

    def view(self, device: Device, lanes: LaneTable, splits: SplitLedger, now_ns: int) -> View:
        """The facts of one decision, in the order of `View`."""
        running, parked = self.running, self.parked
        return View(
            now_ns,
            device.units,
            splits.disjoint,
            splits.current,
            device.layers,
            self.decode_view(now_ns),
            None if running is None else running.view(),
            None if parked is None else parked.view(),
            self.candidate,
            lanes.prefills,
            self.queue,
            self.kv,
            self.estimates,
            self._leaving() if self.jobs else None,
        )
