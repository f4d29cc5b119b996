"""migration: moves requests that decode from one group of devices to another, with their KV.

decode hands it a request that no item in flight touches; it asks the target's kv_pool for pages, has the link
copy what that pool does not hold, gives the source's pages back and tells the target's decode. Requests that
wait for pages of a group are served in the order in which they came. Invariant: it owns the pages of exactly
the requests in `moving`: those of the source always, those of the target once they are received. What comes
the other way, before a prompt is computed, is the business of `prefix_fetches.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from muxk.actors.group_messages import (
    FetchPrefix,
    MigrateRequest,
    PrefixKept,
    PrefixPinned,
    ReceiveRequest,
    RequestEnded,
    RequestMigrated,
    RequestReceived,
    ResumeDecode,
    RoomFreed,
    RoomMade,
)
from muxk.actors.messages import (
    AbortRequest,
    PagesFilled,
    ReleasePages,
    RequestAborted,
    RequestFailed,
)
from muxk.actors.prefix_fetches import PrefixFetches
from muxk.actors.refs import MigrationInbox, Refs
from muxk.kernel.actor import Actor
from muxk.kernel.link import Link, Migration, MigrationDone, MigrationFailed
from muxk.kernel.messages import ReportRequests, ReportState, RequestsReported, StateReported
from muxk.kernel.statuses import Reason, StatusReport
from muxk.kernel.work import PAGE_SIZE, int32_bytes


@dataclass
class Moving:
    """A request on its way."""

    asked: MigrateRequest
    migration_id: int | None = None
    """None until it has pages in the target's pool."""
    pages: tuple[int, ...] = ()
    """Of the target."""
    asking: bool = False
    """kv_pool was asked for them, and has not answered."""
    aborted: bool = False


@dataclass
class MigrationState:
    moving: dict[int, Moving] = field(default_factory=dict)
    """By request."""
    copying: dict[int, int] = field(default_factory=dict)
    """Requests by migration."""
    waiting: dict[int, list[int]] = field(default_factory=dict)
    """Requests that need pages of a group, by group; the first was denied or its answer is not here."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Groups to which requests that have not ended were moved, by request."""
    next_migration: int = 1
    requests: int = 0
    pages: int = 0
    """Copied."""
    reused_pages: int = 0
    """That the target had already."""
    busy_ns: int = 0
    """Of the link."""
    given_up: int = 0
    """Computed again, because they and others waited for each other's pages."""
    late_events: int = 0


