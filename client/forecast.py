"""How long a study still takes, learned from its runs as they end.

What is left is counted in runs: of each search as many as halvings and checks are still to do, and what is
planned for later. A run is taken to last as long as those of its kind did on average, and a second of such
runs to take as much time as it took so far: with several processes less, beside other work more, and of runs
that were kept from an earlier study nearly nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from muxk.client.cells import Cell

PRIOR_SHARE = 0.1
"""Of the first guess: how much of it weighs against what has been seen."""

Kind = tuple[str, str, str, int]
"""Runs that last about as long: of a policy on a device, of so many requests of a workload."""


def kind_of(cell: Cell) -> Kind:
    """The kind of a run, whatever its rate, seed and params."""
    return cell.policy, cell.device, cell.workload, cell.requests or 0


@dataclass(frozen=True)
class Left:
    """What is still to do."""

    done: int
    """Runs since the plan was made; those that searches share are counted in each."""
    runs: int
    seconds: float


class Forecast:
    """Threads share it. It reads no clock: whoever asks says what time it is, in seconds."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._seconds: dict[Kind, tuple[float, int]] = {}
        self._searches: dict[Hashable, tuple[Kind, int]] = {}
        self._later: dict[Kind, int] = {}
        """Of the plan: runs that no search has begun to make."""
        self._planned_at_s: float | None = None
        self._prior_s = 0.0
        self._done = 0
        self._done_s = 0.0
        """What the runs since the plan took together."""

    def plan(self, work: Sequence[tuple[Cell, int]], seconds: float, at_s: float) -> None:
        """How many runs of which cells there will be, and a first guess of all of it with one process."""
        with self._lock:
            self._planned_at_s, self._prior_s = at_s, PRIOR_SHARE * seconds
            for cell, runs in work:
                self._later[kind_of(cell)] = self._later.get(kind_of(cell), 0) + runs

    def search(self, key: Hashable, cell: Cell, runs: int) -> None:
        """So many runs are left of a search; none when it has ended. A new one takes its runs of the plan."""
        kind = kind_of(cell)
        with self._lock:
            if key not in self._searches:
                self._take(kind, runs)
            if runs:
                self._searches[key] = kind, runs
            else:
                self._searches.pop(key, None)

    def ran(self, cell: Cell, seconds: float) -> None:
        """A run ended, or was known already."""
        kind = kind_of(cell)
        with self._lock:
            total, count = self._seconds.get(kind, (0.0, 0))
            self._seconds[kind] = total + seconds, count + 1
            if self._planned_at_s is not None:
                self._done += 1
                self._done_s += seconds

    def came(self, cell: Cell) -> None:
        """A run that belongs to no search has ended."""
        with self._lock:
            self._take(kind_of(cell), 1)

    def _take(self, kind: Kind, runs: int) -> None:
        self._later[kind] = max(0, self._later.get(kind, 0) - runs)

    def left(self, at_s: float) -> Left:
        """What is still to do; nothing before there is a plan."""
        with self._lock:
            if self._planned_at_s is None:
                return Left(0, 0, 0.0)
            parts = [*self._searches.values(), *self._later.items()]
            work_s = sum(runs * self._run_s(kind) for kind, runs in parts)
            passed_s = max(0.0, at_s - self._planned_at_s)
            known_s = self._done_s + self._prior_s
            pace = (passed_s + self._prior_s / self._jobs) / known_s if known_s else 1.0
            return Left(self._done, sum(runs for _, runs in parts), work_s * pace)

    def _run_s(self, kind: Kind) -> float:
        """Of one run; of a kind that was not seen yet by its requests, as those of the others."""
        total, count = self._seconds.get(kind, (0.0, 0))
        if count:
            return total / count
        requests = sum(count * one[3] for one, (_, count) in self._seconds.items())
        seconds = sum(total for total, _ in self._seconds.values())
        return seconds * kind[3] / requests if requests else 0.0
