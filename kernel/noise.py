"""Noise on the times of a simulated device: a factor for each item, that depends on a seed and its number."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

WORD = (1 << 64) - 1
TWO_PI = 2.0 * math.pi
WORDS = float(WORD + 1)
BLOCK = 256
"""Items whose factors are found at once."""


class Noise:
    """Log-normal factors, by number."""

    def __init__(self, sigma: float, seed: int) -> None:
        """`seed` is a mixed one."""
        self._sigma, self._seed = sigma, seed
        self._first = 0
        self._factors: list[float] = []

    def factor(self, number: int) -> float:
        place = number - self._first
        if not 0 <= place < len(self._factors):
            deviates = normals(self._seed, range(number, number + BLOCK))
            sigma, exp = self._sigma, math.exp
            self._factors = [exp(sigma * deviate) for deviate in deviates]
            self._first, place = number, 0
        return self._factors[place]


def normals(seed: int, numbers: range) -> list[float]:
    """Standard normal deviates from a mixed seed and numbers (Box-Muller), the same in every process."""
    first = _mixed(np.arange(numbers.start, numbers.stop, dtype=np.uint64) ^ np.uint64(seed))
    second = _mixed(first + np.uint64(1))
    sqrt, log, cos, above = math.sqrt, math.log, math.cos, WORD + 2
    return [
        sqrt(-2.0 * log((one + 1) / above)) * cos(TWO_PI * other / WORDS)
        for one, other in zip(first.tolist(), second.tolist(), strict=True)
    ]


def mixed(value: int) -> int:
    """A 64-bit finaliser (splitmix64)."""
    [found] = _mixed(np.array([value & WORD], dtype=np.uint64)).tolist()
    return int(found)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
