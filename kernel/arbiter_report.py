"""What the arbiter tells: its state, and why requests wait - the head of the queue, batches, held steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from muxk.kernel.arbiter_state import ArbiterState
from muxk.kernel.device import Device
from muxk.kernel.idle_summary import idle_summary
from muxk.kernel.jobs import PrefillJob
from muxk.kernel.lanes import LaneTable, SplitLedger
from muxk.kernel.statuses import Reason, StatusReport
from muxk.kernel.work import PAGE_SIZE

NS_PER_MS = 1_000_000


def described(
    state: ArbiterState, device: Device, lanes: LaneTable, splits: SplitLedger, now_ns: int
) -> dict[str, Any]:
    """For `muxk state`."""
    decode, split = state.decode_view(now_ns), splits.current
    return {
        "policy": state.policy.name,
        "policy_sha": state.policy.sha,
        "device": device.name,
        "units": device.units,
        "device_state": dict(device.describe()),
        "split": {"decode": split.decode_units, "prefill": split.prefill_units},
        "split_residency_ms": splits.residency_ms(now_ns),
        "lanes": lanes.describe(now_ns),
        "idle": idle_summary(lanes.idle.report(now_ns)),
        "decode_batch": decode.batch,
        "decode_context_tokens": decode.context_tokens,
        "prefill_batches": len(state.jobs),
        "parked": state.parked is not None,
        "parked_bytes": 0 if state.parked is None else state.parked.parked_bytes,
        "counts": dict(sorted((state.counts + state.decider.counts).items())),
    }


class ArbiterReport:
    """Made for one question."""

    def __init__(
        self,
        state: ArbiterState,
        lanes: LaneTable,
        splits: SplitLedger,
        now_ns: int,
        asked: Collection[int],
    ) -> None:
        self._state = state
        self._lanes = lanes
        self._splits = splits
        self._now_ns = now_ns
        self._report = StatusReport("arbiter", asked)

    def made(self) -> StatusReport:
        self._add_head()
        for job in self._state.jobs.values():
            self._add_batch(job)
        self._add_held_step()
        return self._report

    def _rule(self, point: str) -> str | None:
        """The rule of the last decision at this point."""
        decision = self._state.decision
        return None if decision is None else decision.rule(point)

    # --- the head of the queue ---

    def _add_head(self) -> None:
        head = self._state.head
        if head is not None and self._state.candidate is not None and self._report.wants(head):
            self._report.add(head, *self._why_not_formed())

    def _why_not_formed(self) -> tuple[Reason, str, str | None]:
        state = self._state
        if state.probes or self._lanes.probes:
            return Reason.LANE_BUSY, "the device is being measured", None
        if state.forming:
            return Reason.FORMING, "a batch is being put together", None
        running = state.running
        if running is not None and not running.launched:
            return Reason.LANE_BUSY, self._busy_with(running), self._why_not_preempted()
        if self._splits.current.prefill_units == 0:
            return self._why_held()
        return Reason.LANE_BUSY, "the last layers of a batch, or a decode step, run before it", None

    def _why_held(self) -> tuple[Reason, str, str | None]:
        """A policy may wait with prefill for pages that only decode gives back."""
        candidate, kv = self._state.candidate, self._state.kv
        assert candidate is not None
        needs = candidate.new_tokens // PAGE_SIZE + 1
        held = "the split gives prefill no units"
        if needs <= kv.pages_free:
            return Reason.PREFILL_HELD, held, self._rule("split")
        pages = f"it is first and needs up to {needs} pages; {kv.pages_free} of {kv.pages_total} are free"
        return Reason.NO_PAGES, f"{pages}, and {held}", self._rule("split")

    def _busy_with(self, job: PrefillJob) -> str:
        before = f"batch {job.work.batch_id} ({_count(job.work.rows, 'request')}) runs first: {_left(job)}"
        if not self._state.may_preempt():
            return f"{before}; another batch is parked already"
        refused = self._state.preemption_refused()
        return before if refused is None else f"{before}; {refused}: it runs to its end"

    def _why_not_preempted(self) -> str | None:
        """The rule that said so; None when the kernel did."""
        state = self._state
        if not state.may_preempt() or state.preemption_refused() is not None:
            return None
        return self._rule("preempt")

    # --- batches ---

    def _add_batch(self, job: PrefillJob) -> None:
        if job.cancelled or job.failure is not None:
            return
        reason, detail, rule = self._why_batch_is_there(job)
        for request_id in _not_ended(job):
            if self._report.wants(request_id):
                self._report.add(request_id, reason, detail, rule)

    def _why_batch_is_there(self, job: PrefillJob) -> tuple[Reason, str, str | None]:
        state = self._state
        batch = f"batch {job.work.batch_id} ({_count(job.work.rows, 'request')})"
        if job is state.parked:
            times = _count(job.preemptions, "time")
            return Reason.PARKED, f"{batch} was parked {times}: {_left(job)}", job.parked_by
        if job is not state.running or job.launched:
            return Reason.PREFILLING, f"the last layers of {batch} run", None
        if not job.in_flight and self._splits.current.prefill_units == 0:
            held = f"{batch} waits, the split gives prefill no units: {_left(job)}"
            return Reason.PREFILL_HELD, held, self._rule("split")
        return Reason.PREFILLING, f"{batch} runs: {_left(job)}", self._rule("slice")

    # --- decode ---

    def _add_held_step(self) -> None:
        decode = self._state.decode
        if not decode.held or decode.waiting is None:
            return
        held_ms = (self._now_ns - decode.held_since_ns) // NS_PER_MS
        detail = f"the decode step has been held for {held_ms} ms"
        for request_id in decode.waiting.requests:
            if self._report.wants(request_id):
                self._report.add(request_id, Reason.DECODE_HELD, detail, self._rule("split"))


def _not_ended(job: PrefillJob) -> Iterator[int]:
    """Requests whose last token is not in a chunk that has ended."""
    last = 0
    done = job.chunk.stop if job.between_chunks and not job.in_flight else job.chunk.start
    for request_id, new_tokens in zip(job.work.requests, job.work.new_tokens, strict=True):
        last += new_tokens
        if last > done:
            yield request_id


def _left(job: PrefillJob) -> str:
    """What is not launched yet."""
    if job.between_chunks:
        return (
            f"{_count(job.left.new_tokens, 'token')} not begun, {_count(job.layers, 'layer')} for each chunk"
        )
    chunk = f"layer {job.next_layer} of {job.layers} is next for {_count(job.begun.new_tokens, 'token')}"
    if not job.left.new_tokens:
        return chunk
    return f"{chunk}, {_count(job.left.new_tokens, 'token')} more after them"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
