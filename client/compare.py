"""Comparing policies: their goodput, and what they do at given rates, on the same requests.

Everybody gets the same requests at the same times, and is judged by the same objectives unless the policies
bring TBT SLOs of their own. Where no rate is given, three are taken from the first contender's goodput: what
a policy leaves idle differs between a light load and a full one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10

import msgspec
from muxk.client.cells import Cell, Goal, Outcome
from muxk.client.contenders import Contender
from muxk.client.experiments import CHECKED_BEYOND, CellFailed, Lab, Sought, around
from muxk.client.first_look import Cut, search_of
from muxk.client.goodput import Goodput, Search, runs_left

ALL_AT_ONCE = 1000.0
"""Requests a second that no server keeps up with: what it completes then shows where to search."""
START = 0.7
"""Of what is completed when all come at once: the first rate of a search."""
LOADS = (0.3, 0.6, 1.0)
"""Of the first contender's goodput: where figures are taken by default."""
SHARED_RUNS = 3
"""Of the search for one goal, about: those that the search for another makes too."""
SLOWER = 1.5
"""How much longer a run takes at the rates that are searched than with all at once, about: batches are
smaller. Only the first guess of the time rests on it."""


@dataclass(frozen=True)
class Study:
    """What is compared."""

    contenders: tuple[Contender, ...]
    workloads: tuple[str, ...]
    rates: tuple[float, ...]
    """Where figures are taken; none: at LOADS."""
    template: Cell
    """All that contenders share."""
    seeds: tuple[int, ...]
    goals: tuple[Goal, ...]
    tolerance: float
    quick: bool = False
    """It was asked for few and short runs: what it says is coarse, and it must say so."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """By workload: those whose runs are shorter than asked for, since their answers are long."""

    @property
    def checks(self) -> tuple[float, ...]:
        """Where searches look beyond their answers."""
        return () if self.quick else CHECKED_BEYOND

    def cell(self, contender: Contender, workload: str) -> Cell:
        """The cell of a pair, without a rate."""
        cut = self.cuts.get(workload)
        return msgspec.structs.replace(
            self.template,
            requests=self.template.requests if cut is None else cut.requests,
            policy=contender.policy,
            settings=contender.settings,
            device=contender.device,
            workload=workload,
        )


@dataclass
class AtRate:
    """What one contender did at one rate, with each seed."""

    rate: float
    outcomes: list[Outcome]

    @property
    def error(self) -> str:
        """Of the first run that came to nothing."""
        return next((outcome.error for outcome in self.outcomes if outcome.error), "")


@dataclass
class Entry:
    """One contender on one workload."""

    contender: Contender
    workload: str
    cell: Cell
    error: str = ""
    """Why there is nothing else here."""
    capacity: float = 0.0
    """Requests a second that it completes when all come at once."""
    answer_s: float = 0.0
    """How long a request takes then, on average."""
    goodputs: dict[Goal, Goodput | CellFailed] = field(default_factory=dict)
    at: list[AtRate] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How much is still to do."""

    runs: int
    seconds: float
    """About, with the processes there are."""
    work: tuple[tuple[Cell, int], ...] = ()
    """How many of the runs are of which cell, at whatever rate and seed."""


def compare(lab: Lab, study: Study, tell: Callable[[Plan], None] = lambda plan: None) -> list[Entry]:
    """Entries by workload, then by contender. `tell` is called once, when it is known how long it takes."""
    entries = [
        Entry(contender, workload, study.cell(contender, workload))
        for workload in study.workloads
        for contender in study.contenders
    ]
    probes = _probe(lab, entries)
    tell(_plan(study, entries, probes, lab.jobs))
    alive = [entry for entry in entries if not entry.error]
    _search(lab, study, alive)
    _measure(lab, study, entries)
    return entries


