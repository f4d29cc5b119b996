"""Prefixes on their way to the device that computes the rest of a prompt, from the one that will decode it.

Where a policy keeps KV on the devices that decode only (`Policy.fetches_prefix`), a request comes to
migration before it comes to a group's admission. The pool that has its prefix holds those pages, the other
one makes room, the link copies what is missing, and the request goes on. Nothing waits for pages: without
room, or when the link fails, the request goes on without. migration owns the one object of this class.
Invariant: for each request in `fetches` either a pool was asked, or the link copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from muxk.actors.group_messages import (
    FetchPrefix,
    MakeRoom,
    PinPrefix,
    PrefixArrived,
    PrefixPinned,
    PrefixUnwanted,
    RoomMade,
)
from muxk.actors.messages import ReleasePages
from muxk.actors.refs import Refs
from muxk.kernel.actor import Context
from muxk.kernel.link import Link, Migration, MigrationDone
from muxk.kernel.statuses import Reason, StatusReport


@dataclass
class Fetch:
    """A request whose prefix is fetched."""

    asked: FetchPrefix
    pages: tuple[int, ...] = ()
    """Of the source: the prefix."""
    present: int = 0
    """Pages at the front that the target had."""
    aborted: bool = False


@dataclass
class PrefixFetches:
    groups: tuple[Refs, ...]
    context: Context
    link: Link
    fetches: dict[int, Fetch] = field(default_factory=dict)
    """By request."""
    copying: dict[int, int] = field(default_factory=dict)
    """Requests by migration."""
    fetched: dict[int, int] = field(default_factory=dict)
    """Groups that keep a prefix for a request that has not ended, by request."""
    requests: int = 0
    pages: int = 0
    """Copied."""
    denied: int = 0
    """Requests for whose prefix there was no room."""

    def begin(self, message: FetchPrefix) -> None:
        request = message.admitted.request
        assert request.request_id not in self.fetches
        self.fetches[request.request_id] = Fetch(message)
        self.context.send(self.groups[message.source].kv_pool, PinPrefix(request))

    def pinned(self, message: PrefixPinned) -> None:
        fetch = self.fetches[message.request_id]
        fetch.pages = message.pages
        if not message.pages:
            self._hand_on(message.request_id)
        elif fetch.aborted:
            self._unpin(message.request_id)
            self._hand_on(message.request_id)
        else:
            room = MakeRoom(fetch.asked.admitted.request, len(message.pages))
            self.context.send(self.groups[fetch.asked.target].kv_pool, room)

    def room_made(self, message: RoomMade, migration_id: int) -> int:
        """Launch the copy under this number, where there is one; the number of migrations launched."""
        fetch = self.fetches[message.request_id]
        if message.pages is None:
            self.denied += 1
            self._unpin(message.request_id)
            self._hand_on(message.request_id)
            return 0
        fetch.present = message.present
        if fetch.aborted or message.present == len(fetch.pages):
            self._arrived(message.request_id, message.present)
            return 0
        asked, first = fetch.asked, message.present
        self.copying[migration_id] = message.request_id
        self.link.launch(
            Migration(migration_id, asked.source, asked.target, fetch.pages[first:], message.pages[first:])
        )
        return 1

    def done(self, message: MigrationDone) -> None:
        """Of one of those in `copying`."""
        request_id = self.copying.pop(message.migration_id)
        fetch = self.fetches[request_id]
        self.requests += 1
        self.pages += len(fetch.pages) - fetch.present
        self._arrived(request_id, len(fetch.pages))

    def failed(self, migration_id: int) -> None:
        """It goes on without what was to be copied."""
        request_id = self.copying.pop(migration_id)
        self._arrived(request_id, self.fetches[request_id].present)

    def _arrived(self, request_id: int, pages: int) -> None:
        fetch = self.fetches[request_id]
        self._unpin(request_id)
        arrived = PrefixArrived(request_id, 0 if fetch.aborted else pages)
        self.context.send(self.groups[fetch.asked.target].kv_pool, arrived)

    def kept(self, request_id: int) -> None:
        self.fetched[request_id] = self.fetches[request_id].asked.target
        aborted = self.fetches[request_id].aborted
        self._hand_on(request_id)
        if aborted:
            self.ended(request_id)

    def _unpin(self, request_id: int) -> None:
        source = self.fetches[request_id].asked.source
        self.context.send(self.groups[source].kv_pool, ReleasePages(request_id, b"", None))

    def _hand_on(self, request_id: int) -> None:
        """To the admission of the group that computes it, if somebody still waits for it."""
        fetch = self.fetches.pop(request_id)
        if not fetch.aborted:
            self.context.send(self.groups[fetch.asked.target].admission, fetch.asked.admitted)

    def abort(self, request_id: int) -> bool:
        """Whether it was here; True once only."""
        fetch = self.fetches.get(request_id)
        if fetch is None or fetch.aborted:
            return False
        fetch.aborted = True
        return True

    def ended(self, request_id: int) -> None:
        """It had its terminal event."""
        group = self.fetched.pop(request_id, None)
        if group is not None:
            self.context.send(self.groups[group].kv_pool, PrefixUnwanted(request_id))

    def report(self, report: StatusReport) -> None:
        for request_id, fetch in self.fetches.items():
            if not fetch.aborted and report.wants(request_id):
                where = f"from device {fetch.asked.source} to {fetch.asked.target}"
                report.add(request_id, Reason.MIGRATING, f"the prefix that it shares moves {where}")

    def describe(self) -> dict[str, Any]:
        return {
            "fetching": len(self.fetches),
            "fetches": self.requests,
            "fetched_pages": self.pages,
            "fetches_denied": self.denied,
        }
