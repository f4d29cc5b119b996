"""Runs cells in processes of their own, several at once, each cell once.

What a cell comes to depends on nothing but the cell, so the number of processes and who ends first change no
figure. A process that dies or hangs takes only its own cell with it. In a session of its own it is not
reached by Ctrl-C: the parent is, and kills it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from muxk.client.cell_files import Unchanged
from muxk.client.cell_process import CellProcess
from muxk.client.cells import Cell, Outcome
from muxk.client.errors import ClientError
from muxk.policies.engine import shipped_policies

Told = Callable[[Cell, Outcome], None]
"""Called for each run that ended, on some thread."""


class Stopped(ClientError):
    """The pool was closed before the cell was run."""


class Store(Protocol):
    """Outcomes of earlier studies."""

    def find(self, cell: Cell) -> Outcome | None: ...

    def keep(self, cell: Cell, outcome: Outcome) -> None: ...


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _is_rules(policy: str) -> bool:
    """Not so for one in Python, which may leave something behind in its process for the next cell."""
    return policy in shipped_policies() or Path(policy).is_file()


class CellPool:
    """Threads share it: `run` waits for its outcome."""

    def __init__(
        self, jobs: int, store: Store | None = None, told: Told = lambda cell, outcome: None
    ) -> None:
        assert jobs >= 1
        self.jobs = jobs
        self._store = store
        self._told = told
        self._unchanged = Unchanged()
        self._workers = [CellProcess() for _ in range(jobs)]
        self._idle: queue.SimpleQueue[CellProcess | None] = queue.SimpleQueue()
        """Who can be asked; None, which stays there, when nobody is left."""
        for worker in self._workers:
            self._idle.put(worker)
        self._known: dict[Cell, Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def run(self, cell: Cell) -> Outcome:
        """What a cell comes to; one that was asked for before, or is in the store, is not run again.

        Raises Stopped when the pool is closed meanwhile.
        """
        with self._lock:
            future = self._known.get(cell)
            mine = future is None
            if future is None:
                future = self._known[cell] = Future()
        if mine:
            try:
                future.set_result(self._find(cell))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _find(self, cell: Cell) -> Outcome:
        changed = self._unchanged.complaint(cell)
        if changed:
            return self._tell(cell, Outcome(error=changed))
        kept = None if self._store is None else self._store.find(cell)
        if kept is not None:
            return self._tell(cell, kept)
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)
            raise Stopped("stopped")
        try:
            outcome = self._ask(worker, cell)
        finally:
            self._idle.put(worker)
        changed = self._unchanged.complaint(cell)
        if changed:
            return self._tell(cell, Outcome(error=changed))
        if self._store is not None and not outcome.error:
            self._store.keep(cell, outcome)
        return self._tell(cell, outcome)

    def _tell(self, cell: Cell, outcome: Outcome) -> Outcome:
        self._told(cell, outcome)
        return outcome

    def _ask(self, worker: CellProcess, cell: Cell) -> Outcome:
        with self._lock:
            if self._closed:
                raise Stopped("stopped")
            try:
                worker.start()
            except OSError as error:
                return Outcome(error=f"no process could be started for it: {error.strerror or error}")
        outcome = worker.ask(cell)
        with self._lock:
            if self._closed:
                raise Stopped("stopped")
            if not _is_rules(cell.policy):
                worker.retire()
        return outcome

    def close(self) -> None:
        """Kill what runs; whoever waits is told."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.kill()
        for _ in self._workers:  # each comes back from the thread that asked it
            ended = self._idle.get()
            assert ended is not None
            ended.end()
        self._idle.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
