"""admission: the bounded queue of requests that wait for prefill.

It refuses what can never fit, asks the policy whether to accept the rest, keeps the queue in the policy's
order, and forms a batch whenever the arbiter says that the prefill lane can take one. It asks the policy for
the class of each request, and counts what classes got. Requests that are recomputed come back here.
Invariant: a request is in `waiting`, or in `reserving`, or not here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from muxk.actors.admission_state import AdmissionState
from muxk.actors.context_limits import never_fits, with_room
from muxk.actors.group_messages import DevicesTaken
from muxk.actors.messages import (
    AbortRequest,
    AdmitRequest,
    FindHead,
    LookForOverdue,
    PagesFreed,
    PagesReserved,
    RecomputeRequest,
    Request,
    RequestAborted,
    RequestAccepted,
    RequestRefused,
    ReservePages,
)
from muxk.actors.queue_report import queue_report
from muxk.actors.refs import AdmissionInbox, Refs
from muxk.actors.request_views import (
    candidate_view,
    class_of,
    classified,
    is_overdue,
    overdue_at_ns,
    prefill_tokens,
    request_view,
    up_to_date,
)
from muxk.kernel.actor import Actor
from muxk.kernel.decider import Decider
from muxk.kernel.messages import (
    BatchNotFormed,
    EstimatesChanged,
    FormBatch,
    KvChanged,
    PolicyChanged,
    QueueChanged,
    ReportRequests,
    ReportState,
    RequestsReported,
    StateReported,
)
from muxk.kernel.policy import PolicyBook
from muxk.kernel.view import AdmitView, DecodeView, FormView

OVERDUE_EVERY_NS = 1_000_000
"""The queue is looked through because of overdue requests at most so often."""


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
        self.state = AdmissionState(decider=Decider(book, policy_sha, "admission", self.now_ns))
        self.state.service.restart(self.state.decider.policy.classes, ())

    def on_admit_request(self, message: AdmitRequest) -> None:
        request = self._with_limits(message)
        refusal = never_fits(message, self._max_context_tokens)
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
        name = class_of(request).name
        accepted = RequestAccepted(request.request_id, request.prompt_tokens, request.notes, name)
        self.send(self._refs.gateway, accepted)
        self._enqueue(request)

    def _with_limits(self, message: AdmitRequest) -> Request:
        """Set the class and the deadline, and `max_tokens` to the room in the context when none was given."""
        limited = classified(with_room(message, self._max_context_tokens), self.state.decider)
        return msgspec.structs.replace(limited, notes=self._notes(limited))

    def _notes(self, request: Request) -> tuple[str, ...]:
        """What the client asked for and the policy in force takes no account of."""
        policy = self.state.decider.policy
        notes = []
        if request.priority and not policy.reads_priority:
            notes.append(f"priority has no effect: no rule of the policy {policy.name} looks at it")
        if request.deadline_given_ns is not None and not policy.reads_deadline:
            notes.append(f"deadline has no effect: no rule of the policy {policy.name} looks at it")
        named = request.request_class
        if named and named not in policy.known_classes and named != class_of(request).name:
            known = f" but for {', '.join(policy.known_classes)}" if policy.known_classes else ""
            notes.append(f"class {named!r} has no effect: the policy {policy.name} asks for none{known}")
        return tuple(notes)

    def _refuse(self, request: Request, code: str, reason: str) -> None:
        self.state.refused += 1
        self.send(self._refs.tokenizer, RequestRefused(request.request_id, code, reason))

    def _admit_view(self, request: Request) -> AdmitView:
        return AdmitView(
            now_ns=self.now_ns(),
            request=request_view(request),
            queue=self.state.waiting.view,
            queue_bound=self._queue_bound(),
            kv=self.state.kv,
            estimates=self.state.estimates,
            class_queue=self.state.waiting.of_class(class_of(request).name),
        )

    def _queue_bound(self) -> int:
        bound = self.state.decider.limits.queue_bound
        return bound if self._max_queue is None else min(bound, self._max_queue)

    # --- the queue ---

    def _enqueue(self, request: Request) -> None:
        state = self.state
        state.waiting.add(request)
        state.service.wants(class_of(request))
        if not state.head_left and (state.head is None or self._goes_first(request, state.head)):
            self._set_head(request)
        self._watch((request,))
        self._tell_queue()

    def _goes_first(self, newcomer: Request, head: Request) -> bool:
        pair = [request_view(head), request_view(newcomer)]
        return self.state.decider.peek_order(pair, self.now_ns(), self.state.service.by_class).order[0] == 1

    def _ordered(self) -> list[Request]:
        state = self.state
        requests = list(state.waiting)
        order = state.decider.order(state.waiting.views, self.now_ns(), state.service.by_class).order
        return [requests[index] for index in order]

    def _find_head(self) -> None:
        ordered = self._ordered()
        self.state.head_left = False
        self._set_head(ordered[0] if ordered else None)
        self._watch(self.state.waiting)

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
        queue = self.state.waiting.view
        if head is None:
            self.send(self._refs.arbiter, QueueChanged(queue, None))
            return
        changed = QueueChanged(queue, candidate_view(head, self._layers), head.request_id)
        self.send(self._refs.arbiter, changed)

    # --- requests that waited for too long ---

    def _watch(self, requests: Iterable[Request]) -> None:
        """Look for the head again when the next of these becomes overdue: time alone moves it forward.

        Not while the head is overdue itself, for it goes before all that become so later: a long queue of
        which one is due every millisecond would be sorted as often.
        """
        state, now_ns = self.state, self.now_ns()
        if state.head is not None and is_overdue(state.head, now_ns):
            return
        due_ns = [due for due in map(overdue_at_ns, requests) if due is not None and due > now_ns]
        if not due_ns or (state.overdue_timer is not None and state.overdue_ns <= min(due_ns)):
            return
        if state.overdue_timer is not None:
            self.cancel(state.overdue_timer)
        wait_ns = max(min(due_ns) - now_ns, OVERDUE_EVERY_NS)
        state.overdue_ns = now_ns + wait_ns
        state.overdue_timer = self.send_after(wait_ns, self._refs.admission, LookForOverdue())

    def on_look_for_overdue(self, message: LookForOverdue) -> None:
        self.state.overdue_timer = None
        self._find_head()
        self._tell_queue()

    # --- forming a batch ---

    def on_form_batch(self, message: FormBatch) -> None:
        state = self.state
        if not state.waiting or state.short_of_pages or state.reserving:
            self.send(self._refs.arbiter, BatchNotFormed())
            return
        ordered = self._ordered()
        chosen = self._choose(ordered, message.decode)
        for request in chosen:
            state.waiting.remove(request)
            state.reserving[request.request_id] = request
        # Nobody who is in the batch may look like a candidate to park it for.
        state.head_left = False
        self._set_head(next(iter(ordered[len(chosen) :]), None))
        self._tell_queue()
        self.send(self._refs.kv_pool, ReservePages(tuple(chosen)))

    def _choose(self, ordered: list[Request], decode: DecodeView) -> list[Request]:
        """The head, and those behind it that fit what the policy's `form` says."""
        state = self.state
        head = request_view(ordered[0])
        same_class = state.waiting.of_class(class_of(ordered[0]).name)
        view = FormView(
            self.now_ns(), head, state.waiting.view, decode, state.kv, state.estimates, same_class
        )
        form = state.decider.form(view)
        chosen = [ordered[0]]
        tokens = prefill_tokens(ordered[0])
        for request in ordered[1:]:
            tokens += prefill_tokens(request)
            if len(chosen) >= form.max_requests or tokens > form.max_tokens:
                break
            chosen.append(request)
        return chosen

    def on_pages_reserved(self, message: PagesReserved) -> None:
        state = self.state
        for request_id, tokens in zip(message.reserved, message.new_tokens, strict=True):
            state.service.served(class_of(state.reserving.pop(request_id)), tokens)
        returned = self._returned(message.denied)
        state.waiting.put_back(returned)
        assert not state.reserving, "kv_pool answered for a part of the batch only"
        self._find_head()
        # Another head than those that were denied is worth a try.
        state.short_of_pages = any(request is state.head for request in returned)
        self._tell_queue()
        if not message.reserved:
            self.send(self._refs.arbiter, BatchNotFormed())

    def _returned(self, denied: tuple[int, ...]) -> list[Request]:
        """Those without pages that somebody still waits for."""
        state = self.state
        returned = []
        for request in [state.reserving.pop(request_id) for request_id in denied]:
            if request.request_id in state.aborted_reserving:
                state.service.left(class_of(request))
                self.send(self._refs.gateway, RequestAborted(request.request_id))
            else:
                returned.append(request)
        state.aborted_reserving.clear()
        return returned

    def on_pages_freed(self, message: PagesFreed) -> None:
        self.state.short_of_pages = False
        self._tell_queue()

    def on_recompute_request(self, message: RecomputeRequest) -> None:
        self._enqueue(up_to_date(message.request, self.state.decider))

    def on_abort_request(self, message: AbortRequest) -> None:
        request = self.state.waiting.get(message.request_id)
        if request is None:
            if message.request_id in self.state.reserving:
                self.state.aborted_reserving[message.request_id] = None
            self.send(self._refs.kv_pool, message)
            return
        self.state.waiting.remove(request)
        self.state.service.left(class_of(request))
        if self.state.head is request and not self.state.head_left:
            self.state.head_left = True
            self.send(self._refs.admission, FindHead())
        self.send(self._refs.gateway, RequestAborted(message.request_id))

    # --- facts ---

    def on_kv_changed(self, message: KvChanged) -> None:
        self.state.kv = message.kv

    def on_devices_taken(self, message: DevicesTaken) -> None:
        assert self._refs.placement is not None
        self.send(self._refs.placement, message)

    def on_estimates_changed(self, message: EstimatesChanged) -> None:
        self.state.estimates = message.estimates

    def on_policy_changed(self, message: PolicyChanged) -> None:
        """Everybody here is put into a class of the new policy."""
        state = self.state
        state.decider.use(message.sha)
        state.waiting.replace([classified(request, state.decider) for request in state.waiting])
        state.reserving = {key: classified(held, state.decider) for key, held in state.reserving.items()}
        wanting = [class_of(request) for request in (*state.waiting, *state.reserving.values())]
        state.service.restart(state.decider.policy.classes, wanting)
        self._find_head()
        self._tell_queue()

    def on_report_requests(self, message: ReportRequests) -> None:
        report = queue_report(self.state, self.now_ns(), message.request_ids)
        self.send(self._refs.gateway, RequestsReported.of(report, message.ticket))

    def on_report_state(self, message: ReportState) -> None:
        self.send(
            self._refs.gateway, StateReported(message.ticket, self._refs.admission.name, self.describe())
        )

    def describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "waiting": len(state.waiting),
            "waiting_tokens": state.waiting.view.tokens,
            "classes": state.describe_classes(),
            "queue_bound": self._queue_bound(),
            "short_of_pages": state.short_of_pages,
            "accepted": state.accepted,
            "refused": state.refused,
            "rules": dict(sorted(state.decider.counts.items())),
        }
