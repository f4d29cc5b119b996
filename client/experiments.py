"""Studies of many runs: cells in parallel, and goodput by bisection over several seeds.

    with Lab(jobs=2) as lab:
        cell = Cell("muxwise", workload="toolagent", device="sim:a100,tp=8", tbt_ms=50.0)
        found = lab.goodput_of(cell, Goal.STRICT, Search(1.0, 0.01, 100.0), seeds=range(3))
        print(found.rate, found.low, found.high)

With a `CellStore` a study goes on where it was stopped. Results do not depend on `jobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
from muxk.client.cell_pool import CellPool, Store, Told, usable_cores
from muxk.client.cells import Cell, Goal, Outcome
from muxk.client.errors import ClientError
from muxk.client.forecast import Forecast
from muxk.client.goodput import Goodput, Search, SeedGoodput, combine, runs_left, search_rate

TOLERANCE = 0.03
"""Relative width of the last bracket of a search."""
FACTOR = 1024.0
CHECKED_BEYOND = (1.2, 1 / 1.2)
THREADS_MAX = 256
"""Searches that are under way at once; each waits for its runs."""


class CellFailed(ClientError):
    """A run that a study needs came to nothing: the text says why."""


@dataclass(frozen=True)
class Sought:
    """A goodput that is searched for. The cell's own rate and seed do not matter."""

    cell: Cell
    goal: Goal
    search: Search
    seeds: tuple[int, ...]


class Lab:
    """Runs cells and searches, several at once. Leaving it, by Ctrl-C too, ends everything it started."""

    def __init__(
        self, jobs: int | None = None, store: Store | None = None, told: Told = lambda cell, outcome: None
    ) -> None:
        """`jobs` None: one process for each core that may be used."""
        self._pool = CellPool(jobs or usable_cores(), store, told)
        self.forecast = Forecast(self._pool.jobs)
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="study")

    @property
    def jobs(self) -> int:
        return self._pool.jobs

    def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        """Outcomes in the order of the cells; one that failed says why in its place."""
        futures = [self._threads.submit(self._run, cell) for cell in cells]
        return [future.result() for future in futures]

    def _run(self, cell: Cell) -> Outcome:
        outcome = self._pool.run(cell)
        self.forecast.ran(cell, outcome.seconds)
        self.forecast.came(cell)
        return outcome

    def goodput_of(self, cell: Cell, goal: Goal, search: Search, seeds: Sequence[int]) -> Goodput:
        """The highest rate that meets the objectives. Raises CellFailed when a run came to nothing."""
        found = self.goodputs((Sought(cell, goal, search, tuple(seeds)),))[0]
        if isinstance(found, CellFailed):
            raise found
        return found

    def goodputs(self, sought: Sequence[Sought]) -> list[Goodput | CellFailed]:
        """Goodputs in the order in which they are asked for, with failures in their place."""
        for one in sought:
            for seed in one.seeds:
                self.forecast.search((one, seed), one.cell, runs_left({}, one.search))
        futures = [
            [self._threads.submit(self._search, one, seed) for seed in one.seeds]
            for one in sought  # all of them, before the first is waited for
        ]
        return [_combined(of_seeds) for of_seeds in futures]

    def _search(self, sought: Sought, seed: int) -> SeedGoodput:
        found: dict[float, bool] = {}

        def met(rate: float, seed: int) -> bool:
            cell = msgspec.structs.replace(sought.cell, rate=rate, seed=seed)
            outcome = self._pool.run(cell)
            self.forecast.ran(cell, outcome.seconds)
            if outcome.error:
                raise CellFailed(outcome.error)
            found[rate] = outcome.meets(sought.goal)
            self.forecast.search((sought, seed), sought.cell, runs_left(found, sought.search))
            return found[rate]

        try:
            return search_rate(met, sought.search, seed)
        finally:
            self.forecast.search((sought, seed), sought.cell, 0)

    def close(self) -> None:
        """End everything."""
        self._pool.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _combined(of_seeds: Sequence[Future[SeedGoodput]]) -> Goodput | CellFailed:
    try:
        return combine([future.result() for future in of_seeds])
    except CellFailed as error:
        return error


def around(rate: float, tolerance: float = TOLERANCE, checks: tuple[float, ...] = CHECKED_BEYOND) -> Search:
    """A search that starts at a rate, goes far from it both ways, and checks once beyond its answer."""
    return Search(rate, rate / FACTOR, rate * FACTOR, tolerance, checks=checks)
