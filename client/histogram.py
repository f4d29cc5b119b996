"""Quantiles of times in bounded memory: a histogram with logarithmic bins.

Bins grow by the factor GROWTH; a quantile is off by at most RELATIVE_ERROR of its value (2.5 per mille), as
in DDSketch (Masson, Rim, Lee, VLDB 2019, section 2). Count, sum, least and largest value are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GROWTH = 1.005
RELATIVE_ERROR = (GROWTH - 1) / (GROWTH + 1)
LARGEST_NS = 1 << 60
"""36 years."""
BINS = math.ceil(math.log(LARGEST_NS) / math.log(GROWTH)) + 2
"""Bin 0 holds zeros, bin i > 0 the values in (GROWTH^(i-2), GROWTH^(i-1)]: 65 KB in all."""


class Histogram:
    """Whole numbers of ns, 0 or more. Keeps no values."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(BINS, np.int64)
        self.count = 0
        self.total = 0
        """Sum of all values."""
        self._squares = 0.0
        self.least = 0
        self.largest = 0

    def add(self, values: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Raises ValueError, and takes none, when a value is negative or over LARGEST_NS."""
        array = np.asarray(values, np.int64)
        if not array.size:
            return
        least, largest = int(array.min()), int(array.max())
        if least < 0 or largest > LARGEST_NS:
            raise ValueError(f"times from {least} to {largest} ns; they must be from 0 to {LARGEST_NS}")
        self._counts += np.bincount(_bins(array), minlength=BINS)
        self.least = min(self.least, least) if self.count else least
        self.largest = max(self.largest, largest)
        self.count += array.size
        # In halves, so that the sum of a large array stays exact.
        self.total += (int((array >> 32).sum()) << 32) + int((array & 0xFFFFFFFF).sum())
        self._squares += float(np.square(array.astype(np.float64)).sum())

    def merge(self, other: Histogram) -> None:
        """Take over all values of another one."""
        if not other.count:
            return
        self._counts += other._counts
        self.least = min(self.least, other.least) if self.count else other.least
        self.largest = max(self.largest, other.largest)
        self.count += other.count
        self.total += other.total
        self._squares += other._squares

    @property
    def mean(self) -> float:
        """0 without values."""
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation, of the values as a population; 0 without values."""
        return math.sqrt(max(0.0, self._squares / self.count - self.mean**2)) if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Interpolated between the two nearest ranks, as numpy does; 0 without values."""
        assert 0 <= share <= 1
        if not self.count:
            return 0.0
        rank = share * (self.count - 1)
        below = math.floor(rank)
        lower, upper = self._at_rank(below), self._at_rank(min(below + 1, self.count - 1))
        return lower + (upper - lower) * (rank - below)

    def _at_rank(self, rank: int) -> float:
        """The value that so many others come before."""
        if rank == 0:
            return float(self.least)
        if rank == self.count - 1:
            return float(self.largest)
        chosen = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        middle = 2 * GROWTH ** (chosen - 1) / (GROWTH + 1) if chosen else 0.0
        return min(max(middle, float(self.least)), float(self.largest))

    def bins(self) -> list[tuple[float, int]]:
        """(upper end in ns, values) of every bin that has some, ascending: for plots."""
        return [
            (GROWTH ** (bin_ - 1) if bin_ else 0.0, int(self._counts[bin_]))
            for bin_ in np.flatnonzero(self._counts).tolist()
        ]


def _bins(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    logarithms = np.log(np.maximum(values, 1)) / math.log(GROWTH)
    # Rounding must not lift a value that is a power of GROWTH into the next bin.
    found: npt.NDArray[np.int64] = np.ceil(logarithms - 1e-9).astype(np.int64) + 1
    return np.where(values == 0, 0, found)
