"""prefill: the executor of prompt batches.

kv_pool hands it a batch with pages, it submits one work to the arbiter, which runs the layers in slices; the
hidden state between slices is parked on the device. Then it hands the requests to decode. Invariant: it owns
the pages of exactly the requests in `batches`, and releases them only when no item of the batch is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from muxk.actors.columns import page_table, sampling_columns
from muxk.actors.messages import (
    AbortRequest,
    JoinDecode,
    PagesFilled,
    ReleasePages,
    RequestAborted,
    RequestFailed,
    ReservedRequest,
    StartPrefill,
)
from muxk.actors.refs import PrefillInbox, Refs
from muxk.kernel.actor import Actor
from muxk.kernel.messages import (
    CancelPrefill,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ReportState,
    StateReported,
    SubmitPrefill,
)
from muxk.kernel.work import PrefillWork


@dataclass
class Batch:
    """A prompt batch between its reservation and its last layer."""

    requests: tuple[ReservedRequest, ...]
    aborted: dict[int, None] = field(default_factory=dict)


@dataclass
class PrefillState:
    batches: dict[int, Batch] = field(default_factory=dict)
    next_batch: int = 1
    late_events: int = 0


class Prefill(Actor):
    """One a device."""

    Accepts = PrefillInbox

    def __init__(self, refs: Refs) -> None:
        self._refs = refs
        self.state = PrefillState()

    def on_start_prefill(self, message: StartPrefill) -> None:
        batch_id = self.state.next_batch
        self.state.next_batch += 1
        self.state.batches[batch_id] = Batch(message.requests)
        requests = [reserved.request for reserved in message.requests]
        submission = SubmitPrefill(
            prefill_work(batch_id, message.requests),
            arrival_ns=min(request.arrival_ns for request in requests),
            deadline_ns=min(request.deadline_ns for request in requests),
        )
        self.send(self._refs.arbiter, submission)

    def on_prefill_done(self, message: PrefillDone) -> None:
        """Hand over to decode, always: the arbiter counts on decode's answer, even for an empty batch."""
        batch = self.state.batches.pop(message.batch_id)
        kept = [
            (reserved, message.tokens[4 * row : 4 * row + 4])
            for row, reserved in enumerate(batch.requests)
            if reserved.request.request_id not in batch.aborted
        ]
        filled = tuple(reserved.request.request_id for reserved in batch.requests)
        self.send(self._refs.kv_pool, PagesFilled(filled))
        for request_id in batch.aborted:
            self.send(self._refs.kv_pool, ReleasePages(request_id, b"", None))
        tokens = b"".join(token for _, token in kept)
        joining = tuple(reserved for reserved, _ in kept)
        self.send(self._refs.decode, JoinDecode(joining, tokens, message.decode_running))

    def on_prefill_failed(self, message: PrefillFailed) -> None:
        batch = self.state.batches.pop(message.batch_id)
        for reserved in batch.requests:
            request_id = reserved.request.request_id
            self.send(self._refs.kv_pool, ReleasePages(request_id, b"", None))
            if request_id not in batch.aborted:
                failed = RequestFailed(request_id, "engine_failed", f"prefill failed: {message.reason}")
                self.send(self._refs.tokenizer, failed)

    def on_prefill_cancelled(self, message: PrefillCancelled) -> None:
        batch = self.state.batches.pop(message.batch_id)
        for reserved in batch.requests:
            self.send(self._refs.kv_pool, ReleasePages(reserved.request.request_id, b"", None))

    def on_abort_request(self, message: AbortRequest) -> None:
        found = self._find(message.request_id)
        if found is None:
            self.send(self._refs.decode, message)
            return
        batch_id, batch = found
        if message.request_id in batch.aborted:
            self.state.late_events += 1
            return
        batch.aborted[message.request_id] = None
        self.send(self._refs.gateway, RequestAborted(message.request_id))
        if len(batch.aborted) == len(batch.requests):
            self.send(self._refs.arbiter, CancelPrefill(batch_id))

    def _find(self, request_id: int) -> tuple[int, Batch] | None:
        for batch_id, batch in self.state.batches.items():
            if any(reserved.request.request_id == request_id for reserved in batch.requests):
                return batch_id, batch
        return None

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, "prefill", self.describe()))

    def describe(self) -> dict[str, Any]:
        batches = self.state.batches.values()
        return {
            "batches": len(batches),
            "requests": sum(len(batch.requests) for batch in batches),
            "late_events": self.state.late_events,
        }


def prefill_work(batch_id: int, requests: tuple[ReservedRequest, ...]) -> PrefillWork:
    """The columns of a batch: of each request the tokens whose KV is not in its pages yet."""
    tokens = [reserved.request.tokens[4 * reserved.reused_tokens :] for reserved in requests]
    table, width = page_table([reserved.pages for reserved in requests])
    return PrefillWork(
        batch_id=batch_id,
        requests=tuple(reserved.request.request_id for reserved in requests),
        tokens=b"".join(tokens),
        new_tokens=tuple(len(column) // 4 for column in tokens),
        reused_tokens=tuple(reserved.reused_tokens for reserved in requests),
        page_table=table,
        pages_per_row=width,
        sampling=sampling_columns([reserved.request.params for reserved in requests]),
    )
