"""From co-runs to the guard's table: the largest slowdown of each cell of five variables.

A cell lies between two levels of each variable, and was measured at its corners: its factor is the largest
of them. A corner that was not measured (it does not fit, or a probe failed) takes the largest of its measured
neighbours, again and again until all have one, so that what is not known is taken to be as bad as the worst
beside it. Units with nothing measured take UNKNOWN, the most that the paper saw on any card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from muxk.kernel.estimates import FACTOR_STEP, Contention, DecodeModel
from muxk.profiles.grid import Levels, Limits, Shape

UNKNOWN = 1.3
"""MuxWise section 3.3: decode slows down by at most 30 % (H100)."""

Table = npt.NDArray[np.float64]


def contention_of(
    measured: Mapping[Shape, float], models: Sequence[DecodeModel], limits: Limits, grid: Levels
) -> Contention | None:
    """The table of co-runs in ns; slowdowns are relative to what is predicted alone. None without splits."""
    if not limits.decode_units:
        return None
    solo = {model.units: model for model in models}
    sizes = (len(grid.new), len(grid.reused), len(grid.rows), len(grid.context))
    corners = np.full((len(limits.decode_units), *sizes), np.nan)
    for shape, ns in measured.items():
        place = _place(shape, limits, grid)
        if place is not None:
            alone_ns = solo[shape.units].solo_ns(shape.rows, shape.total_context)
            corners[place] = max(1.0, ns / alone_ns)
    filled = np.stack([_filled(table) for table in corners])
    steps = np.ceil((_cells(filled) - 1.0) / FACTOR_STEP - 1e-9)
    return Contention(
        grid.new,
        grid.reused,
        grid.rows,
        grid.context,
        limits.decode_units,
        limits.units,
        corners[0].size,
        np.clip(steps, 0, 255).astype(np.uint8).tobytes(),
    )


def _place(shape: Shape, limits: Limits, grid: Levels) -> tuple[int, ...] | None:
    """Where a co-run is in the table; None for a point of another grid."""
    contexts = [level for level in grid.context if max(1, level // shape.rows) == shape.context_tokens]
    try:
        return (
            limits.decode_units.index(shape.units),
            grid.new.index(shape.beside_new),
            grid.reused.index(shape.beside_reused),
            grid.rows.index(shape.rows),
            grid.context.index(contexts[-1]),
        )
    except (ValueError, IndexError):
        return None


def _filled(table: Table) -> Table:
    """Without holes."""
    if np.isnan(table).all():
        return np.full(table.shape, UNKNOWN)
    while np.isnan(table).any():
        low = np.where(np.isnan(table), 0.0, table)
        near = low
        for axis in range(table.ndim):
            near = np.maximum(near, _shifted(near, axis, 1))
            near = np.maximum(near, _shifted(near, axis, -1))
        table = np.where(np.isnan(table), np.where(near > 0.0, near, np.nan), table)
    return table


def _shifted(table: Table, axis: int, by: int) -> Table:
    """Each place gets the value of a neighbour; at the border 0."""
    shifted = np.roll(table, by, axis)
    border: list[slice | int] = [slice(None)] * table.ndim
    border[axis] = 0 if by > 0 else -1
    shifted[tuple(border)] = 0.0
    return shifted


def _cells(corners: Table) -> Table:
    """The largest corner of each cell; the first axis, the units, is no variable of a cell."""
    largest = corners
    for axis in range(1, corners.ndim):
        largest = np.maximum(largest, _shifted(largest, axis, 1))
    return largest
