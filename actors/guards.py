"""Guards: what a predicted decode step is multiplied by, so that whoever keeps within it keeps the SLO.

Guards are chosen by name (`spec.estimator.guard` of a policy). All of them learn from every item, so that a
policy swap changes the guard without a cold start; the one that is chosen makes the tables. To add one: a
class with the methods of `Guard`, a row in `GUARDS`, its name in `kernel/policy.py`, and what it does in
`policies/reference_prose.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import msgspec
from muxk.kernel.estimates import FACTOR_STEP, Contention, Estimates
from muxk.kernel.messages import ItemMeasured

WINDOW = 64
"""Completed items, for each number of units, that a quantile is taken over."""
GUARD_QUANTILE = 0.95
DRIFT_STEP = 1 / 32
"""In which all cells are raised together: fine enough, and no reason for new tables all the time."""


class Guard(Protocol):
    """One a device and name. `base` are tables of solo times, with all guards 1."""

    def learn(self, item: ItemMeasured, ratio: float) -> None:
        """Of a decode step: measured over predicted alone."""

    def tick(self) -> None:
        """Between two looks at the tables: forget, if it forgets."""

    def guarded(self, base: Estimates) -> Estimates:
        """The tables for policies: the very same as before where nothing changed."""

    def describe(self) -> dict[str, Any]:
        """For `muxk state`."""


class Windows:
    """The latest ratios of each number of units. They begin full of what is predicted, so that it takes more
    than a freak to move a quantile; what was not measured lately drifts back to that."""

    def __init__(self, units: tuple[int, ...]) -> None:
        self._ratios = {count: deque([1.0] * WINDOW, maxlen=WINDOW) for count in units}
        self._ordered = {count: [1.0] * WINDOW for count in units}
        """The same, sorted."""
        self._measured: dict[int, None] = {}
        self._others: dict[int, int] = {}
        """Of each window the ratios that are not 1, where there are any."""

    def add(self, units: int, ratio: float) -> None:
        if units in self._ratios:
            self._push(units, ratio)
            self._measured[units] = None

    def _push(self, units: int, ratio: float) -> None:
        ratios = self._ratios[units]
        oldest = ratios[0]
        ratios.append(ratio)
        if oldest == ratio:
            return
        ordered = self._ordered[units]
        del ordered[bisect_left(ordered, oldest)]
        insort(ordered, ratio)
        if oldest == 1.0:
            self._others[units] = self._others.get(units, 0) + 1
        elif ratio == 1.0:
            self._others[units] -= 1
            if not self._others[units]:
                del self._others[units]

    def forget(self) -> None:
        """A guard that keeps a policy from a number of units would otherwise never be tried again."""
        for units in [units for units in self._others if units not in self._measured]:
            self._push(units, 1.0)
        self._measured.clear()

    def quantile(self, units: int, share: float) -> float:
        """The smallest ratio that at least `share` of them do not exceed."""
        return self._ordered[units][_place(share)]

    def quantiles(self, share: float) -> list[float]:
        """That of each number of units, in their order."""
        place = _place(share)
        return [ordered[place] for ordered in self._ordered.values()]


def _place(share: float) -> int:
    """Of a quantile among the ratios of a window."""
    return min(int(share * WINDOW), WINDOW - 1)


class QuantileGuard:
    """`quantile`: for each number of units the ratio that nearly all recent steps kept, alone or beside a
    prefill. Needs no profile, follows the load, and forgets."""

    def __init__(self, base: Estimates) -> None:
        self._windows = Windows(tuple(model.units for model in base.decode))
        self._decode = base.decode
        """As it was last made."""
        self._made: tuple[Estimates, Estimates] | None = None
        """The last tables, and what they were made of beside the windows."""

    def learn(self, item: ItemMeasured, ratio: float) -> None:
        self._windows.add(item.units, ratio)

    def tick(self) -> None:
        self._windows.forget()

    def guarded(self, base: Estimates) -> Estimates:
        guards = self._windows.quantiles(GUARD_QUANTILE)
        if guards != [model.guard for model in self._decode]:
            self._made = None
            self._decode = tuple(
                model if model.guard == guard else msgspec.structs.replace(model, guard=guard)
                for model, guard in zip(self._decode, guards, strict=True)
            )
        if self._made is None or self._made[0] is not base:
            self._made = base, msgspec.structs.replace(base, decode=self._decode, contention=None)
        return self._made[1]

    def describe(self) -> dict[str, Any]:
        return {}


class WorstCaseGuard:
    """`worst_case`: MuxWise's guard. The largest slowdown of the cell, from a profile and raised since.

    A cell never shrinks. It is raised to what was exceeded twice, so that one freak (a process that was
    suspended) is not kept for ever. There are thousands of cells, and a device that is slower than its
    profile is slower in all of them: so the profile's factors of a number of units are raised together, too,
    while more than a few of the recent steps exceed them. Steps without a prefill beside them say nothing.
    """

    def __init__(self, table: Contention) -> None:
        self._table = table
        self._raised: dict[int, int] = {}
        """By place in the table: steps of FACTOR_STEP above 1."""
        self._seen: dict[int, float] = {}
        """By place: the largest ratio above the factor, which waits for a second one."""
        self._drift = Windows(table.units)
        """Measured over what the profile says of the cell."""
        self._made: tuple[list[int], dict[int, int]] = ([], {})
        """What the table below was made of: drifts, and `_raised`."""
        self._guarded = table
        self._tables: tuple[Estimates, Estimates] | None = None
        """The last ones, and what they were made of beside the table above."""

    def learn(self, item: ItemMeasured, ratio: float) -> None:
        table = self._table
        if item.beside is None or item.units not in table.units:
            return
        place = table.index(item.units, table.cell(item.rows, item.context_tokens, item.beside))
        profiled = table.factors[place]
        self._drift.add(item.units, ratio / _factor(profiled))
        if ratio <= _factor(self._raised.get(place, profiled)):
            return
        before = self._seen.get(place)
        self._seen[place] = ratio if before is None else max(before, ratio)
        if before is not None:
            self._raised[place] = max(self._raised.get(place, profiled), _steps(min(before, ratio)))

    def tick(self) -> None:
        self._drift.forget()

    def guarded(self, base: Estimates) -> Estimates:
        drifts = [self._drift_of(units) for units in self._table.units]
        if self._made != (drifts, self._raised):
            self._made = drifts, dict(self._raised)
            self._guarded = msgspec.structs.replace(self._table, factors=self._factors(drifts))
            self._tables = None
        if self._tables is None or self._tables[0] is not base:
            self._tables = base, msgspec.structs.replace(base, contention=self._guarded)
        return self._tables[1]

    def _factors(self, drifts: list[int]) -> bytes:
        table = self._table
        factors = bytearray()
        for number, drift in enumerate(drifts):
            own = table.factors[number * table.cells : (number + 1) * table.cells]
            factors += own.translate(_times(drift)) if drift else own
        for place, steps in self._raised.items():
            factors[place] = max(factors[place], steps)
        return bytes(factors)

    def _drift_of(self, units: int) -> int:
        """In steps of DRIFT_STEP above 1, by how much nearly all recent steps exceeded the profile."""
        drift = self._drift.quantile(units, GUARD_QUANTILE)
        return max(0, math.ceil((drift - 1.0) / DRIFT_STEP))

    def describe(self) -> dict[str, Any]:
        drifts = {units: self._drift_of(units) for units in self._table.units}
        return {
            "cells": len(self._table.factors),
            "raised": len(self._raised),
            "drift": {str(units): 1 + steps * DRIFT_STEP for units, steps in drifts.items() if steps},
        }


def _factor(steps: int) -> float:
    return 1.0 + steps * FACTOR_STEP


def _steps(factor: float) -> int:
    """As the table keeps it: not less, and bounded."""
    return min(255, max(0, math.ceil((factor - 1.0) / FACTOR_STEP - 1e-9)))


@cache
def _times(drift: int) -> bytes:
    """From the steps of a factor to those of it times a drift, for `bytes.translate`."""
    return bytes(_steps(_factor(steps) * (1.0 + drift * DRIFT_STEP)) for steps in range(256))


def _worst_case(base: Estimates) -> Guard | None:
    return None if base.contention is None else WorstCaseGuard(base.contention)


GUARDS: Mapping[str, Callable[[Estimates], Guard | None]] = {
    "quantile": QuantileGuard,
    "worst_case": _worst_case,
}
"""By name; None where the tables lack what it needs, and `quantile` takes its place."""
