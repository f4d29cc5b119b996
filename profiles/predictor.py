"""The predictor: solo times per number of units, from the features of MuxWise's estimator (section 3.3).

Prefill: query-key pairs (sums of n^2 and n*r), new tokens in ranges, and tokens rounded up to the tiles that
matrix products work on. Decode: batch size and total context, both in ranges. One fit over all numbers of
units: the coefficient of a feature on u units is the sum of the increments of all units from u on. With no
increment below 0 (NNLS) a time is never negative, never falls when load grows, and never rises when units
are added. A range adds its own slope to what came before it, so that no border has a jump.

The fit needs SciPy (`pip install 'muxk[profile]'`); what it makes is read without.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from muxk.kernel.estimates import DecodeModel, PrefillModel, Ramp

TOKEN_KNOTS = (128, 512, 2048, 8192)
"""New tokens of a prefill where a range ends."""
TILES = (64, 128, 256)
"""Tokens that GEMM kernels work on at a time: a started tile takes as long as a full one."""
ROW_KNOTS = (16, 32, *(knot for tile in range(64, 512, 64) for knot in (tile, tile + 1)))
"""Rows of a decode step where a range ends. The first row of a tile is one of its own: its step is real."""
CONTEXT_KNOTS = (2048, 8192, 32768, 131072)
"""Total context of a decode step where a range ends."""

LONG_TOKENS = 2048
SHORT_WEIGHT = 0.3
"""Of the error of a prefill of fewer tokens: it has too few features, and must not bend the rest."""

Features = npt.NDArray[np.float64]


class MissingSciPy(ImportError):
    """The text says what to install."""


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A measured decode step."""

    units: int
    rows: int
    context_tokens: int
    """Of all rows together."""
    ns: float


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A measured prefill, by layer."""

    units: int
    new_tokens: int
    pairs: int
    ns: float


def fit_decode(samples: Sequence[DecodeSample]) -> tuple[DecodeModel, ...]:
    """Ascending in units. Raises MissingSciPy."""
    units, coefficients = _fit(
        samples, lambda sample: decode_features(sample.rows, sample.context_tokens), [1.0] * len(samples)
    )
    split = 1 + len(ROW_KNOTS) + 1
    return tuple(
        DecodeModel(
            count,
            float(row[0]),
            0.0,
            0.0,
            guard=1.0,
            rows=_ramp(ROW_KNOTS, row[1:split]),
            context=_ramp(CONTEXT_KNOTS, row[split:]),
        )
        for count, row in zip(units, coefficients, strict=True)
    )


def fit_prefill(samples: Sequence[PrefillSample]) -> tuple[PrefillModel, ...]:
    """Ascending in units. Raises MissingSciPy."""
    weights = [1.0 if sample.new_tokens >= LONG_TOKENS else SHORT_WEIGHT for sample in samples]
    units, coefficients = _fit(
        samples, lambda sample: prefill_features(sample.new_tokens, sample.pairs), weights
    )
    split = 2 + len(TOKEN_KNOTS) + 1
    return tuple(
        PrefillModel(
            count,
            float(row[0]),
            0.0,
            float(row[1]),
            scale=1.0,
            tokens=_ramp(TOKEN_KNOTS, row[2:split]),
            tiles=tuple(
                (tile, float(value)) for tile, value in zip(TILES, row[split:], strict=True) if value
            ),
        )
        for count, row in zip(units, coefficients, strict=True)
    )


def decode_features(rows: int, context_tokens: int) -> list[float]:
    """1, the rows by range, the context by range."""
    return [1.0, *_by_range(rows, ROW_KNOTS), *_by_range(context_tokens, CONTEXT_KNOTS)]


def prefill_features(new_tokens: int, pairs: int) -> list[float]:
    """1, pairs, the tokens by range, the tokens of the tiles that were begun."""
    tiles = (float(-(-new_tokens // tile) * tile) for tile in TILES)
    return [1.0, float(pairs), *_by_range(new_tokens, TOKEN_KNOTS), *tiles]


def _by_range(load: float, knots: Sequence[int]) -> list[float]:
    """The part of a load that lies in each range; what is beyond the last knot is the last range's."""
    borders = (0.0, *knots, math.inf)
    return [min(max(load - low, 0.0), high - low) for low, high in pairwise(borders)]


def _ramp(knots: Sequence[int], slopes: Sequence[float]) -> Ramp:
    """From the slope of each range; neighbours of one slope are one piece."""
    borders = (0, *knots)
    kept, values, value = [0], [0.0], 0.0
    pieces = [float(slopes[0])]
    for place in range(1, len(borders)):
        value += float(slopes[place - 1]) * (borders[place] - borders[place - 1])
        if float(slopes[place]) != pieces[-1]:
            kept.append(borders[place])
            values.append(value)
            pieces.append(float(slopes[place]))
    return Ramp(tuple(float(knot) for knot in kept), tuple(values), tuple(pieces))


def _fit(
    samples: Sequence[Any], features: Callable[[Any], list[float]], weights: Sequence[float]
) -> tuple[list[int], Features]:
    """Units, ascending, and coefficients [units, features], by least squares of weighted relative errors."""
    assert samples, "something was measured"
    units = sorted({sample.units for sample in samples})
    rows = np.array([features(sample) for sample in samples]) / np.array([[s.ns] for s in samples])
    places = np.array([units.index(sample.units) for sample in samples])
    wide = (places[:, None] <= np.arange(len(units))[None, :])[:, :, None] * rows[:, None, :]
    weight = np.array(weights)
    matrix = wide.reshape(len(samples), -1) * weight[:, None]
    norms = np.sqrt((matrix**2).sum(axis=0))
    norms[norms == 0.0] = 1.0
    found = _nnls(matrix / norms, weight) / norms
    increments = found.reshape(len(units), -1)
    return units, np.cumsum(increments[::-1], axis=0)[::-1]


def check_scipy() -> None:
    """Before hours of measuring. Raises MissingSciPy."""
    if importlib.util.find_spec("scipy") is None:
        raise MissingSciPy("fitting a profile needs SciPy: pip install 'muxk[profile]'")


def _nnls(matrix: Features, wanted: Features) -> Features:
    check_scipy()
    optimize = importlib.import_module("scipy.optimize")
    solution: Features = optimize.nnls(matrix, wanted, maxiter=100 * matrix.shape[1])[0]
    return solution
