"""Distributions of lengths, and draws from them that represent the distribution after a few hundred requests.

A length is a log-normal variable, truncated to [min, max] and rounded. Its spread `sigma` is chosen; its
location follows from the mean, which is solved for exactly. (Mean of a truncated log-normal: closed form over
the normal distribution's CDF, e.g. Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 1,
chapter 14.)

Draws are stratified: of every STRATUM successive draws, exactly one comes from each 1/STRATUM-th of the
distribution, in a random order. Each single draw has the full distribution; but the mean over a run, which
for heavy tails wanders by per cents after thousands of independent draws, stays at the distribution's. Runs
with different seeds then differ in order and company, which is what their confidence interval is to show, and
not in the load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from muxk.client.traffic import WorkloadError, mix

STRATUM = 1024
BLOCKS_KEPT = 512
"""Of STRATUM numbers each, in a `Draws`: 4 MiB."""
FIT_STEPS = 200
NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Log-normal token counts in [min, max] with a given mean."""

    min: int
    mean: float
    max: int
    sigma: float
    """Of the logarithm, before truncation."""

    def __post_init__(self) -> None:
        if not (0 < self.min < self.mean < self.max and self.sigma > 0):
            raise WorkloadError(
                f"lengths of {self.min} / {self.mean:g} / {self.max} tokens (min / mean / max) with sigma "
                f"{self.sigma:g}: it must hold that 0 < min < mean < max, and sigma > 0"
            )

    @cached_property
    def _ends(self) -> tuple[float, float]:
        """Half a token further out, so that rounding gives the ends their share."""
        return math.log(self.min - 0.5), math.log(self.max + 0.5)

    @cached_property
    def location(self) -> float:
        """Mean of the logarithm before truncation: the one with which the truncated mean is `mean`."""
        low, high = self._ends[0] - 6 * self.sigma, self._ends[1] + 6 * self.sigma
        for _ in range(FIT_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) < self.mean else (low, middle)
        if abs(self._mean_at(low) / self.mean - 1) > 1e-6:
            raise WorkloadError(
                f"no log-normal with sigma {self.sigma:g} on [{self.min}, {self.max}] has the mean "
                f"{self.mean:g}; a smaller sigma reaches means nearer to the ends"
            )
        return low

    def _mean_at(self, location: float) -> float:
        lower, upper = ((end - location) / self.sigma for end in self._ends)
        mass = NORMAL.cdf(upper) - NORMAL.cdf(lower)
        if mass <= 0.0:
            return math.exp(self._ends[0] if lower > 0 else self._ends[1])
        shifted = NORMAL.cdf(upper - self.sigma) - NORMAL.cdf(lower - self.sigma)
        return math.exp(location + self.sigma**2 / 2) * shifted / mass

    @cached_property
    def _masses(self) -> tuple[float, float]:
        lower, upper = (NORMAL.cdf((end - self.location) / self.sigma) for end in self._ends)
        return lower, upper

    def at(self, share: float) -> int:
        """The length below which this share of all lengths is; `share` in [0, 1)."""
        lower, upper = self._masses
        inside = min(max(lower + share * (upper - lower), 1e-300), 1 - 2**-53)
        drawn = round(math.exp(self.location + self.sigma * NORMAL.inv_cdf(inside)))
        return min(max(drawn, self.min), self.max)

    def mean_of(self, function: Callable[[int], float]) -> float:
        """The mean of a function of a length, over STRATUM lengths at the middle of their share."""
        return sum(function(self.at((step + 0.5) / STRATUM)) for step in range(STRATUM)) / STRATUM


class Draws:
    """Stratified numbers in [0, 1) by purpose and index; the same in whatever order they are asked for."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._block: Callable[[int, int], npt.NDArray[np.float64]] = lru_cache(BLOCKS_KEPT)(self._make_block)

    def at(self, purpose: int, index: int) -> float:
        """The number of the index-th draw for a purpose."""
        return float(self._block(purpose, index // STRATUM)[index % STRATUM])

    def _make_block(self, purpose: int, block: int) -> npt.NDArray[np.float64]:
        random = np.random.default_rng(mix(self._seed, purpose, block))
        return (random.permutation(STRATUM) + random.random(STRATUM)) / STRATUM
