"""admission: the bounded queue of requests that wait for prefill.

It refuses what can never fit, asks the policy whether to accept the rest, keeps the queue in the policy's
order, and forms a batch whenever the arbiter says that the prefill lane can take one. Requests that are
recomputed come back here. Invariant: a request is in `waiting`, or in `reserving`, or not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from muxk.actors.messages import (
    AbortRequest,
    AdmitRequest,
    FindHead,
    PagesFreed,
    PagesReserved,
    RecomputeRequest,
    Request,
    RequestAborted,
    RequestAccepted,
    RequestRefused,
    ReservePages,
)
from muxk.actors.refs import AdmissionInbox, Refs
from muxk.kernel.actor import Actor
from muxk.kernel.decider import NO_SERVICE, Decider
from muxk.kernel.estimates import Estimates
from muxk.kernel.messages import (
    BatchNotFormed,
    EstimatesChanged,
    FormBatch,
    KvChanged,
    PolicyChanged,
    QueueChanged,
    ReportState,
    StateReported,
)
from muxk.kernel.policy import PolicyBook
from muxk.kernel.view import (
    AdmitView,
    DecodeView,
    FormView,
    KvView,
    PrefillView,
    QueueView,
    RequestView,
)
from muxk.kernel.work import PAGE_SIZE, attention_pairs


@dataclass
class AdmissionState:
    decider: Decider
    waiting: dict[int, Request] = field(default_factory=dict)
    """In order of arrival here; bounded by `limits.queue_bound`, recomputed requests on top."""
    waiting_tokens: int = 0
    head: Request | None = None
    """First of the queue in the policy's order, unless `head_left`."""
    head_left: bool = False
    """The head was aborted; a new one is looked for once, after the burst of aborts it may be part of."""
    reserving: dict[int, Request] = field(default_factory=dict)
    aborted_reserving: dict[int, None] = field(default_factory=dict)
    """Aborted while kv_pool decides: ended here if pages are denied, by prefill if they are given."""
    short_of_pages: bool = False
    """Pages were denied and none came back yet: forming again would only be denied again."""
    kv: KvView = field(default_factory=lambda: KvView(0, 0))
    estimates: Estimates = field(default_factory=Estimates)
    refused: int = 0
    accepted: int = 0


