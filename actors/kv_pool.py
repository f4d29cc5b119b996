"""kv_pool: owns the KV pages of all requests.

Admission asks it for the pages of a batch, decode for one more page ahead of need, prefill and decode give
pages back once no item in flight touches them. Invariant: every page is used, cached or free, as
`PagePool.audit` looks at when idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muxk.actors.group_messages import (
    DeviceReleased,
    DevicesTaken,
    MakeRoom,
    PinPrefix,
    PrefixArrived,
    PrefixKept,
    PrefixPinned,
    PrefixUnwanted,
    ReceiveRequest,
    ReleaseDevice,
    RequestReceived,
    RoomFreed,
    RoomMade,
    TakeDevices,
)
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
from muxk.kernel.work import PAGE_SIZE

PLENTY = 4
"""One page in so many may go to rows that do not need it yet."""


@dataclass
class KvPoolState:
    pool: PagePool
    prompts: dict[int, bytes]
    """Tokens of requests between their reservation and `PagesFilled`."""
    denied: bool = False
    """Somebody waits for `PagesFreed`."""
    denied_room: bool = False
    """migration waits for `RoomFreed`."""
    releasing: list[int] = field(default_factory=list)
    """Devices that were given back and have pages in use."""
    changed_since_check: bool = True
    late_releases: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    told: KvView | None = None
    """The last news of `KvChanged`."""


class KvPool(Actor):
    """One a device, or one a group of several."""

    Accepts = KvPoolInbox

    def __init__(self, refs: Refs, devices: Mapping[int, range]) -> None:
        """`devices` are the pages of each device of the server; it begins with those of its own group's."""
        self._refs = refs
        self._devices = devices
        self.state = KvPoolState(pool=PagePool(devices[refs.group]), prompts={})

    def started(self) -> None:
        self._tell_free()

    def on_reserve_pages(self, message: ReservePages) -> None:
        """Reserve in the given order until one does not fit, so that nobody behind it overtakes."""
        reserved: list[ReservedRequest] = []
        filling = Filling() if len(message.requests) > 1 else None
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

    def _reserve(self, request: Request, filling: Filling | None) -> ReservedRequest | None:
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
        early = self._early_pages(len(message.request_ids))
        for request_id in (*message.request_ids, *message.soon[:early]):
            page = self.state.pool.grow(request_id)
            if page is None:
                denied.append(request_id)
            else:
                granted.append(request_id)
                pages.append(page)
        later = message.soon[early:]
        self.send(self._refs.decode, PagesGrown(tuple(granted), tuple(pages), tuple(denied), later))
        self._tell_free()

    def _early_pages(self, wanted: int) -> int:
        """How many rows may get a page before they need it, beside those that do: none while others wait."""
        if self.state.denied or self.state.denied_room:
            return 0
        return max(0, self.state.pool.available // PLENTY - wanted)

    def on_release_pages(self, message: ReleasePages) -> None:
        state = self.state
        if message.tokens:
            state.pool.keep(message.request_id, message.tokens)
        else:
            state.pool.forget(message.request_id)
        state.prompts.pop(message.request_id, None)
        if not state.pool.release(message.request_id):
            state.late_releases += 1
            return
        if message.recompute is not None:
            self.send(self._refs.intake, RecomputeRequest(message.recompute))
        self._pages_came_back()

    def _pages_came_back(self) -> None:
        """Migrations first: what they bring is computed already, and holds pages elsewhere."""
        state = self.state
        if state.denied_room:
            state.denied_room = False
            self._tell_migration(RoomFreed(self._refs.group))
        if state.denied:
            state.denied = False
            self.send(self._refs.admission, PagesFreed())
        self._tell_released()
        self._tell_free()

    def on_abort_request(self, message: AbortRequest) -> None:
        """It owns no request by itself: the abort goes where the request went."""
        if message.returning:
            onward = AbortRequest(message.request_id, message.lap, returning=False)
            self.send(self._refs.intake, onward)
        else:
            self.send(self._refs.prefill, message)

    # --- several devices ---

    def on_receive_request(self, message: ReceiveRequest) -> None:
        """Pages for a request that was computed elsewhere; what is in the prefix index need not be copied."""
        request = message.request
        given = self._reserve(request, None)
        if given is None:
            self.state.denied_room = True
        pages, reused = (None, 0) if given is None else (given.pages, given.reused_tokens)
        received = RequestReceived(request.request_id, self._refs.group, pages, reused)
        self._tell_migration(received)
        self._tell_free()

    def on_pin_prefix(self, message: PinPrefix) -> None:
        """The pages are not evicted while they are copied."""
        request = message.request
        tokens, reusable = request.tokens, _reusable(request)
        most = len(tokens) // 4 - 1 if reusable is None else reusable
        pages = self.state.pool.pin(request.request_id, tokens, max(0, most) // PAGE_SIZE)
        self._tell_migration(PrefixPinned(request.request_id, pages))
        self._tell_free()

    def on_make_room(self, message: MakeRoom) -> None:
        """For a prefix that is worth no wait: nobody is told when there is room again."""
        pool, request = self.state.pool, message.request
        tokens = request.tokens[: 4 * PAGE_SIZE * message.pages]
        present = pool.make_room(request.request_id, tokens, pool.holders)
        pages = None if present is None else pool.pages_of(request.request_id)
        self._tell_migration(RoomMade(request.request_id, pages, present or 0))
        self._tell_free()

    def on_prefix_arrived(self, message: PrefixArrived) -> None:
        self.state.pool.keep_for(message.request_id, message.pages)
        self._tell_migration(PrefixKept(message.request_id))
        self._pages_came_back()

    def on_prefix_unwanted(self, message: PrefixUnwanted) -> None:
        self.state.pool.came(message.request_id)

    def on_release_device(self, message: ReleaseDevice) -> None:
        self.state.releasing.append(message.device)
        self.state.pool.give_back(self._devices[message.device])
        self._tell_released()
        self._tell_free()

    def _tell_released(self) -> None:
        if not self.state.releasing:
            return
        gone = self.state.pool.left()
        for device in [device for device in self.state.releasing if self._devices[device] in gone]:
            self.state.releasing.remove(device)
            assert self._refs.placement is not None
            self.send(self._refs.placement, DeviceReleased(self._refs.group, device))

    def on_take_devices(self, message: TakeDevices) -> None:
        for device in message.devices:
            self.state.pool.add(self._devices[device])
        self._pages_came_back()
        # By way of admission, which knows of the pages then: what placement sends it may need them.
        self.send(self._refs.admission, DevicesTaken(self._refs.group))

    def _tell_migration(
        self, message: RequestReceived | RoomFreed | PrefixPinned | RoomMade | PrefixKept
    ) -> None:
        assert self._refs.migration is not None
        self.send(self._refs.migration, message)

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, self._refs.kv_pool.name, self.describe()))

    def _tell_free(self) -> None:
        pool = self.state.pool
        self.state.changed_since_check = True
        view = KvView(pool.total, pool.available)
        if view == self.state.told:
            return
        self.state.told = view
        changed = KvChanged(view, self._refs.group)
        self.send(self._refs.arbiter, changed)
        self.send(self._refs.admission, changed)
        if self._refs.placement is not None:
            self.send(self._refs.placement, changed)

    def idle(self) -> None:
        if self.state.changed_since_check:
            self.state.changed_since_check = False
            self.state.pool.audit()

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
