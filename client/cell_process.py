"""The process in which a `CellPool` runs cells, seen from the one that asks.

It says a line of JSON for each cell, and an empty line now and then while it runs one: a process that says
nothing for long has a policy that does not return, or was stopped, and is killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
from typing import IO

import msgspec
from muxk.client.cells import Cell, Outcome

COMMAND = (sys.executable, "-m", "muxk.client.cell_worker")
SAID_MAX = 400
"""Characters that are shown of what a process said before it died."""
SILENCE_AT_START_S = 600.0
"""Without a word, before the simulation of a cell is under way: a large trace is read twice first."""
SILENCE_S = 120.0
"""The same after that: the simulation says every second that it goes on."""
READ_BYTES = 1 << 16


class _Silent(Exception):
    """Nothing was said for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def _run_of(cell: Cell) -> str:
    """A run in words, so that one of many can be found and repeated."""
    rate = "" if cell.rate is None else f" at {cell.rate:g}/s"
    return f"{cell.policy} on {cell.workload}{rate} with seed {cell.seed}"


class CellProcess:
    """Started when it is first needed and again after it died. One thread at a time asks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._read = b""
        """Of the process's answers: what follows the last whole line."""

    def start(self) -> None:
        """Raises OSError when no process can be started."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._let_go(self._process)
            self._process = None
        if self._said is None:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process may write
        self._read = b""
        self._process = subprocess.Popen(
            (*COMMAND, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            start_new_session=True,
        )

    def ask(self, cell: Cell) -> Outcome:
        """What the cell comes to; one that takes its process with it says so."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(cell) + b"\n")
            return msgspec.json.decode(self._answer(), type=Outcome)
        except _Silent as silent:
            self._end_now()
            return Outcome(
                error=f"the run of {_run_of(cell)} was ended, for nothing happened in it for "
                f"{silent.seconds:g} s: a policy that does not return, or a process that was stopped"
            )
        except (OSError, ValueError, msgspec.MsgspecError):
            code, said = self._end_now()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            last = f": {said[-SAID_MAX:]}" if said else ""
            return Outcome(error=f"the process that ran {_run_of(cell)} ended with {how}{last}")

    def _answer(self) -> bytes:
        """The next line that says something. Raises _Silent; what there is of it when the process ends."""
        allowed_s = SILENCE_AT_START_S
        while True:
            line, end, self._read = self._read.partition(b"\n")
            if not end:
                block = self._block(allowed_s)
                self._read = line + block
                if not block:
                    return line
            elif line:
                return line
            else:
                allowed_s = SILENCE_S

    def _block(self, allowed_s: float) -> bytes:
        """What can be read next; empty when the process ended. Raises _Silent."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            # Whoever was stopped itself meanwhile looks once more before it calls that silence.
            if not ready.select(allowed_s) and not ready.select(0):
                raise _Silent(allowed_s)
        return os.read(self._process.stdout.fileno(), READ_BYTES)

    def _end_now(self) -> tuple[int, str]:
        """Kill it: its exit code and what it said on stderr."""
        assert self._process is not None
        assert self._said is not None
        self._process.kill()
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace").strip()
        self._said.seek(0)
        self._said.truncate()
        return code, said

    def retire(self) -> None:
        """End a process that waits for a cell; the next cell gets a new one."""
        if self._process is not None:
            self._process.kill()
            self._let_go(self._process)
            self._process = None

    def kill(self) -> None:
        """From any thread; whoever asks is told."""
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
