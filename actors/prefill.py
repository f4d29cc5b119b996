"""prefill: the executor of prompt batches.

kv_pool hands it a batch with pages, it submits one work to the arbiter, which runs it in chunks of tokens and
slices of layers; the hidden state between slices is parked on the device. It hands each request to decode
when its last token is computed. Invariant: it owns the pages of exactly the requests in `batches` that have
not ended, and releases them only when no item in flight may touch them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from muxk.actors.columns import ExtrasMaker, page_table, sampling_columns
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
from muxk.actors.request_views import class_of, up_to_date
from muxk.kernel.actor import Actor
from muxk.kernel.decider import Decider
from muxk.kernel.messages import (
    BatchClassified,
    CancelPrefill,
    PolicyChanged,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ReportRequests,
    ReportState,
    RequestsReported,
    StateReported,
    SubmitPrefill,
)
from muxk.kernel.policy import PolicyBook
from muxk.kernel.statuses import Reason, StatusReport
from muxk.kernel.work import PrefillWork, RowLogprobs


class Standing(NamedTuple):
    """What a batch has from the classes of its requests: the best of each."""

    class_rank: int
    deadline_ns: int
    tbt_slo_ns: int


@dataclass
class Batch:
    """A prompt batch between its reservation and its last layer; rows end in their order."""

    requests: tuple[ReservedRequest, ...]
    ended: int = 0
    """Rows at the front that were handed on."""
    aborted: dict[int, None] = field(default_factory=dict)
    """Requests among the others that nobody waits for any more."""
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    """Of rows that have not ended."""

    @property
    def left(self) -> tuple[ReservedRequest, ...]:
        return self.requests[self.ended :]

    def standing(self) -> Standing:
        """Of those that have not ended."""
        requests = [reserved.request for reserved in self.left]
        return Standing(
            class_rank=min(class_of(request).rank for request in requests),
            deadline_ns=min(request.deadline_ns for request in requests),
            tbt_slo_ns=min(class_of(request).tbt_slo_ns for request in requests),
        )

    def end_rows(self, count: int) -> range:
        """The next rows in order."""
        rows = range(self.ended, self.ended + count)
        assert rows.stop <= len(self.requests)
        self.ended = rows.stop
        return rows


@dataclass
class PrefillState:
    decider: Decider
    batches: dict[int, Batch] = field(default_factory=dict)
    next_batch: int = 1
    late_events: int = 0


class Prefill(Actor):
    """One a device."""

    Accepts = PrefillInbox

    def __init__(self, refs: Refs, book: PolicyBook, policy_sha: str, end_ids: frozenset[int]) -> None:
        self._refs = refs
        self._end_ids = end_ids
        self.state = PrefillState(decider=Decider(book, policy_sha, "prefill", self.now_ns))

    def on_start_prefill(self, message: StartPrefill) -> None:
        batch_id = self.state.next_batch
        self.state.next_batch += 1
        batch = self.state.batches[batch_id] = Batch(self._up_to_date(message.requests))
        standing = batch.standing()
        submission = SubmitPrefill(
            prefill_work(batch_id, batch.requests, self._end_ids),
            arrival_ns=min(reserved.request.arrival_ns for reserved in batch.requests),
            deadline_ns=standing.deadline_ns,
            class_rank=standing.class_rank,
            tbt_slo_ns=standing.tbt_slo_ns,
        )
        self.send(self._refs.arbiter, submission)

    def _up_to_date(self, requests: tuple[ReservedRequest, ...]) -> tuple[ReservedRequest, ...]:
        """In classes of the policy in force: it may have changed since admission asked."""
        return tuple(
            msgspec.structs.replace(reserved, request=up_to_date(reserved.request, self.state.decider))
            for reserved in requests
        )

    def on_policy_changed(self, message: PolicyChanged) -> None:
        self.state.decider.use(message.sha)
        for batch_id, batch in self.state.batches.items():
            batch.requests = self._up_to_date(batch.requests)
            standing = batch.standing()
            classified = BatchClassified(
                batch_id, standing.class_rank, standing.deadline_ns, standing.tbt_slo_ns
            )
            self.send(self._refs.arbiter, classified)

    def on_prefill_done(self, message: PrefillDone) -> None:
        """Hand over to decode, always: the arbiter counts on decode's answer, even for no row."""
        batch = self.state.batches[message.batch_id]
        batch.prompt_logprobs += message.prompt_logprobs
        ended = batch.end_rows(len(message.tokens) // 4)
        if batch.ended == len(batch.requests):
            del self.state.batches[message.batch_id]
        requests = [batch.requests[row].request.request_id for row in ended]
        if requests:
            self.send(self._refs.kv_pool, PagesFilled(tuple(requests)))
        kept = []
        for row, request_id in zip(ended, requests, strict=True):
            if request_id in batch.aborted:
                del batch.aborted[request_id]
                self.send(self._refs.kv_pool, ReleasePages(request_id, b"", None))
            else:
                kept.append(row)
        if requests or message.step is not None:
            self.send(self._refs.decode, joining(batch, ended.start, kept, message))
        if requests:
            batch.prompt_logprobs = [found for found in batch.prompt_logprobs if found.row >= batch.ended]

    def on_prefill_failed(self, message: PrefillFailed) -> None:
        batch = self.state.batches.pop(message.batch_id)
        for reserved in batch.left:
            request_id = reserved.request.request_id
            self.send(self._refs.kv_pool, ReleasePages(request_id, b"", None))
            if request_id not in batch.aborted:
                failed = RequestFailed(request_id, "engine_failed", f"prefill failed: {message.reason}")
                self.send(self._refs.tokenizer, failed)

    def on_prefill_cancelled(self, message: PrefillCancelled) -> None:
        batch = self.state.batches.pop(message.batch_id)
        for reserved in batch.left:
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
        if len(batch.aborted) == len(batch.left):
            self.send(self._refs.arbiter, CancelPrefill(batch_id))

    def _find(self, request_id: int) -> tuple[int, Batch] | None:
        for batch_id, batch in self.state.batches.items():
            if any(reserved.request.request_id == request_id for reserved in batch.left):
                return batch_id, batch
        return None

    def on_report_requests(self, message: ReportRequests) -> None:
        """The arbiter says more of those whose batch it has."""
        report = StatusReport("prefill", message.request_ids)
        for batch_id, batch in self.state.batches.items():
            detail = f"batch {batch_id} has its pages and is handed to the arbiter"
            for request_id in [reserved.request.request_id for reserved in batch.left]:
                if request_id not in batch.aborted and report.wants(request_id):
                    report.add(request_id, Reason.FORMING, detail)
        self.send(self._refs.gateway, RequestsReported.of(report, message.ticket))

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, self._refs.prefill.name, self.describe()))

    def describe(self) -> dict[str, Any]:
        batches = self.state.batches.values()
        return {
            "batches": len(batches),
            "requests": sum(len(batch.left) for batch in batches),
            "late_events": self.state.late_events,
        }


