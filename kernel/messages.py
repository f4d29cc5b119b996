"""Messages of the arbiter and the supervisor, in life-cycle order (sender -> receiver)."""

from __future__ import annotations

from typing import Any

import msgspec
from muxk.kernel.actor import Message
from muxk.kernel.estimates import Estimates
from muxk.kernel.statuses import RequestStatus, StatusReport
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView
from muxk.kernel.work import DecodeWork, Phase, PrefillShape, PrefillWork, ProbeWork, RowLogprobs, RowPages

MEASURED_TOGETHER = 8
"""Items that the estimator hears of at once, or more: it looks at its tables once in so many."""
ALONE_TOGETHER = 32
"""The same where all of them are decode steps that ran alone, which say little that it does not know."""


class RunProbe(Message, frozen=True):
    """estimator -> arbiter: measure something; runs before other work, and after the probes before it."""

    probe: ProbeWork
    layers: int
    beside: tuple[ProbeWork, ...] = ()
    """Prefill probes of as many layers as `beside_layers` says, launched first, one after the other on the
    other lane of a split: what `probe` has to share the device with."""
    beside_layers: int = 1


class ProbeDone(Message, frozen=True):
    """arbiter -> estimator: a probe ended; `elapsed_ns` is 0 only if it failed."""

    probe_id: int
    elapsed_ns: int


class EstimatesChanged(Message, frozen=True):
    """estimator -> arbiter, admission, placement: the tables from now on."""

    estimates: Estimates
    group: int = 0


class PolicyChanged(Message, frozen=True):
    """gateway -> arbiter, admission, decode: use this policy of the book from the next decision on."""

    sha: str


class QueueChanged(Message, frozen=True):
    """admission -> arbiter: who waits for prefill, and the batch the head would start."""

    queue: QueueView
    candidate: PrefillView | None
    head: int | None = None
    """The request that is first; None without a candidate."""


class KvChanged(Message, frozen=True):
    """kv_pool -> arbiter, admission, placement: pages of the pool."""

    kv: KvView
    group: int = 0


class ResizeGroup(Message, frozen=True):
    """placement -> arbiter: how many devices work as one from the next item on; 0: none, they are lent."""

    width: int


class GroupResized(Message, frozen=True):
    """arbiter -> placement: no item of the former width is in flight any more."""

    group: int


class FormBatch(Message, frozen=True):
    """arbiter -> admission: the prefill lane takes the next batch."""

    decode: DecodeView


class BatchNotFormed(Message, frozen=True):
    """admission -> arbiter: nobody could be given pages, or nobody waits any more."""


class SubmitPrefill(Message, frozen=True):
    """prefill -> arbiter: a batch ready to run from layer 0."""

    work: PrefillWork
    arrival_ns: int
    deadline_ns: int
    class_rank: int = 0
    """The best of its requests."""
    tbt_slo_ns: int | None = None
    """The tightest of its requests' classes: what holds while they are to decode and decode has not told."""


class BatchClassified(Message, frozen=True):
    """prefill -> arbiter: a new policy put the requests of a batch into other classes."""

    batch_id: int
    class_rank: int
    deadline_ns: int
    tbt_slo_ns: int | None


class CancelPrefill(Message, frozen=True):
    """prefill -> arbiter: launch no more layers of this batch."""

    batch_id: int


class PrefillCancelled(Message, frozen=True):
    """arbiter -> prefill: no item of the batch is in flight any more; its pages may go."""

    batch_id: int


class PrefillDone(Message, frozen=True):
    """arbiter -> prefill: the last layer of a chunk ended, and with it rows of the batch."""

    batch_id: int
    tokens: bytes
    """int32: the first token of each row that ended, which are the next ones in order; may be empty."""
    ended_ns: int
    decode_running: bool
    """A decode step is in flight, which these rows are not in."""
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    step: DecodeStepDone | None = None
    """The decode step of the same fused item: decode hears of both at once, so that its next step has the
    new rows."""


class PrefillFailed(Message, frozen=True):
    """arbiter -> prefill: an item of the batch raised on the device."""

    batch_id: int
    reason: str


class SubmitDecode(Message, frozen=True):
    """decode -> arbiter: the next step; replaces an earlier version of it that was not launched."""

    work: DecodeWork
    tbt_slo_ns: int | None = None
    """The tightest TBT SLO of the rows' classes."""
    more: int = 0
    """Steps that can follow with the same rows and pages, each behind the one before, without the executor
    having anything to add."""


class MoreSteps(Message, frozen=True):
    """decode -> arbiter: `SubmitDecode.more` of the newest step, as it is since that was launched."""

    step_id: int
    more: int = 0
    pages: RowPages | None = None
    """Of the rows, if some are new."""


