"""Philox4x32-10: random numbers that depend on a key and a counter, and on nothing else.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

Words = NDArray[np.uint64]
"""Holds 32-bit words in 64 bits, so that a product of two keeps its high half."""


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four random 32-bit words for each element of the counter and key arrays, all uint64[n]."""
    first, second, third, fourth = counter
    low, high = key
    for _ in range(ROUNDS):
        left, right = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first, second = (right >> HALF) ^ second ^ low, right & LOW
        third, fourth = (left >> HALF) ^ fourth ^ high, left & LOW
        low, high = (low + KEY_STEPS[0]) & LOW, (high + KEY_STEPS[1]) & LOW
    return first, second, third, fourth


def uniforms(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], choices: NDArray[np.uint32]
) -> NDArray[np.float64]:
    """One number in [0, 1) a row, from the row's seed, token position and choice: float64[rows].

    The key is the seed; the counter is (position, choice, 0, 0). 53 random bits.
    """
    zero = np.zeros(len(seeds), dtype=np.uint64)
    counter = (positions.astype(np.uint64) & LOW, choices.astype(np.uint64), zero, zero)
    first, second, _, _ = philox4x32(counter, (seeds & LOW, seeds >> HALF))
    bits = ((first << HALF) | second) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
