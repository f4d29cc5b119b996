"""Looking for the best params of a policy: each candidate in full, or by successive halving.

Successive halving (Karnin, Koren and Somekh, ICML 2013; Jamieson and Talwalkar, AISTATS 2016): all candidates
in short runs, the better third of them in runs three times as long, and so on; the last ones in full. A
candidate that is ahead in short runs may be behind in long ones, so the margin to those that were dropped is
shown with the runs it was found in.

What is best: the highest goodput, or the lowest P99 at a given rate. Ties go to the earlier candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

import msgspec
from muxk.client.cells import Cell, Outcome
from muxk.client.compare import ALL_AT_ONCE, SLOWER, START, Plan, nothing_completed, runs_of_searches
from muxk.client.experiments import CHECKED_BEYOND, CellFailed, Lab, Sought, around
from muxk.client.goodput import confidence
from muxk.client.param_grid import Settings
from muxk.client.tune_by import By

THIRD = 3
REQUESTS_MIN = 40
"""Of the shortest runs: with fewer a queue is not seen to grow."""


@dataclass(frozen=True)
class Tuning:
    """What is looked for."""

    cell: Cell
    """Without the params that are tried."""
    candidates: tuple[Settings, ...]
    by: By
    rate: float | None
    """For a P99; where a search for a goodput starts, else where all at once completes."""
    seeds: tuple[int, ...]
    tolerance: float
    halving: bool


@dataclass(frozen=True)
class Score:
    """What a candidate came to, in its longest runs."""

    settings: Settings
    value: float
    """Goodput in requests/s, or a P99 in ms; the mean over the seeds."""
    low: float
    high: float
    """95 % interval of the mean."""
    requests: int
    """Of each run."""
    error: str = ""
    """Why there is no value."""
    keeps_up: bool = True
    """The queue was stable in all runs; of a goodput it is."""

    def is_found(self, by: By) -> bool:
        """Not so where a run came to nothing, or no rate met the objectives."""
        return not self.error and not (by.is_goodput and self.value == 0)

    def rank(self, by: By) -> tuple[int, float]:
        """Less is better: a short P99 at a rate that is not kept up with is worth less than any that is."""
        value = -self.value if by.is_goodput else self.value
        return 2 if self.error else int(not self.keeps_up), value


@dataclass(frozen=True)
class Round:
    """How many candidates go on with how long runs."""

    candidates: int
    requests: int


def rounds(tuning: Tuning) -> list[Round]:
    """One for the whole grid; with halving from all in short runs to few in full ones."""
    full = tuning.cell.requests
    assert full is not None
    counts = [len(tuning.candidates)]
    while tuning.halving and counts[-1] > THIRD and full // THIRD ** len(counts) >= REQUESTS_MIN:
        counts.append(ceil(counts[-1] / THIRD))
    last = len(counts) - 1
    return [Round(count, full // THIRD ** (last - place)) for place, count in enumerate(counts)]


def tune(lab: Lab, tuning: Tuning, tell: Callable[[Plan], None] = lambda plan: None) -> list[Score]:
    """Best first; those that were dropped after those that went on.

    `tell` is called once, when it is known how long it takes.
    """
    alive = list(tuning.candidates)
    dropped: list[Score] = []
    planned = rounds(tuning)
    tell(_plan(lab, tuning, planned))
    for place, one in enumerate(planned):
        scores = _scores(lab, tuning, alive, one.requests)
        scores.sort(key=lambda score: score.rank(tuning.by))
        if place == len(planned) - 1:
            return [*scores, *dropped]
        going_on = planned[place + 1].candidates
        dropped = [*scores[going_on:], *dropped]
        kept = [score.settings for score in scores[:going_on]]
        alive = [settings for settings in alive if settings in kept]
    raise AssertionError("there is a last round")


def _plan(lab: Lab, tuning: Tuning, planned: Sequence[Round]) -> Plan:
    """From one run, of the first candidate, as the first round does it."""
    first = _cells(tuning, tuning.candidates[:1], planned[0].requests)[0]
    rate = ALL_AT_ONCE if tuning.rate is None else tuning.rate
    probe = lab.run([msgspec.structs.replace(first, rate=rate)])[0]
    searched = runs_of_searches(1, tuning.tolerance, CHECKED_BEYOND) if tuning.by.is_goodput else 0
    runs = [(searched or 1) * len(tuning.seeds) * one.candidates for one in planned]
    seconds = [probe.seconds * one.requests / planned[0].requests for one in planned]
    slower = SLOWER if searched else 1.0
    cells = [msgspec.structs.replace(tuning.cell, requests=one.requests) for one in planned]
    total_s = slower * sum(n * s for n, s in zip(runs, seconds, strict=True))
    return Plan(sum(runs), total_s / lab.jobs, tuple(zip(cells, runs, strict=True)))


def _scores(lab: Lab, tuning: Tuning, candidates: Sequence[Settings], requests: int) -> list[Score]:
    cells = _cells(tuning, candidates, requests)
    measure = _goodputs if tuning.by.is_goodput else _quantiles
    return measure(lab, tuning, candidates, cells)


def _cells(tuning: Tuning, candidates: Sequence[Settings], requests: int) -> list[Cell]:
    return [
        msgspec.structs.replace(
            tuning.cell, settings=(*tuning.cell.settings, *settings), requests=requests, rate=tuning.rate
        )
        for settings in candidates
    ]


def _goodputs(lab: Lab, tuning: Tuning, candidates: Sequence[Settings], cells: Sequence[Cell]) -> list[Score]:
    starts = [tuning.rate] * len(cells) if tuning.rate is not None else _starts(lab, cells)
    goal = tuning.by.goal
    sought = [
        Sought(cell, goal, around(start, tuning.tolerance), tuning.seeds)
        for cell, start in zip(cells, starts, strict=True)
        if start is not None
    ]
    found = iter(lab.goodputs(sought))
    scores = []
    for settings, cell, start in zip(candidates, cells, starts, strict=True):
        one = CellFailed(_probe_error(lab, cell)) if start is None else next(found)
        requests = cell.requests or 0
        if isinstance(one, CellFailed):
            scores.append(Score(settings, 0.0, 0.0, 0.0, requests, str(one)))
        else:
            scores.append(Score(settings, one.rate, one.low, one.high, requests))
    return scores


def _starts(lab: Lab, cells: Sequence[Cell]) -> list[float | None]:
    """A share of what completes when all come at once; None for a run that came to nothing."""
    return [
        None if _error_of(probe) else max(1e-3, probe.figures["request_throughput"] * START)
        for probe in _probes(lab, cells)
    ]


def _probes(lab: Lab, cells: Sequence[Cell]) -> list[Outcome]:
    return lab.run([msgspec.structs.replace(cell, rate=ALL_AT_ONCE) for cell in cells])


def _probe_error(lab: Lab, cell: Cell) -> str:
    return _error_of(_probes(lab, [cell])[0])


def _error_of(probe: Outcome) -> str:
    if probe.error:
        return probe.error
    return "" if probe.figures["request_throughput"] else nothing_completed(probe)


def _quantiles(
    lab: Lab, tuning: Tuning, candidates: Sequence[Settings], cells: Sequence[Cell]
) -> list[Score]:
    runs = iter(
        lab.run([msgspec.structs.replace(cell, seed=seed) for cell in cells for seed in tuning.seeds])
    )
    scores = []
    for settings, cell in zip(candidates, cells, strict=True):
        outcomes = [next(runs) for _ in tuning.seeds]
        error = next((outcome.error for outcome in outcomes if outcome.error), "")
        requests = cell.requests or 0
        if error:
            scores.append(Score(settings, 0.0, 0.0, 0.0, requests, error))
            continue
        values = [float(outcome.figures[tuning.by.figure]) for outcome in outcomes]
        spread = confidence(values)
        mean = fmean(values)
        keeps_up = all(outcome.figures["verdicts"]["stable"] for outcome in outcomes)
        low, high = max(0.0, mean - spread), mean + spread
        scores.append(Score(settings, mean, low, high, requests, keeps_up=keeps_up))
    return scores
