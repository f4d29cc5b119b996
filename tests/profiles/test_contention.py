"""The guard's table: the largest slowdown of a cell, and what stands where nothing was measured."""

from __future__ import annotations

import pytest
from muxk.kernel.estimates import Contention, DecodeModel
from muxk.kernel.work import Phase, PrefillShape
from muxk.profiles.contention import UNKNOWN, contention_of
from muxk.profiles.grid import Levels, Limits, Shape

LIMITS = Limits(16, (4, 12), (12, 4), 8, 1 << 20, 1 << 20, 1 << 20)
GRID = Levels((512, 2048), (0, 2048), (4, 8), (1024, 4096))
MODELS = (DecodeModel(4, 1000.0, 0.0, 0.0, 1.0), DecodeModel(12, 1000.0, 0.0, 0.0, 1.0))


def table_of(slowdowns: dict[Shape, float]) -> Contention:
    found = contention_of({s: 1000.0 * slowdown for s, slowdown in slowdowns.items()}, MODELS, LIMITS, GRID)
    assert found is not None
    return found


def co_run(units: int = 4, rows: int = 4, context: int = 1024, new: int = 512, reused: int = 0) -> Shape:
    beside = dict(zip(LIMITS.decode_units, LIMITS.prefill_units, strict=True))[units]
    return Shape(Phase.DECODE, units, rows, 1, context // rows, beside, new, reused)


def everywhere(slowdown: float) -> dict[Shape, float]:
    return {
        co_run(units, rows, context, new, reused): slowdown
        for units in LIMITS.decode_units
        for rows in GRID.rows
        for context in GRID.context
        for new in GRID.new
        for reused in GRID.reused
    }


def factor(table: Contention, units: int, rows: int, context: int, new: int, reused: int) -> float:
    return table.factor(units, table.cell(rows, context, PrefillShape(new, reused)))


def test_a_cell_has_the_largest_slowdown_of_its_corners_and_of_no_other() -> None:
    table = table_of(everywhere(1.0) | {co_run(context=1024, new=2048): 1.25})
    for context in (1024, 1025, 4096):
        assert factor(table, 4, 4, context, 2048, 0) == 1.25, "the corner bounds it"
    assert factor(table, 4, 4, 1024, 512, 0) == 1.0, "a smaller prefill is another cell"
    assert factor(table, 12, 4, 1024, 2048, 0) == 1.0, "so are other units"


def test_a_factor_is_never_below_the_slowdown_that_was_measured_nor_below_one() -> None:
    assert factor(table_of(everywhere(1.1)), 4, 4, 1024, 512, 0) == pytest.approx(1.1, abs=1 / 64)
    assert factor(table_of(everywhere(1.1)), 4, 4, 1024, 512, 0) >= 1.1
    assert factor(table_of(everywhere(0.7)), 4, 4, 1024, 512, 0) == 1.0


def test_what_was_not_measured_is_as_bad_as_the_worst_beside_it() -> None:
    slowdowns = everywhere(1.0) | {co_run(rows=8): 1.5}
    del slowdowns[co_run(rows=4)]
    assert factor(table_of(slowdowns), 4, 1, 100, 1, 0) == 1.5


def test_units_of_which_nothing_was_measured_take_the_most_of_the_paper() -> None:
    slowdowns = {shape: ratio for shape, ratio in everywhere(1.0).items() if shape.units != 12}
    assert factor(table_of(slowdowns), 12, 4, 1024, 512, 0) == pytest.approx(UNKNOWN, abs=1 / 64)


def test_loads_beyond_the_grid_are_in_its_last_cell_and_nothing_runs_beside_all_units() -> None:
    table = table_of(everywhere(1.0) | {co_run(12, 8, 4096, 2048, 2048): 1.75})
    assert factor(table, 12, 10_000, 10**7, 10**6, 10**6) == 1.75
    assert factor(table, 16, 10_000, 10**7, 10**6, 10**6) == 1.0


def test_a_device_without_splits_has_no_table() -> None:
    limits = Limits(1, (), (), 8, 1 << 20, 1 << 20, 1 << 20)
    assert contention_of({}, MODELS, limits, GRID) is None
