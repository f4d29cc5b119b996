"""When requests come: a Poisson process, or gamma gaps for traffic that is burstier or calmer than that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from muxk.client.traffic import WorkloadError

CHUNK = 4096
"""Gaps drawn at a time."""
RATE_MIN = 1e-6
"""Requests a second."""


@dataclass(frozen=True)
class Arrivals:
    """Gaps between arrivals are gamma distributed, with the mean 1 / `rate`.

    `burstiness` is the shape, as in `vllm bench serve`: 1 is a Poisson process, less is burstier (the gaps'
    coefficient of variation is 1 / sqrt(burstiness)), more is calmer.
    """

    rate: float
    """Requests a second."""
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        positive("burstiness", self.burstiness, "1 is a Poisson process")
        not_negative("seed", self.seed)

    def times_ns(self) -> Iterator[int]:
        """Endless, never descending, from the first gap after 0."""
        random = np.random.default_rng((self.seed, 0xA221))
        scale_ns = 1e9 / (self.rate * self.burstiness)
        base_ns = 0
        while True:
            within = (
                np.cumsum(random.gamma(self.burstiness, scale_ns, CHUNK)).round().astype(np.int64).tolist()
            )
            for offset in within:
                yield base_ns + offset
            base_ns += within[-1]


def check_rate(rate: float) -> None:
    """Raise a WorkloadError for a rate at which no run would end, or that is none."""
    positive("rate", rate, "requests a second")
    if rate < RATE_MIN:
        raise WorkloadError(
            f"rate is {rate!r}; it must be {RATE_MIN:g} requests a second or more, one in eleven days"
        )


def not_negative(name: str, value: int) -> None:
    """Raise a WorkloadError for a negative number."""
    if value < 0:
        raise WorkloadError(f"{name} is {value}; it must be 0 or more")


def positive(name: str, value: float, meaning: str) -> None:
    """Raise a WorkloadError unless the value is a finite number above 0."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise WorkloadError(f"{name} is {value!r}; it must be a finite number above 0 ({meaning})")
