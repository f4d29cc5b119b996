"""Quantiles of times that are kept as counts of bins; see `histogram.py` for how wide those are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from muxk.client.cells import Bins
from muxk.client.histogram import GROWTH
from muxk.client.measures import MS


def pooled(parts: Iterable[Bins]) -> Bins:
    """All values of several histograms."""
    counts: dict[float, int] = {}
    for part in parts:
        for end, values in part:
            counts[end] = counts.get(end, 0) + values
    return tuple(sorted(counts.items()))


def quantile_ms(bins: Bins, share: float) -> float:
    """The middle of the bin that holds the quantile, in ms; 0 without values."""
    total = sum(values for _, values in bins)
    rank = share * (total - 1)
    for (end, _), seen in zip(bins, accumulate(values for _, values in bins), strict=True):
        if seen > rank:
            return 2 * end / (GROWTH + 1) / MS
    return 0.0


def curve_ms(bins: Bins, shares: Sequence[float]) -> list[float]:
    """The quantile at each of the shares, which ascend."""
    return [quantile_ms(bins, share) for share in shares]
