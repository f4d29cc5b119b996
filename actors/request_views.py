"""A request as the policy and the arbiter see it."""

from __future__ import annotations

from muxk.actors.messages import Request
from muxk.kernel.view import PrefillView, RequestView
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
        class_rank=0 if request.in_class is None else request.in_class.rank,
    )