class DecodeIdle(Message, frozen=True):
    """decode -> arbiter: the answer to a finished step or prefill when no row can take a step."""


class DecodeFloorReached(Message, frozen=True):
    """arbiter -> arbiter, by timer: look whether a decode step was held for too long."""


class StepLaunched(Message, frozen=True):
    """arbiter -> decode: this version of a step is on its lane; the next one may be submitted.

    Only where the device can queue a step behind one whose tokens the host has not seen.
    """

    step_id: int
    version: int


class StepsRan(Message, frozen=True):
    """arbiter -> decode: steps that ended, for each of which the arbiter launched another by itself."""

    tokens: bytes
    """int32[steps, rows], oldest first; all have the same rows."""
    known_ns: tuple[int, ...]
    """When the arbiter knew of each."""
    on_lane: tuple[DecodeWork, DecodeWork]
    """The two that came after them, and were launched."""


class DecodeStepDone(Message, frozen=True):
    """arbiter -> decode: all tokens of a step."""

    step_id: int
    version: int
    tokens: bytes
    """int32[rows]."""
    ended_ns: int
    logprobs: tuple[RowLogprobs, ...] = ()
    before: StepsRan | None = None
    """What ran before it that decode was not told."""


class DecodeFailed(Message, frozen=True):
    """arbiter -> decode: the step raised on the device."""

    step_id: int
    version: int
    reason: str


class LookForStuckItems(Message, frozen=True):
    """arbiter -> arbiter, by timer: see whether an item takes far longer than it should."""


class LaneStuck(Message, frozen=True):
    """arbiter -> gateway: an item does not end. Its requests fail, and so do those that would wait for it."""

    lane: str
    requests: tuple[int, ...]
    decoding: bool
    """Decode needs the lane: no live request can go on. Otherwise those that decode go on."""
    reason: str


class LaneMoved(Message, frozen=True):
    """arbiter -> gateway: the item that was stuck ended after all."""

    lane: str


class ItemMeasured(msgspec.Struct, frozen=True, gc=False):
    """What an item took, and beside what it ran."""

    phase: Phase
    units: int
    rows: int
    new_tokens: int
    pairs: int
    context_tokens: int
    layers: int
    elapsed_ns: int
    shared: bool
    """True when the other lane was busy for a part of it."""
    beside: PrefillShape | None = None
    """Of a decode step: the prefill batch on the other lane when it was launched, or when it ended."""


class ItemsMeasured(Message, frozen=True):
    """arbiter -> estimator: MEASURED_TOGETHER items that ended or more, in their order."""

    items: tuple[ItemMeasured, ...]


class ReportState(Message, frozen=True):
    """gateway -> every actor: describe yourself."""

    ticket: int


class StateReported(Message, frozen=True):
    """every actor -> gateway: a small copy of its state."""

    ticket: int
    actor: str
    state: dict[str, Any]


class ReportRequests(Message, frozen=True):
    """gateway -> tokenizer, admission, prefill, decode, arbiter: why is each of your requests where it is."""

    ticket: int
    request_ids: tuple[int, ...] = ()
    """To be reported even when they are not among the first `STATUSES_MAX`."""


class RequestsReported(Message, frozen=True):
    """tokenizer, admission, prefill, decode, arbiter -> gateway: the answer, bounded."""

    ticket: int
    actor: str
    statuses: tuple[RequestStatus, ...]
    total: int
    """Requests it has, reported or not."""

    @staticmethod
    def of(report: StatusReport, ticket: int) -> RequestsReported:
        return RequestsReported(ticket, report.where, tuple(report.statuses), report.total)


class EngineFailed(Message, frozen=True):
    """supervisor -> permanent children: the others crashed and were rebuilt; live requests are lost."""

    actor: str
    reason: str


class FrameReceived(Message, frozen=True):
    """ingress -> gateway: one frame of one peer."""

    peer: bytes
    payload: bytes


class SendFrame(Message, frozen=True):
    """gateway -> ingress: send one frame to one peer, without waiting."""

    peer: bytes
    payload: bytes


class PeerGone(Message, frozen=True):
    """ingress -> gateway: a frame could not be sent, the peer's connection is closed."""

    peer: bytes


class PeerSlow(Message, frozen=True):
    """ingress -> gateway: this peer does not read; these frames were not sent and never will be."""

    peer: bytes
    payload: bytes
    """The oldest of them."""
    more: tuple[bytes, ...] = ()
    """Those behind it, in their order."""


class LossHeard(Message, frozen=True):
    """gateway -> ingress: it has handled a PeerSlow; until then no newer frame of the peer is sent either."""

    peer: bytes