class MigrationActor(Actor):
    """One a server with several devices."""

    Accepts = MigrationInbox

    def __init__(self, groups: tuple[Refs, ...], link: Link, first_migration: int = 1) -> None:
        """Migrations are numbered from `first_migration`, so that no end of an older one fits."""
        self._groups = groups
        self._shared = groups[0]
        self._link = link
        self.state = MigrationState(next_migration=first_migration)

    def started(self) -> None:
        self._fetches = PrefixFetches(self._groups, self.context, self._link)

    # --- prefixes ---

    def on_fetch_prefix(self, message: FetchPrefix) -> None:
        self._fetches.begin(message)

    def on_prefix_pinned(self, message: PrefixPinned) -> None:
        self._fetches.pinned(message)

    def on_room_made(self, message: RoomMade) -> None:
        self.state.next_migration += self._fetches.room_made(message, self.state.next_migration)

    def on_prefix_kept(self, message: PrefixKept) -> None:
        self._fetches.kept(message.request_id)

    # --- requests that decode ---

    def on_migrate_request(self, message: MigrateRequest) -> None:
        request_id = message.reserved.request.request_id
        assert request_id not in self.state.moving, "a request's pages have one owner"
        self.state.moving[request_id] = Moving(message)
        self.state.requests += 1
        waiting = self.state.waiting.setdefault(message.target, [])
        waiting.append(request_id)
        if len(waiting) == 1:
            self._ask_for_pages(message.target)
        elif not self.state.moving[waiting[0]].asking:
            self._give_way((request_id,))

    def _ask_for_pages(self, group: int) -> None:
        """For the first that waits: nobody overtakes it."""
        waiting = self.state.waiting.get(group, [])
        if waiting and not (moving := self.state.moving[waiting[0]]).asking:
            moving.asking = True
            self.send(self._groups[group].kv_pool, ReceiveRequest(moving.asked.reserved.request))

    def on_room_freed(self, message: RoomFreed) -> None:
        self._ask_for_pages(message.group)

    def on_request_received(self, message: RequestReceived) -> None:
        moving = self.state.moving[message.request_id]
        moving.asking = False
        if message.pages is None:
            if moving.aborted:
                self._stop_waiting(message.request_id, message.group)
            else:
                self._give_way(tuple(reversed(self.state.waiting[message.group])))
            return
        self.state.waiting[message.group].remove(message.request_id)
        moving.pages = message.pages
        if moving.aborted:
            self._drop(message.request_id, message.group)
        else:
            self._copy(message.request_id, moving, message.reused_tokens // PAGE_SIZE)
        self._ask_for_pages(message.group)

    def _stop_waiting(self, request_id: int, group: int) -> None:
        """It was aborted, and no pages are on their way to it."""
        self.state.waiting[group].remove(request_id)
        self._let_go(request_id)
        self._ask_for_pages(group)

    def _give_way(self, request_ids: tuple[int, ...]) -> None:
        """The first of these that waits for its own pages to come free lets go of them."""
        for request_id in request_ids:
            moving = self.state.moving[request_id]
            if not moving.asking and not moving.aborted and self._waits_for_itself(moving.asked.source):
                self._compute_again(request_id, moving)
                return

    def _waits_for_itself(self, group: int) -> bool:
        """Whether what waits for pages elsewhere holds the pages of a group that others wait for, and so on
        round to it: then nobody might ever go on."""
        reached, found = [group], {group: None}
        while reached:
            source = reached.pop()
            for target, waiting in self.state.waiting.items():
                if any(self.state.moving[request].asked.source == source for request in waiting):
                    if target == group:
                        return True
                    if target not in found:
                        found[target] = None
                        reached.append(target)
        return False

    def _compute_again(self, request_id: int, moving: Moving) -> None:
        """Give up its pages, and begin with its prompt and what it has said wherever there is room."""
        asked = moving.asked
        request = asked.reserved.request
        again = msgspec.structs.replace(
            request,
            generated=request.generated + int32_bytes([asked.token]),
            recomputes=request.recomputes + 1,
        )
        self.state.waiting[asked.target].remove(request_id)
        del self.state.moving[request_id]
        self.state.given_up += 1
        self.send(self._groups[asked.source].kv_pool, ReleasePages(request_id, request.tokens, again))
        self._ask_for_pages(asked.target)

    def _copy(self, request_id: int, moving: Moving, reused_pages: int) -> None:
        """Pages with KV in them, but for those at the front that the target has."""
        state, reserved = self.state, moving.asked.reserved
        tokens = reserved.request.prompt_tokens + reserved.request.generated_tokens
        written = -(-tokens // PAGE_SIZE)
        migration = Migration(
            state.next_migration,
            moving.asked.source,
            moving.asked.target,
            reserved.pages[reused_pages:written],
            moving.pages[reused_pages:written],
            just_computed=not reserved.request.generated,
        )
        state.next_migration += 1
        state.pages += written - reused_pages
        state.reused_pages += reused_pages
        moving.migration_id = migration.migration_id
        state.copying[migration.migration_id] = request_id
        self._link.launch(migration)

    def on_migration_done(self, message: MigrationDone) -> None:
        if message.migration_id in self._fetches.copying:
            self.state.busy_ns += message.ended_ns - message.started_ns
            self._fetches.done(message)
            return
        request_id = self.state.copying.pop(message.migration_id, None)
        if request_id is None:
            self.state.late_events += 1
            return
        self.state.busy_ns += message.ended_ns - message.started_ns
        moving = self.state.moving[request_id]
        target = self._groups[moving.asked.target]
        if moving.aborted:
            self._drop(request_id, target.group)
            return
        self.send(target.kv_pool, PagesFilled((request_id,)))
        reserved = msgspec.structs.replace(moving.asked.reserved, pages=moving.pages)
        self.send(target.decode, ResumeDecode(reserved, moving.asked.token))
        self.state.arrived[request_id] = target.group
        assert self._shared.placement is not None
        self.send(self._shared.placement, RequestMigrated(request_id, target.group))
        self._let_go(request_id)

    def on_migration_failed(self, message: MigrationFailed) -> None:
        if message.migration_id in self._fetches.copying:
            self._fetches.failed(message.migration_id)
            return
        request_id = self.state.copying.pop(message.migration_id, None)
        if request_id is None:
            self.state.late_events += 1
            return
        moving = self.state.moving[request_id]
        if not moving.aborted:
            failed = RequestFailed(request_id, "engine_failed", f"migration failed: {message.reason}")
            self.send(self._shared.tokenizer, failed)
        self._drop(request_id, moving.asked.target)

    def _drop(self, request_id: int, group: int) -> None:
        """Give back what it was given in the target's pool, and the rest."""
        self.send(self._groups[group].kv_pool, ReleasePages(request_id, b"", None))
        self._let_go(request_id)

    def _let_go(self, request_id: int) -> None:
        """Give back the source's pages; what it wrote there may stay in that pool's prefix index."""
        asked = self.state.moving.pop(request_id).asked
        kept = asked.reserved.request.tokens if asked.keep else b""
        self.send(self._groups[asked.source].kv_pool, ReleasePages(request_id, kept, None))

    def on_abort_request(self, message: AbortRequest) -> None:
        """Of a request that placement sent here, or that the decode of a group does not have: it is here, or
        was, or was evicted."""
        state, request_id = self.state, message.request_id
        if not message.returning:
            self._abort_early(message)
            return
        moving = state.moving.get(request_id)
        if moving is not None:
            if not moving.aborted:
                moving.aborted = True
                self.send(self._shared.gateway, RequestAborted(request_id))
                if moving.migration_id is None and not moving.asking:
                    self._stop_waiting(request_id, moving.asked.target)
            return
        group = state.arrived.pop(request_id, None)
        if group is not None and group != message.group:
            # Behind the request on the same channel, so that it is there.
            self.send(self._groups[group].decode, message)
        else:
            self.send(self._groups[message.group].kv_pool, message)

    def _abort_early(self, message: AbortRequest) -> None:
        """Before it is in a group's admission, or behind it on the same channel."""
        if self._fetches.abort(message.request_id):
            self.send(self._shared.gateway, RequestAborted(message.request_id))
        elif message.request_id not in self._fetches.fetches:
            self.send(self._groups[message.group].admission, message)

    def on_request_ended(self, message: RequestEnded) -> None:
        self.state.arrived.pop(message.request_id, None)
        self._fetches.ended(message.request_id)

    def on_report_requests(self, message: ReportRequests) -> None:
        report = StatusReport("migration", message.request_ids)
        for request_id, moving in self.state.moving.items():
            if not moving.aborted and report.wants(request_id):
                asked = moving.asked
                where = f"from device {asked.source} to {asked.target}"
                copies = moving.migration_id is not None
                detail = f"its KV moves {where}" if copies else f"it waits for pages, to move {where}"
                report.add(request_id, Reason.MIGRATING, detail)
        self._fetches.report(report)
        self.send(self._shared.gateway, RequestsReported.of(report, message.ticket))

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._shared.gateway, StateReported(message.ticket, "migration", self.describe()))

    def describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "moving": len(state.moving),
            "waiting_for_pages": sum(len(waiting) for waiting in state.waiting.values()),
            "requests": state.requests,
            "pages": state.pages,
            "reused_pages": state.reused_pages,
            "given_up": state.given_up,
            "link_busy_ms": state.busy_ns // 1_000_000,
            "late_events": state.late_events,
            **self._fetches.describe(),
        }
