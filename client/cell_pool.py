"""Runs cells in processes of their own, several at once, each cell once.

What a cell comes to depends on nothing but the cell, so the number of processes and who ends first change no
figure. A process that dies takes only its own cell with it. In a session of its own it is not reached by
Ctrl-C: the parent is, and kills it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import IO, Protocol, Self

import msgspec
from muxk.client.cells import Cell, Outcome
from muxk.client.errors import ClientError

COMMAND = (sys.executable, "-m", "muxk.client.cell_worker")
SAID_MAX = 400
"""Characters that are shown of what a process said before it died."""

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


class CellPool:
    """Threads share it: `run` waits for its outcome."""

    def __init__(
        self, jobs: int, store: Store | None = None, told: Told = lambda cell, outcome: None
    ) -> None:
        assert jobs >= 1
        self.jobs = jobs
        self._store = store
        self._told = told
        self._workers = [_Worker() for _ in range(jobs)]
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
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
        kept = None if self._store is None else self._store.find(cell)
        if kept is not None:
            self._told(cell, kept)
            return kept
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)
            raise Stopped("stopped")
        try:
            outcome = self._ask(worker, cell)
        finally:
            self._idle.put(worker)
        if self._store is not None and not outcome.error:
            self._store.keep(cell, outcome)
        self._told(cell, outcome)
        return outcome

    def _ask(self, worker: _Worker, cell: Cell) -> Outcome:
        with self._lock:
            if self._closed:
                raise Stopped("stopped")
            worker.start()
        outcome = worker.ask(cell)
        if self._closed:
            raise Stopped("stopped")
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


class _Worker:
    """A process, started when it is first needed and again after it died. One thread at a time asks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._let_go(self._process)
        if self._said is None:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process may write
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )

    def ask(self, cell: Cell) -> Outcome:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(cell) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            return msgspec.json.decode(line, type=Outcome)
        except (OSError, ValueError, msgspec.MsgspecError):
            return Outcome(error=self._death())

    def _death(self) -> str:
        assert self._process is not None
        assert self._said is not None
        self._process.kill()
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace").strip()
        self._said.seek(0)
        self._said.truncate()
        return f"the process that ran it ended with {how}" + (f": {said[-SAID_MAX:]}" if said else "")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Let go of a process that was killed."""
        if self._process is not None:
            self._let_go(self._process)
        if self._said is not None:
            self._said.close()

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written yet has no reader any more
                    pipe.close()
