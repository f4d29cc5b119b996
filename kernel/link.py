"""Links between devices: what moves KV pages from one pool to another.

A migration is a work item of a link, as a decode step is one of a lane: it is launched, it can not be
recalled, and its end comes back as a message. Whoever launches it owns the pages on both sides until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import msgspec
from muxk.kernel.actor import Message
from muxk.kernel.device import DevicePort


class Migration(msgspec.Struct, frozen=True):
    """Copy pages of one device's pool to as many pages of another's, in order."""

    migration_id: int
    source: int
    target: int
    """Numbers of the groups."""
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    just_computed: bool = False
    """They are those of a prompt, which could have moved layer by layer while it was computed."""


class MigrationDone(Message, frozen=True):
    """link -> migration: the pages are copied."""

    migration_id: int
    started_ns: int
    ended_ns: int


class MigrationFailed(Message, frozen=True):
    """link -> migration: the target's pages hold nothing of use."""

    migration_id: int
    reason: str


class Link(Protocol):
    """Between all devices of a server."""

    @property
    def bytes_per_ns(self) -> float:
        """Of one migration alone; 0 when it is not known."""

    @property
    def page_bytes(self) -> int:
        """That one page moves over one device's link."""

    def start(self, port: DevicePort) -> None:
        """Called once; completions go to the port."""

    def launch(self, migration: Migration) -> None: ...

    def reset(self) -> None:
        """Forget what is in flight, after a crash of the executors; waits where it can not."""

    def close(self) -> None:
        """End threads; idempotent."""


class LinkTimes(msgspec.Struct, frozen=True):
    """Constants of a modelled link."""

    bytes_per_ns: float
    latency_ns: int
    hidden: float = 0.0
    """Share of the bytes of a long migration, of a prompt that was just computed, that moved while it was."""
    hidden_from_pages: int = 1 << 62
    """A migration of so many pages is a long one."""


class SimLink:
    """A modelled link: migrations that leave the same device share its link one after the other."""

    def __init__(self, times: LinkTimes, page_bytes: int, copy: Callable[[Migration], None]) -> None:
        """`copy` moves what the simulated pools keep of pages, when a migration is launched: nobody writes
        the source's pages, or reads the target's, before it ends."""
        self.page_bytes = page_bytes
        self._times = times
        self._copy = copy
        self._free_ns: dict[int, int] = {}
        self._port: DevicePort | None = None

    @property
    def bytes_per_ns(self) -> float:
        return self._times.bytes_per_ns

    def start(self, port: DevicePort) -> None:
        self._port = port

    def launch(self, migration: Migration) -> None:
        assert self._port is not None, "start the link before launching"
        now_ns = self._port.now_ns()
        begin_ns = max(now_ns, self._free_ns.get(migration.source, 0))
        end_ns = begin_ns + self.elapsed_ns(migration)
        self._free_ns[migration.source] = end_ns
        self._copy(migration)
        done = MigrationDone(migration.migration_id, begin_ns, end_ns)
        self._port.post_after(end_ns - now_ns, done)

    def elapsed_ns(self, migration: Migration) -> int:
        """Of a migration that has the link to itself."""
        times, pages = self._times, len(migration.source_pages)
        hides = migration.just_computed and pages >= times.hidden_from_pages
        hidden = times.hidden if hides else 0.0
        moved = pages * self.page_bytes * (1.0 - hidden)
        return times.latency_ns + round(moved / times.bytes_per_ns)

    def reset(self) -> None:
        """What is in flight still ends; nobody waits for it."""
        self._free_ns.clear()

    def close(self) -> None:
        """Nothing to end."""


class CopyLink:
    """A link that copies in memory, on a thread of its own, one migration after the other."""

    def __init__(self, page_bytes: int, copy: Callable[[Migration], None]) -> None:
        self.bytes_per_ns = 0.0
        self.page_bytes = page_bytes
        self._copy = copy
        self._queue: SimpleQueue[Migration | None] = SimpleQueue()
        self._idle = threading.Condition()
        self._in_flight = 0
        self._port: DevicePort | None = None
        self._thread: threading.Thread | None = None

    def start(self, port: DevicePort) -> None:
        self._port = port
        self._thread = threading.Thread(target=self._work, name="link", daemon=True)
        self._thread.start()

    def launch(self, migration: Migration) -> None:
        with self._idle:
            self._in_flight += 1
        self._queue.put(migration)

    def _work(self) -> None:
        port = self._port
        assert port is not None
        while (migration := self._queue.get()) is not None:
            started_ns = port.now_ns()
            try:
                self._copy(migration)
            except Exception as error:  # the reason goes to the client; the link serves on
                port.post(MigrationFailed(migration.migration_id, f"{type(error).__name__}: {error}"))
            else:
                port.post(MigrationDone(migration.migration_id, started_ns, port.now_ns()))
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()

    def reset(self) -> None:
        """Copies are short: wait for those in flight."""
        with self._idle:
            self._idle.wait_for(lambda: self._in_flight == 0)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
