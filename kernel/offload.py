"""Offload threads of the realtime runtime: a thread pool with a bounded queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

OFFLOADS_PENDING = 4096
"""Offloaded functions that may wait or run; one more is an error of the actor that asks."""


class OffloadsFull(RuntimeError):
    """Over `OFFLOADS_PENDING` functions wait for the offload threads."""


class OffloadPool:
    """Runs functions in the order they were given, on a few threads."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="muxk-offload")
        self._lock = threading.Lock()
        self._pending = 0

    def start(self, function: Callable[[], None]) -> None:
        """Queue a function that never raises. Raises OffloadsFull."""
        with self._lock:
            if self._pending >= OFFLOADS_PENDING:
                raise OffloadsFull(f"{OFFLOADS_PENDING} offloaded functions are pending")
            self._pending += 1
        self._pool.submit(self._run, function)

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        finally:
            with self._lock:
                self._pending -= 1

    def close(self) -> None:
        """Forget what waits and join the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
