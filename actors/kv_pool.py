"""kv_pool: owns the KV pages of all requests.

Admission asks it for the pages of a batch, decode for one more page ahead of need, prefill and decode give
pages back once no item in flight touches them. Invariant: used + cached + free == total, checked when idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muxk.actors.messages import (
    AbortRequest,
    GrowPages,
    PagesFilled,
    PagesFreed,
    PagesGrown,
    PagesReserved,
    RecomputeRequest,
    ReleasePages,
    Request,
    ReservedRequest,
    ReservePages,
    StartPrefill,
)
from muxk.actors.page_pool import Filling, PagePool
from muxk.actors.refs import KvPoolInbox, Refs
from muxk.actors.request_views import prefill_tokens
from muxk.kernel.actor import Actor
from muxk.kernel.messages import KvChanged, ReportState, StateReported
from muxk.kernel.view import KvView


@dataclass
class KvPoolState:
    pool: PagePool
    prompts: dict[int, bytes]
    """Tokens of requests between their reservation and `PagesFilled`."""
    denied: bool = False
    """Somebody waits for `PagesFreed`."""
    changed_since_check: bool = True
    late_releases: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    told_free: int = 0


class KvPool(Actor):
    """One a device."""

    Accepts = KvPoolInbox

    def __init__(self, refs: Refs, pages: int) -> None:
        self._refs = refs
        self.state = KvPoolState(pool=PagePool(pages), prompts={})

    def started(self) -> None:
        self._tell_free()

    def on_reserve_pages(self, message: ReservePages) -> None:
        """Reserve in the given order until one does not fit, so that nobody behind it overtakes."""
        reserved: list[ReservedRequest] = []
        filling = Filling()
        for request in message.requests:
            given = self._reserve(request, filling)
            if given is None:
                break
            reserved.append(given)
        denied = message.requests[len(reserved) :]
        self.state.denied = self.state.denied or bool(denied)
        if reserved:
            self.send(self._refs.prefill, StartPrefill(tuple(reserved)))
        answer = PagesReserved(
            tuple(given.request.request_id for given in reserved),
            tuple(request.request_id for request in denied),
            tuple(prefill_tokens(given.request) - given.reused_tokens for given in reserved),
        )
        self.send(self._refs.admission, answer)
        self._tell_free()

    def _reserve(self, request: Request, filling: Filling) -> ReservedRequest | None:
        pool = self.state.pool
        # Every running request needs a page now and then: leave one for each, or the newcomer is evicted.
        tokens = request.tokens
        reused = pool.reserve(request.request_id, tokens, pool.holders, _reusable(request), filling)
        if reused is None:
            return None
        self.state.prompts[request.request_id] = tokens
        self.state.reused_tokens += reused
        self.state.prompt_tokens += len(tokens) // 4
        return ReservedRequest(request, pool.pages_of(request.request_id), reused)

    def on_pages_filled(self, message: PagesFilled) -> None:
        for request_id in message.request_ids:
            tokens = self.state.prompts.pop(request_id, None)
            if tokens is not None:
                self.state.pool.publish(request_id, tokens)

    def on_grow_pages(self, message: GrowPages) -> None:
        granted: list[int] = []
        pages: list[int] = []
        denied: list[int] = []
        for request_id in message.request_ids:
            page = self.state.pool.grow(request_id)
            if page is None:
                denied.append(request_id)
            else:
                granted.append(request_id)
                pages.append(page)
        self.send(self._refs.decode, PagesGrown(tuple(granted), tuple(pages), tuple(denied)))
        self._tell_free()

    def on_release_pages(self, message: ReleasePages) -> None:
        state = self.state
        if message.tokens:
            state.pool.publish(message.request_id, message.tokens)
        else:
            state.pool.forget(message.request_id)
        state.prompts.pop(message.request_id, None)
        if not state.pool.release(message.request_id):
            state.late_releases += 1
            return
        if message.recompute is not None:
            self.send(self._refs.admission, RecomputeRequest(message.recompute))
        if state.denied:
            state.denied = False
            self.send(self._refs.admission, PagesFreed())
        self._tell_free()

    def on_abort_request(self, message: AbortRequest) -> None:
        """It owns no request by itself: the abort goes where the request went."""
        if message.returning:
            onward = AbortRequest(message.request_id, message.lap, returning=False)
            self.send(self._refs.admission, onward)
        else:
            self.send(self._refs.prefill, message)

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, "kv_pool", self.describe()))

    def _tell_free(self) -> None:
        pool = self.state.pool
        self.state.changed_since_check = True
        if pool.available == self.state.told_free:
            return
        self.state.told_free = pool.available
        changed = KvChanged(KvView(pool.total, pool.available))
        self.send(self._refs.arbiter, changed)
        self.send(self._refs.admission, changed)

    def idle(self) -> None:
        if self.state.changed_since_check:
            self.state.changed_since_check = False
            check_pool(self.state.pool)

    def describe(self) -> dict[str, Any]:
        state = self.state
        pool = state.pool
        return {
            "pages_total": pool.total,
            "pages_used": pool.used,
            "pages_cached": pool.cached,
            "pages_free": pool.free,
            "requests": pool.holders,
            "prompt_tokens": state.prompt_tokens,
            "reused_tokens": state.reused_tokens,
            "late_releases": state.late_releases,
        }


def _reusable(request: Request) -> int | None:
    """Tokens that may come from the index: none of a prompt whose log-probabilities have to be computed."""
    asked = request.params.prompt_logprobs is not None and not request.generated
    return 0 if asked else None


def check_pool(pool: PagePool) -> None:
    """The named invariant of the pool; the idle loop calls it, and so do tests."""
    pool.check()
    assert pool.used + pool.cached + pool.free == pool.total