class Admission(Actor):
    """One a device."""

    Accepts = AdmissionInbox

    def __init__(
        self,
        refs: Refs,
        book: PolicyBook,
        policy_sha: str,
        max_context_tokens: int,
        layers: int,
        max_queue: int | None = None,
    ) -> None:
        self._refs = refs
        self._max_context_tokens = max_context_tokens
        self._layers = layers
        self._max_queue = max_queue
        self.state = AdmissionState(decider=Decider(book, policy_sha))

    def on_admit_request(self, message: AdmitRequest) -> None:
        request = self._with_limits(message)
        refusal = self._never_fits(request, message.max_tokens_given)
        if refusal is not None:
            self._refuse(request, "never_fits", refusal)
            return
        answer = self.state.decider.admit(self._admit_view(request))
        if answer.action != "accept":
            code = "never_fits" if answer.action == "refuse" else "overloaded"
            self._refuse(request, code, answer.reason)
            return
        bound = self._queue_bound()
        if len(self.state.waiting) >= bound:
            self._refuse(request, "overloaded", f"{bound} requests wait already, the bound of the queue")
            return
        self.state.accepted += 1
        accepted = RequestAccepted(request.request_id, request.prompt_tokens, request.notes)
        self.send(self._refs.gateway, accepted)
        self._enqueue(request)

    def _with_limits(self, message: AdmitRequest) -> Request:
        """Set the deadline, and `max_tokens` to the room in the context when the client gave none."""
        request = message.request
        params = request.params
        if not message.max_tokens_given:
            room = max(1, self._max_context_tokens - request.prompt_tokens)
            params = msgspec.structs.replace(params, max_tokens=room)
        wait_ns = request.deadline_given_ns
        if wait_ns is None:
            wait_ns = self.state.decider.classify(request_view(request)).ttft_slo_ns
        return msgspec.structs.replace(
            request, params=params, deadline_ns=request.arrival_ns + wait_ns, notes=self._notes(request)
        )

    def _notes(self, request: Request) -> tuple[str, ...]:
        """What the client asked for and the policy in force takes no account of."""
        policy = self.state.decider.policy
        notes = []
        if request.priority and not policy.reads_priority:
            notes.append(f"priority has no effect: no rule of the policy {policy.name} looks at it")
        if request.deadline_given_ns is not None and not policy.reads_deadline:
            notes.append(f"deadline has no effect: no rule of the policy {policy.name} looks at it")
        if request.request_class and request.request_class not in policy.known_classes:
            known = ", ".join(policy.known_classes) or "none"
            notes.append(
                f"class {request.request_class!r} has no effect: the policy {policy.name} has "
                f"these classes: {known}"
            )
        return tuple(notes)

    def _never_fits(self, request: Request, max_tokens_given: bool) -> str | None:
        limit = self._max_context_tokens
        prompt = request.prompt_tokens
        if prompt + 1 > limit:
            return f"the prompt has {prompt} tokens; with one more it exceeds the limit of {limit}"
        if max_tokens_given and prompt + request.params.max_tokens > limit:
            return (
                f"prompt ({prompt} tokens) + max_tokens ({request.params.max_tokens}) exceeds the limit of "
                f"{limit} tokens; max_tokens may be {limit - prompt} at most"
            )
        return None

    def _refuse(self, request: Request, code: str, reason: str) -> None:
        self.state.refused += 1
        self.send(self._refs.tokenizer, RequestRefused(request.request_id, code, reason))

    def _admit_view(self, request: Request) -> AdmitView:
        return AdmitView(
            now_ns=self.now_ns(),
            request=request_view(request),
            queue=self._queue_view(),
            queue_bound=self._queue_bound(),
            kv=self.state.kv,
            estimates=self.state.estimates,
        )

    def _queue_bound(self) -> int:
        bound = self.state.decider.policy.limits.queue_bound
        return bound if self._max_queue is None else min(bound, self._max_queue)

    # --- the queue ---

    def _enqueue(self, request: Request) -> None:
        state = self.state
        state.waiting[request.request_id] = request
        state.waiting_tokens += request.prompt_tokens + request.generated_tokens
        if not state.head_left and (state.head is None or self._goes_first(request, state.head)):
            self._set_head(request)
        self._tell_queue()

    def _goes_first(self, newcomer: Request, head: Request) -> bool:
        pair = [request_view(head), request_view(newcomer)]
        return self.state.decider.policy.order(pair, self.now_ns(), NO_SERVICE).order[0] == 1

    def _dequeue(self, request: Request) -> None:
        state = self.state
        del state.waiting[request.request_id]
        state.waiting_tokens -= request.prompt_tokens + request.generated_tokens

    def _ordered(self) -> list[Request]:
        requests = list(self.state.waiting.values())
        views = [request_view(request) for request in requests]
        return [requests[index] for index in self.state.decider.order(views, self.now_ns()).order]

    def _find_head(self) -> None:
        ordered = self._ordered()
        self.state.head_left = False
        self._set_head(ordered[0] if ordered else None)

    def _set_head(self, head: Request | None) -> None:
        """Pages that the last head was denied say nothing about another one."""
        if head is not self.state.head:
            self.state.short_of_pages = False
        self.state.head = head

    def on_find_head(self, message: FindHead) -> None:
        self._find_head()
        self._tell_queue()

    def _tell_queue(self) -> None:
        head = None if self.state.short_of_pages or self.state.head_left else self.state.head
        candidate = None if head is None else candidate_view(head, self._layers)
        self.send(self._refs.arbiter, QueueChanged(self._queue_view(), candidate))

    def _queue_view(self) -> QueueView:
        return QueueView(len(self.state.waiting), self.state.waiting_tokens)

    # --- forming a batch ---

    def on_form_batch(self, message: FormBatch) -> None:
        state = self.state
        if not state.waiting or state.short_of_pages or state.reserving:
            self.send(self._refs.arbiter, BatchNotFormed())
            return
        chosen = self._choose(self._ordered(), message.decode)
        for request in chosen:
            self._dequeue(request)
            state.reserving[request.request_id] = request
        self.send(self._refs.kv_pool, ReservePages(tuple(chosen)))

    def _choose(self, ordered: list[Request], decode: DecodeView) -> list[Request]:
        """The head, and those behind it that fit what the policy's `form` says."""
        state = self.state
        head = request_view(ordered[0])
        view = FormView(self.now_ns(), head, self._queue_view(), decode, state.kv, state.estimates)
        form = state.decider.form(view)
        chosen = [ordered[0]]
        tokens = _prefill_tokens(ordered[0])
        for request in ordered[1:]:
            tokens += _prefill_tokens(request)
            if len(chosen) >= form.max_requests or tokens > form.max_tokens:
                break
            chosen.append(request)
        return chosen

    def on_pages_reserved(self, message: PagesReserved) -> None:
        state = self.state
        for request_id in message.reserved:
            del state.reserving[request_id]
        returned = [state.reserving.pop(request_id) for request_id in message.denied]
        for request in returned:
            if request.request_id in state.aborted_reserving:
                self.send(self._refs.gateway, RequestAborted(request.request_id))
        returned = [request for request in returned if request.request_id not in state.aborted_reserving]
        state.aborted_reserving.clear()
        # Denied ones go back to the front: they arrived before what waits.
        state.waiting = {request.request_id: request for request in returned} | state.waiting
        state.waiting_tokens += sum(_prefill_tokens(request) for request in returned)
        assert not state.reserving, "kv_pool answered for a part of the batch only"
        self._find_head()
        # Another head than those that were denied is worth a try.
        state.short_of_pages = any(request is state.head for request in returned)
        self._tell_queue()
        if not message.reserved:
            self.send(self._refs.arbiter, BatchNotFormed())

    def on_pages_freed(self, message: PagesFreed) -> None:
        self.state.short_of_pages = False
        self._tell_queue()

    def on_recompute_request(self, message: RecomputeRequest) -> None:
        self._enqueue(message.request)

    def on_abort_request(self, message: AbortRequest) -> None:
        request = self.state.waiting.get(message.request_id)
        if request is None:
            if message.request_id in self.state.reserving:
                self.state.aborted_reserving[message.request_id] = None
            self.send(self._refs.kv_pool, message)
            return
        self._dequeue(request)
        if self.state.head is request and not self.state.head_left:
            self.state.head_left = True
            self.send(self._refs.admission, FindHead())
        self.send(self._refs.gateway, RequestAborted(message.request_id))

    # --- facts ---

    def on_kv_changed(self, message: KvChanged) -> None:
        self.state.kv = message.kv

    def on_estimates_changed(self, message: EstimatesChanged) -> None:
        self.state.estimates = message.estimates

    def on_policy_changed(self, message: PolicyChanged) -> None:
        self.state.decider.use(message.sha)
        self._find_head()
        self._tell_queue()

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, "admission", self.describe()))

    def describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "waiting": len(state.waiting),
            "waiting_tokens": state.waiting_tokens,
            "queue_bound": self._queue_bound(),
            "short_of_pages": state.short_of_pages,
            "accepted": state.accepted,
            "refused": state.refused,
            "rules": dict(sorted(state.decider.counts.items())),
        }


def _prefill_tokens(request: Request) -> int:
    return request.prompt_tokens + request.generated_tokens


def request_view(request: Request) -> RequestView:
    """A request as the policy's per-request questions see it."""
    return RequestView(
        request_id=request.request_id,
        arrival_ns=request.arrival_ns,
        deadline_ns=request.deadline_ns,
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.generated_tokens,
        max_tokens=request.params.max_tokens,
        pages=_prefill_tokens(request) // PAGE_SIZE + 1,
        priority=request.priority,
        recomputes=request.recomputes,
        request_class=request.request_class,
    )


def candidate_view(request: Request, layers: int) -> PrefillView:
    """The batch that a request would start by itself, before it is known what the prefix index holds."""
    tokens = _prefill_tokens(request)
    return PrefillView(
        batch_id=0,
        requests=1,
        new_tokens=tokens,
        reused_tokens=0,
        pairs=attention_pairs((tokens,), (0,)),
        layers_left=layers,
        arrival_ns=request.arrival_ns,
        deadline_ns=request.deadline_ns,
        depth=0,
        preemptions=0,
        tokens_left=tokens,
        pairs_left=attention_pairs((tokens,), (0,)),
    )
