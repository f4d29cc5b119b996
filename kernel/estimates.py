"""Immutable tables of predicted times, broadcast by the estimator and read by policies.

Two sources fill them. The few seconds of calibration at start give straight lines. A profile (`muxk profile`)
gives ramps, whose slope differs between ranges of load, and a table of how much a prefill beside it slows
a decode step. Every time is at least 0 and never falls when load grows; a ramp has no jump.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from muxk.kernel.work import PrefillShape

FACTOR_STEP = 1 / 64
"""In which slowdowns are kept."""


class Ramp(msgspec.Struct, frozen=True):
    """A continuous function of a load, made of straight pieces, that never falls; 0 at 0."""

    knots: tuple[float, ...]
    """Where pieces begin, ascending from 0."""
    values: tuple[float, ...]
    """In ns, at the knots."""
    slopes: tuple[float, ...]
    """In ns for each of the load, from each knot on."""

    def at(self, load: float) -> float:
        """In ns; `load` is at least 0."""
        knots = self.knots
        place = bisect_right(knots, load) - 1
        return self.values[place] + self.slopes[place] * (load - knots[place])


class DecodeModel(msgspec.Struct, frozen=True):
    """Solo decode step on a number of units: base + per_row * batch + per_context_token * context, in ns.

    The form of MuxWise's T_decode (section 3.3): th1 * sum(r) + th2 * bs + th3. A profile has ramps of both
    loads in place of the two slopes.
    """

    units: int
    base_ns: float
    per_row_ns: float
    per_context_token_ns: float
    guard: float
    """Upper quantile of measured / predicted, alone and beside a prefill; 1 where contention has its own
    table."""
    rows: Ramp | None = None
    context: Ramp | None = None

    def solo_ns(self, batch: int, context_tokens: int) -> float:
        rows, context = self.rows, self.context
        if rows is None or context is None:
            return self.base_ns + self.per_row_ns * batch + self.per_context_token_ns * context_tokens
        return self.base_ns + rows.at(batch) + context.at(context_tokens)

    def step_ns(self, batch: int, context_tokens: int) -> float:
        return self.solo_ns(batch, context_tokens) * self.guard


class PrefillModel(msgspec.Struct, frozen=True):
    """One prefill layer on a number of units: base + per_token * n + per_pair * pairs, in ns.

    The form of MuxWise's T_prefill (section 3.3), with sum(n^2) and sum(n*r) folded into the query-key
    pairs that causal attention computes. A profile has a ramp of the tokens in place of their slope, and
    what the tiles of matrix products add, which work on so many tokens at a time.
    """

    units: int
    base_ns: float
    per_token_ns: float
    per_pair_ns: float
    scale: float
    """Median of measured / predicted over recent items."""
    tokens: Ramp | None = None
    tiles: tuple[tuple[int, float], ...] = ()
    """(tokens of a tile, ns for each token of all tiles that were begun)."""

    def solo_ns(self, new_tokens: int, pairs: int) -> float:
        solo = self.base_ns + self.per_token_ns * new_tokens + self.per_pair_ns * pairs
        if self.tokens is not None:
            solo += self.tokens.at(new_tokens)
        for tile, per_token_ns in self.tiles:
            solo += per_token_ns * (-(-new_tokens // tile) * tile)
        return solo

    def layer_ns(self, new_tokens: int, pairs: int) -> float:
        return self.solo_ns(new_tokens, pairs) * self.scale


class Contention(msgspec.Struct, frozen=True):
    """How much slower a decode step is beside a prefill: a factor for each cell of five variables.

    MuxWise's guard (section 3.3): new and reused tokens of the prefill, batch and total context of the decode
    step, units of decode. A load is in the cell whose upper border is the first level that it does not
    exceed; one beyond all levels is in the last cell.
    """

    new_tokens: tuple[int, ...]
    reused_tokens: tuple[int, ...]
    batch: tuple[int, ...]
    context_tokens: tuple[int, ...]
    units: tuple[int, ...]
    """Of decode, ascending."""
    units_total: int
    """On all units of the device nothing runs beside a step."""
    cells: int
    """For each number of units."""
    factors: bytes
    """uint8[units, new, reused, batch, context]: steps of FACTOR_STEP above 1."""

    def cell(self, batch: int, context_tokens: int, beside: PrefillShape) -> int:
        """The cell of a load, the same on any units."""
        place = _cell(self.new_tokens, beside.new_tokens) * len(self.reused_tokens)
        place = (place + _cell(self.reused_tokens, beside.reused_tokens)) * len(self.batch)
        place = (place + _cell(self.batch, batch)) * len(self.context_tokens)
        return place + _cell(self.context_tokens, context_tokens)

    def index(self, units: int, cell: int) -> int:
        """Where the factor of a cell is; units between two measured ones have that of the fewer."""
        return max(0, bisect_right(self.units, units) - 1) * self.cells + cell

    def factor(self, units: int, cell: int) -> float:
        if units >= self.units_total:
            return 1.0
        place = bisect_right(self.units, units) - 1
        return 1.0 + self.factors[(place if place > 0 else 0) * self.cells + cell] * FACTOR_STEP


def _cell(levels: tuple[int, ...], load: int) -> int:
    return min(bisect_left(levels, load), len(levels) - 1)


class Estimates(msgspec.Struct, frozen=True):
    """The tables of one device and model; empty before the first measurement."""

    layers: int = 0
    decode: tuple[DecodeModel, ...] = ()
    """Ascending in units."""
    prefill: tuple[PrefillModel, ...] = ()
    """Ascending in units."""
    contention: Contention | None = None
    """Of a guard that looks at what runs beside a decode step."""

    @property
    def known(self) -> bool:
        """False on a cold start, before anything was measured."""
        return bool(self.decode) and bool(self.prefill)

    def decode_ns(
        self, units: int, batch: int, context_tokens: int, beside: PrefillShape | None = None
    ) -> float:
        """Guarded time of one decode step in ns, alone or beside a prefill.

        `units` must be at least 1 and the tables known.
        """
        return self.decode_in_cell_ns(units, batch, context_tokens, self.cell(batch, context_tokens, beside))

    def cell(self, batch: int, context_tokens: int, beside: PrefillShape | None) -> int | None:
        """Of the guard's table, for `decode_in_cell_ns`; None where it does not matter what runs beside."""
        if self.contention is None or beside is None:
            return None
        return self.contention.cell(batch, context_tokens, beside)

    def decode_in_cell_ns(self, units: int, batch: int, context_tokens: int, cell: int | None) -> float:
        """`decode_ns`, for who asks about many units: the cell is the same for all."""
        model = _nearest(self.decode, units)
        step_ns = model.solo_ns(batch, context_tokens) * model.guard
        if cell is None or self.contention is None:
            return step_ns
        return step_ns * self.contention.factor(units, cell)

    def decode_times_ns(
        self, units: Sequence[int], batch: int, context_tokens: int, cell: int | None
    ) -> list[float]:
        """`decode_in_cell_ns` on several numbers of units, ascending."""
        times_ns: list[float] = []
        models, place = self.decode, 0
        for wanted in units:
            while place + 1 < len(models) and models[place + 1].units <= wanted:
                place += 1
            step_ns = models[place].solo_ns(batch, context_tokens) * models[place].guard
            if cell is not None and self.contention is not None:
                step_ns *= self.contention.factor(wanted, cell)
            times_ns.append(step_ns)
        return times_ns

    def prefill_layer_ns(self, units: int, new_tokens: int, pairs: int) -> float:
        """Time of one prefill layer of a batch in ns; `units` must be at least 1 and the tables known."""
        return _nearest(self.prefill, units).layer_ns(new_tokens, pairs)


Model = TypeVar("Model", DecodeModel, PrefillModel)


def _nearest(models: tuple[Model, ...], units: int) -> Model:
    """The model for the largest measured unit count that is at most `units`, else the smallest."""
    found = models[0]
    for model in models:
        if model.units > units:
            break
        found = model
    return found
