"""Guards: what a predicted decode step is multiplied by, so that whoever keeps within it keeps the SLO.

Guards are chosen by name (`spec.estimator.guard` of a policy). All of them learn from every item, so that a
policy swap changes the guard without a cold start; the one that is chosen makes the tables. To add one: a
class with the methods of `Guard`, a row in `GUARDS`, its name in `kernel/policy.py`, and what it does in
`policies/reference_prose.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from muxk.kernel.estimates import FACTOR_MAX, FACTOR_STEP, Contention, Estimates
from muxk.kernel.messages import ItemMeasured

WINDOW = 64
"""Completed items, for each number of units, that a quantile is taken over."""
GUARD_QUANTILE = 0.95


class Guard(Protocol):
    """One a device and name. `base` are tables of solo times, with all guards 1."""

    def learn(self, item: ItemMeasured, ratio: float) -> None:
        """Of a decode step: measured over predicted alone."""

    def tick(self) -> None:
        """Between two looks at the tables: forget, if it forgets."""

    def guarded(self, base: Estimates) -> Estimates:
        """The tables for policies."""

    def describe(self) -> dict[str, Any]:
        """For `muxk state`."""


class Windows:
    """The latest ratios of each number of units. They begin full of what is predicted, so that it takes more
    than a freak to move a quantile; what was not measured lately drifts back to that."""

    def __init__(self, units: tuple[int, ...]) -> None:
        self._ratios = {count: deque([1.0] * WINDOW, maxlen=WINDOW) for count in units}
        self._measured: dict[int, None] = {}

    def add(self, units: int, ratio: float) -> None:
        if units in self._ratios:
            self._ratios[units].append(ratio)
            self._measured[units] = None

    def forget(self) -> None:
        """A guard that keeps a policy from a number of units would otherwise never be tried again."""
        for units, ratios in self._ratios.items():
            if units not in self._measured:
                ratios.append(1.0)
        self._measured.clear()

    def quantile(self, units: int, share: float) -> float:
        """The smallest ratio that at least `share` of them do not exceed."""
        ordered = sorted(self._ratios[units])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class QuantileGuard:
    """`quantile`: for each number of units the ratio that nearly all recent steps kept, alone or beside a
    prefill. Needs no profile, follows the load, and forgets."""

    def __init__(self, base: Estimates) -> None:
        self._windows = Windows(tuple(model.units for model in base.decode))

    def learn(self, item: ItemMeasured, ratio: float) -> None:
        self._windows.add(item.units, ratio)

    def tick(self) -> None:
        self._windows.forget()

    def guarded(self, base: Estimates) -> Estimates:
        decode = tuple(
            msgspec.structs.replace(model, guard=self._windows.quantile(model.units, GUARD_QUANTILE))
            for model in base.decode
        )
        return msgspec.structs.replace(base, decode=decode, contention=None)

    def describe(self) -> dict[str, Any]:
        return {}


class WorstCaseGuard:
    """`worst_case`: MuxWise's guard. The largest slowdown of the cell, from a profile and raised since.

    A factor never shrinks. It is raised to what was exceeded twice, so that one freak (a process that was
    suspended) is not kept for ever. Steps without a prefill beside them are taken as predicted.
    """

    def __init__(self, table: Contention) -> None:
        self._table = table
        self._factors = bytearray(table.factors)
        self._seen: dict[int, float] = {}
        """By place in the table: the largest ratio above the factor, which waits for a second one."""
        self._raised = 0

    def learn(self, item: ItemMeasured, ratio: float) -> None:
        table = self._table
        if item.beside is None or item.units >= table.units_total:
            return
        cell = table.cell(item.rows, item.context_tokens, item.beside)
        place = table.index(item.units, cell)
        if ratio <= 1.0 + self._factors[place] * FACTOR_STEP:
            return
        before = self._seen.get(place)
        self._seen[place] = ratio if before is None else max(before, ratio)
        if before is not None:
            self._raise(place, min(before, ratio))

    def _raise(self, place: int, ratio: float) -> None:
        steps = -(-(min(ratio, FACTOR_MAX) - 1.0) // FACTOR_STEP)
        raised = max(self._factors[place], min(255, int(steps)))
        self._raised += raised > self._factors[place]
        self._factors[place] = raised

    def tick(self) -> None:
        pass

    def guarded(self, base: Estimates) -> Estimates:
        table = msgspec.structs.replace(self._table, factors=bytes(self._factors))
        return msgspec.structs.replace(base, contention=table)

    def describe(self) -> dict[str, Any]:
        return {
            "cells": len(self._factors),
            "raised": self._raised,
            "largest_factor": round(1.0 + max(self._factors) * FACTOR_STEP, 3),
        }


def _worst_case(base: Estimates) -> Guard | None:
    return None if base.contention is None else WorstCaseGuard(base.contention)


GUARDS: Mapping[str, Callable[[Estimates], Guard | None]] = {
    "quantile": QuantileGuard,
    "worst_case": _worst_case,
}
"""By name; None where the tables lack what it needs, and `quantile` takes its place."""
