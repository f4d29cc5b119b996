"""A request as the policy and the arbiter see it, and the class that the policy puts it in."""

from __future__ import annotations

import msgspec
from muxk.actors.messages import Request, ReservedRequest
from muxk.kernel.decider import Decider
from muxk.kernel.view import PrefillView, RequestClass, RequestView
from muxk.kernel.work import PAGE_SIZE, attention_pairs


def prefill_tokens(request: Request) -> int:
    """What prefill has to compute, before it is known what the prefix index holds."""
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
        pages=prefill_tokens(request) // PAGE_SIZE + 1,
        priority=request.priority,
        recomputes=request.recomputes,
        request_class=request.request_class,
        class_name="" if request.in_class is None else request.in_class.name,
    )


def classified(request: Request, decider: Decider) -> Request:
    """The request in the class of the policy in force, with the deadline that follows from it."""
    view = request_view(request)
    chosen = decider.classify(msgspec.structs.replace(view, class_name=""))
    given_ns = request.deadline_given_ns
    wait_ns = chosen.ttft_slo_ns if given_ns is None else given_ns
    return msgspec.structs.replace(
        request,
        deadline_ns=request.arrival_ns + wait_ns,
        in_class=chosen,
        classified_by=decider.policy.sha,
    )


def up_to_date(request: Request, decider: Decider) -> Request:
    """`classified`, unless the policy in force did that."""
    return request if request.classified_by == decider.policy.sha else classified(request, decider)


def in_its_class(reserved: ReservedRequest, decider: Decider) -> ReservedRequest:
    """Of the policy in force, which may have changed since prefill asked."""
    request = up_to_date(reserved.request, decider)
    return reserved if request is reserved.request else msgspec.structs.replace(reserved, request=request)


def class_of(request: Request) -> RequestClass:
    """Of a request that admission has seen."""
    assert request.in_class is not None, request.request_id
    return request.in_class


def overdue_at_ns(request: Request) -> int | None:
    """When it has waited for as long as its class allows; None: never."""
    max_wait_ns = class_of(request).max_wait_ns
    return None if max_wait_ns is None else request.arrival_ns + max_wait_ns


def is_overdue(request: Request, now_ns: int) -> bool:
    """Whether it waited for longer than its class allows."""
    due_ns = overdue_at_ns(request)
    return due_ns is not None and due_ns <= now_ns


def candidate_view(request: Request, layers: int) -> PrefillView:
    """The batch that a request would start by itself."""
    tokens = prefill_tokens(request)
    pairs = attention_pairs((tokens,), (0,))
    return PrefillView(
        batch_id=0,
        requests=1,
        new_tokens=tokens,
        reused_tokens=0,
        pairs=pairs,
        layers_left=layers,
        arrival_ns=request.arrival_ns,
        deadline_ns=request.deadline_ns,
        depth=0,
        preemptions=0,
        tokens_left=tokens,
        pairs_left=pairs,
        class_rank=class_of(request).rank,
    )
