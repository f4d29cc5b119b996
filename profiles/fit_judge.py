"""Fitting one group of a simulated GPU's constants to rows of a table, and judging it on rows held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from muxk.profiles.fit_tables import Row, TableError
from muxk.profiles.gpu import GpuProfile, HeldOut

FITTED_ROWS_MAX = 3000
"""Of one operator: more make the fit slower and no better."""
SEED = 7
OUTLIER = 0.1
"""Relative error from which a row counts less: tables have outliers."""
NEGLIGIBLE = 1e-6
"""A number at its bound of 0."""

Numbers = Sequence[float]
Formula = Callable[[GpuProfile, Row], float]
Rebuild = Callable[[GpuProfile, Numbers], GpuProfile]


class Fit:
    """One group's fit: where its numbers live in a profile, their bounds, and the formula they enter."""

    def __init__(
        self, rebuild: Rebuild, formula: Formula, start: Numbers, low: Numbers, high: Numbers
    ) -> None:
        self.rebuild, self.formula = rebuild, formula
        self.start, self.low, self.high = start, low, high

    def errors(self, profile: GpuProfile, rows: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Logarithms of predicted over measured."""
        return np.log([self.formula(profile, row) / row.ns for row in rows])

    def run(self, profile: GpuProfile, rows: Sequence[Row]) -> GpuProfile:
        """Least squares of relative errors on a sample of the rows."""
        from scipy.optimize import least_squares

        picked = np.random.default_rng(SEED).permutation(len(rows))[:FITTED_ROWS_MAX]
        sample = [rows[index] for index in sorted(picked)]
        found = least_squares(
            lambda numbers: self.errors(self.rebuild(profile, numbers), sample),
            self.start,
            bounds=(self.low, self.high),
            x_scale=np.maximum(np.abs(self.start), 1e-3),
            loss="soft_l1",
            f_scale=OUTLIER,
        )
        return self.rebuild(profile, [_rounded(number) for number in found.x])


def _rounded(number: float) -> float:
    """Four digits: what a table of this kind can carry."""
    return float(f"{number:.4g}") if number > NEGLIGIBLE else 0.0


@dataclass(frozen=True)
class Judged:
    """Relative errors on rows that were held out, and of how many rows that were not."""

    operator: str
    table: str
    fitted_rows: int
    errors: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, profile: GpuProfile, fit: Fit, rows: Sequence[Row], table: str, fitted: int) -> Self:
        errors = np.abs(np.expm1(fit.errors(profile, rows)))
        return cls(rows[0].operator, table, fitted, errors)

    @property
    def held_out(self) -> HeldOut:
        median, p90 = (_rounded(float(np.quantile(self.errors, q))) for q in (0.5, 0.9))
        return HeldOut(self.operator, self.table, self.fitted_rows, len(self.errors), median, p90)


def pooled(name: str, judged: Sequence[Judged]) -> Judged:
    """A class of operators as one: each row counts alike. Raises TableError when there is no row to judge."""
    if not judged:
        raise TableError(f"{name}: the tables have no row that was held out")
    errors = np.concatenate([one.errors for one in judged])
    return Judged(name, judged[0].table, sum(one.fitted_rows for one in judged), errors)


@dataclass(frozen=True)
class Trial:
    """Whether constants are fitted before they are judged, or judged as they stand."""

    fits: bool = True

    def run(self, profile: GpuProfile, fit: Fit, rows: Sequence[Row]) -> GpuProfile:
        return fit.run(profile, rows) if self.fits else profile

    def fitted_and_judged(
        self, profile: GpuProfile, fit: Fit, rows: Sequence[Row], table: str
    ) -> tuple[GpuProfile, list[Judged]]:
        """Fit on the shapes that are not held out, then judge on those that are, operator by operator."""
        fitted = [row for row in rows if not row.held_out]
        profile = self.run(profile, fit, fitted)
        return profile, self.judged(profile, fit, rows, table, len(fitted))

    def judged(
        self, profile: GpuProfile, fit: Fit, rows: Sequence[Row], table: str, fitted: int
    ) -> list[Judged]:
        """On the rows that are held out; on all of them where none was `fitted`."""
        results = []
        for operator in dict.fromkeys(row.operator for row in rows):
            of_it = [row for row in rows if row.operator == operator]
            seen = [row for row in of_it if row.judged and (row.held_out or not fitted)]
            if seen:
                trained = sum(not row.held_out for row in of_it) if fitted else 0
                results.append(Judged.of(profile, fit, seen, table, trained))
        return results