def _probe(lab: Lab, entries: Sequence[Entry]) -> list[Outcome]:
    """Everything at once, to see what works, how fast it is and how long a run takes."""
    probes = lab.run([msgspec.structs.replace(entry.cell, rate=ALL_AT_ONCE) for entry in entries])
    for entry, probe in zip(entries, probes, strict=True):
        entry.error = probe.error
        if probe.error:
            continue
        entry.capacity = probe.figures["request_throughput"]
        entry.answer_s = probe.figures["mean_e2el_ms"] / 1000
        if not entry.capacity:
            entry.error = nothing_completed(probe)
    return [probe for entry, probe in zip(entries, probes, strict=True) if not entry.error]


def nothing_completed(outcome: Outcome) -> str:
    """Why a run that went through has no figures."""
    return f"it completed no request; the first was told: {outcome.figures['first_refusal']}"


def _plan(study: Study, entries: Sequence[Entry], probes: Sequence[Outcome], jobs: int) -> Plan:
    measured = len(study.seeds) * (len(study.rates) or len(LOADS))
    searched = len(study.seeds) * runs_of_searches(len(study.goals), study.tolerance, study.checks)
    # The search of a cut workload begins with its highest rate, which most meet, for all goals.
    at_once = len(study.seeds) * min(1, len(study.goals))
    alive = [entry for entry in entries if not entry.error]
    counts = [measured + (at_once if entry.workload in study.cuts else searched) for entry in alive]
    seconds = SLOWER * sum(n * probe.seconds for n, probe in zip(counts, probes, strict=True)) / jobs
    work = tuple((entry.cell, n) for entry, n in zip(alive, counts, strict=True))
    return Plan(sum(counts), seconds, work)


def runs_of_searches(goals: int, tolerance: float, checks: tuple[float, ...]) -> int:
    """About how many runs the searches for so many goals make together, with one seed."""
    one = runs_left({}, around(1.0, tolerance, checks))
    return one + max(1, one - SHARED_RUNS) * (goals - 1) if goals else 0


def _search(lab: Lab, study: Study, entries: Sequence[Entry]) -> None:
    pairs = [(entry, goal) for entry in entries for goal in study.goals]
    sought = [
        Sought(entry.cell, goal, _search_of(study, entry, entries), study.seeds) for entry, goal in pairs
    ]
    for (entry, goal), found in zip(pairs, lab.goodputs(sought), strict=True):
        entry.goodputs[goal] = found


def _search_of(study: Study, entry: Entry, entries: Sequence[Entry]) -> Search:
    cut = study.cuts.get(entry.workload)
    if cut is None:
        start = study.rates[0] if study.rates else entry.capacity * START
        return around(start, study.tolerance, study.checks)
    # The same rates for all: who is given higher ones would seem to carry more.
    first = next(other for other in entries if other.workload == entry.workload)
    return search_of(rounded(cut.requests / first.answer_s), study.rates, study.tolerance)


def _measure(lab: Lab, study: Study, entries: Sequence[Entry]) -> None:
    planned = [
        (entry, rate)
        for entry in entries
        if not entry.error
        for rate in study.rates or _loads([other for other in entries if other.workload == entry.workload])
    ]
    cells = [
        msgspec.structs.replace(entry.cell, rate=rate, seed=seed)
        for entry, rate in planned
        for seed in study.seeds
    ]
    outcomes = iter(lab.run(cells))
    for entry, rate in planned:
        entry.at.append(AtRate(rate, [next(outcomes) for _ in study.seeds]))


def _loads(entries: Sequence[Entry]) -> tuple[float, ...]:
    """Rates of a workload: shares of the goodput of the first contender that has one."""
    full = next((rate for entry in entries if (rate := _full(entry))), 1.0)
    return tuple(dict.fromkeys(rounded(share * full) for share in LOADS))


def _full(entry: Entry) -> float:
    for found in entry.goodputs.values():
        if isinstance(found, Goodput) and found.rate:
            return found.rate
    return entry.capacity * START


def rounded(rate: float) -> float:
    """To two digits, so that people can write it in a command."""
    return round(rate, 1 - floor(log10(rate))) if rate else 0.0
