"""A study while it runs: its processes and store, how long it still takes, and what went wrong in passing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import typer
from muxk.client.options import INTERRUPTED, USAGE, die
from muxk.client.terminal import described_tasks, error_console

if TYPE_CHECKING:
    from muxk.client.cell_store import CellStore
    from muxk.client.cells import Cell, Outcome
    from muxk.client.compare import Plan
    from muxk.client.experiments import Lab
    from muxk.client.forecast import Left
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 60.0
"""Between two lines about how far it is, where there is no terminal."""
LATEST_CHARACTERS = 60


class OpenedStudy:
    """What a command does runs with."""

    def __init__(self, jobs: int | None, store: CellStore | None) -> None:
        from muxk.client.experiments import Lab
        from muxk.client.run_notes import RunNotes

        self.lab: Lab = Lab(jobs, store, self._told)
        self._notes = RunNotes()
        self._shown = _Bar() if sys.stderr.isatty() else _Lines()
        self._lock = threading.Lock()

    def tell_plan(self, plan: Plan) -> None:
        """How long it will take, before it does."""
        self.lab.forecast.plan(plan.work, plan.seconds * self.lab.jobs, monotonic())
        if plan.runs:
            runs = "1 run" if plan.runs == 1 else f"{plan.runs} runs"
            self._shown.print(f"about {runs}, {in_words(plan.seconds)} from here")

    def notes(self) -> tuple[str, ...]:
        """What whoever reads the figures of all its runs must know."""
        with self._lock:
            return tuple(self._notes.lines())

    def _told(self, cell: Cell, outcome: Outcome) -> None:
        with self._lock:
            self._notes.add(cell.policy, outcome.figures)
            self._shown.ran(self.lab.forecast.left(monotonic()), cell)

    def begin(self) -> None:
        """Count from here; how long it takes shows as runs end."""
        self.lab.forecast.plan((), 0.0, monotonic())

    def close(self) -> None:
        """Take the bar away."""
        self._shown.close()


@contextmanager
def opened_study(jobs: int | None, cache: Path | None) -> Iterator[OpenedStudy]:
    """Where runs are done, with a bar on a terminal. Ctrl-C ends all of it and the command."""
    store = opened_store(cache)
    study = OpenedStudy(jobs, store)
    try:
        with study.lab:
            yield study
    except KeyboardInterrupt:
        hint = "" if cache is None else f"; the same command goes on from {cache}"
        die(f"stopped{hint}", INTERRUPTED)
    finally:
        study.close()
        if store is not None and store.lost:
            typer.echo(f"muxk: --cache {cache}: {store.lost} runs were not kept: {store.lost_why}", err=True)


def opened_store(cache: Path | None) -> CellStore | None:
    """Where runs are kept; ends the command for a folder that can not be used."""
    from muxk.client.cell_store import CellStore, StoreError, code_version

    try:
        return None if cache is None else CellStore(cache, code_version())
    except StoreError as error:
        die(f"--cache {error}", USAGE)


class _Lines:
    """Where there is no terminal: a line now and then."""

    def __init__(self) -> None:
        self._said_s = monotonic()

    def print(self, text: str) -> None:
        typer.echo(text, err=True)

    def ran(self, left: Left, cell: Cell) -> None:
        if left.runs and monotonic() - self._said_s >= LINE_EVERY_S:
            self._said_s = monotonic()
            self.print(left_in_words(left))

    def close(self) -> None:
        pass


class _Bar:
    """On a terminal."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._runs = 0

    def _started(self) -> tuple[Progress, TaskID]:
        if self._bars is None or self._task is None:
            from rich.progress import BarColumn, Progress, TimeElapsedColumn

            columns = (described_tasks(), BarColumn(bar_width=20), TimeElapsedColumn())
            self._bars = Progress(*columns, console=error_console(), transient=True)
            self._task = self._bars.add_task("first runs", total=None)
            self._bars.start()
        return self._bars, self._task

    def print(self, text: str) -> None:
        bars, _ = self._started()
        bars.console.print(text, highlight=False)

    def ran(self, left: Left, cell: Cell) -> None:
        bars, task = self._started()
        self._runs += 1
        rate = "" if cell.rate is None else f" at {cell.rate:.3g}/s"
        latest = f"{cell.policy} on {cell.workload}{rate}"
        if len(latest) > LATEST_CHARACTERS:
            latest = f"…{latest[-LATEST_CHARACTERS:]}"
        total = left.done + left.runs or None
        text = left_in_words(left) if left.runs else f"{self._runs} runs"
        bars.update(task, total=total, completed=left.done, description=f"{text}; {latest}")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()


def left_in_words(left: Left) -> str:
    """`42 of about 120 runs, 3 min left`."""
    return f"{left.done} of about {left.done + left.runs} runs, {in_words(left.seconds)} left"


def in_words(seconds: float) -> str:
    """`40 s`, `3 min` or `2.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