def joining(batch: Batch, first: int, kept: list[int], message: PrefillDone) -> JoinDecode:
    """What decode hears of the rows `kept` among those that ended from row `first` on."""
    places = {row: place for place, row in enumerate(kept)}
    tokens = message.tokens
    return JoinDecode(
        requests=tuple(batch.requests[row] for row in kept),
        tokens=b"".join(tokens[4 * (row - first) : 4 * (row - first) + 4] for row in kept),
        decode_running=message.decode_running,
        logprobs=_placed(message.logprobs, places),
        prompt_logprobs=_placed(batch.prompt_logprobs, places),
        step=message.step,
    )


def _placed(logprobs: Iterable[RowLogprobs], places: dict[int, int]) -> tuple[RowLogprobs, ...]:
    """Those of the rows in `places`, with the place instead of the row."""
    if not places:
        return ()  # the usual chunk: do not look through all that earlier ones reported
    return tuple(
        msgspec.structs.replace(found, row=places[found.row]) for found in logprobs if found.row in places
    )


def prefill_work(
    batch_id: int, requests: tuple[ReservedRequest, ...], end_ids: frozenset[int]
) -> PrefillWork:
    """The columns of a batch: of each request the tokens whose KV is not in its pages yet."""
    tokens = [reserved.request.tokens[4 * reserved.reused_tokens :] for reserved in requests]
    table, width = page_table([reserved.pages for reserved in requests])
    own = [reserved.request for reserved in requests]
    made = [
        ExtrasMaker(request, end_ids).make(row, request.generated, request.generated_tokens)
        for row, request in enumerate(own)
    ]
    return PrefillWork(
        batch_id=batch_id,
        requests=tuple(request.request_id for request in own),
        tokens=b"".join(tokens),
        new_tokens=tuple(len(column) // 4 for column in tokens),
        reused_tokens=tuple(reserved.reused_tokens for reserved in requests),
        page_table=table,
        pages_per_row=width,
        sampling=sampling_columns(
            [request.params for request in own], [extras for extras in made if extras is not None]
        ),
        prompt_logprobs=tuple(
            (row, request.params.prompt_logprobs)
            for row, request in enumerate(own)
            if request.params.prompt_logprobs is not None and not request.generated
        ),
    )
