"""How far a figure that is off moves with the assumed constants, one at a time, times 0.7 and times 1.3.

In two steps: what a constant does to the times of a system's items (`paper_effects.py`), and for those that
move them the goodput again. That search is narrow: from the goodput of the first seed in steps of 10 %, or of
the setting's tolerance where that is coarser, with the same seed. A system that a constant does not move
keeps its goodput.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from muxk.client.cells import Cell, Goal
from muxk.client.experiments import Lab, Sought
from muxk.client.goodput import Goodput, Search
from muxk.client.paper_effects import FACTORS, MATTERS, Subject, effects
from muxk.client.paper_rows import Setting, System

STEP = 1.1
TOLERANCE = 0.11
FAR = 3.0
"""Factor of the goodput beyond which a moved one is not looked for."""


@dataclass(frozen=True)
class Moved:
    """A system in a setting and what constants do to it."""

    subject: Subject
    effects: dict[str, float]
    """By constant: the largest part by which it moves an item's time."""
    rates: dict[tuple[str, float], float] = field(default_factory=dict)
    """Goodput by constant and factor, of those that matter."""

    def rate(self, constant: str, factor: float) -> float:
        return self.rates.get((constant, factor), self.subject.rate)


Makes = dict[tuple[Setting, System, str, float], Cell]


def subjects_moved(subjects: Sequence[Subject], constants: Sequence[str]) -> list[Moved]:
    """The first step."""
    return [Moved(subject, effects(subject, constants)) for subject in subjects]


def wanted(moved: Sequence[Moved]) -> Iterator[tuple[Moved, str, float]]:
    """What the second step runs, the constants that do most first."""
    all_of = ((one, constant) for one in moved for constant in one.effects)
    for one, constant in sorted(all_of, key=lambda each: -each[0].effects[each[1]]):
        if one.effects[constant] >= MATTERS:
            for factor in FACTORS:
                yield one, constant, factor


def run_moves(lab: Lab, cells: Sequence[tuple[Moved, str, float, Cell]], seed: int) -> None:
    """The second step; rates go into `Moved.rates`. A failed run leaves its rate out."""
    sought = [Sought(cell, Goal.STRICT, _narrow(one.subject), (seed,)) for one, _, _, cell in cells]
    for (one, constant, factor, _), goodput in zip(cells, lab.goodputs(sought), strict=True):
        if isinstance(goodput, Goodput):
            one.rates[constant, factor] = goodput.rate


def _narrow(subject: Subject) -> Search:
    rate, coarse = subject.rate, subject.setting.tolerance
    tolerance, step = max(TOLERANCE, coarse), max(STEP, 1.0 + coarse)
    return Search(rate, rate / FAR, rate * FAR, tolerance, checks=(), step=step)
