"""Quantiles of the histogram beside numpy's, which keeps every value."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from muxk.client.histogram import LARGEST_NS, RELATIVE_ERROR, Histogram

SHARES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
TOLERANCE = RELATIVE_ERROR * 1.001


def test_the_stated_error_is_a_quarter_of_a_per_cent() -> None:
    assert RELATIVE_ERROR <= 0.0025


@pytest.mark.parametrize(
    "draw",
    [
        lambda random: random.lognormal(17, 1.5, 200_000),
        lambda random: random.exponential(20e6, 200_000),
        lambda random: np.where(random.random(200_000) < 0.985, 2e7, 9e8) + random.random(200_000) * 1e5,
        lambda random: random.integers(0, 40, 200_000),
    ],
    ids=["log-normal", "exponential", "two peaks", "few nanoseconds"],
)
def test_quantiles_differ_from_numpys_by_the_stated_error_at_most(draw: object) -> None:
    assert callable(draw)
    values = np.asarray(draw(np.random.default_rng(1)), np.int64)
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    for share in SHARES:
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=TOLERANCE, abs=0)
    assert histogram.mean == pytest.approx(values.mean(), rel=1e-12)
    assert histogram.deviation == pytest.approx(values.std(), rel=1e-6)
    assert (histogram.least, histogram.largest) == (values.min(), values.max())


@given(st.lists(st.integers(0, LARGEST_NS), min_size=1, max_size=60), st.sampled_from(SHARES))
def test_any_values_at_all_have_quantiles_within_the_stated_error(values: list[int], share: float) -> None:
    histogram = Histogram()
    histogram.add(values)
    exact = float(np.quantile(np.array(values, np.float64), share))
    assert histogram.quantile(share) == pytest.approx(exact, rel=TOLERANCE, abs=0)
    assert histogram.total == sum(values)
    assert histogram.largest == max(values)


@given(st.lists(st.lists(st.integers(0, 10**12), max_size=20), max_size=5))
def test_merged_histograms_are_the_histogram_of_all_values(parts: list[list[int]]) -> None:
    merged, whole = Histogram(), Histogram()
    for part in parts:
        one = Histogram()
        one.add(part)
        merged.merge(one)
        whole.add(part)
    assert [merged.quantile(share) for share in SHARES] == [whole.quantile(share) for share in SHARES]
    assert (merged.count, merged.total, merged.bins()) == (whole.count, whole.total, whole.bins())


def test_powers_of_the_growth_are_in_the_bins_that_they_end() -> None:
    values = [round(1.005**power) for power in range(1500, 5000, 7)]
    for value in values:
        histogram = Histogram()
        histogram.add([value, value, value])
        [(upper, count)] = histogram.bins()
        assert count == 3
        assert upper / 1.0050001 <= value <= upper * 1.0000001


def test_nothing_has_quantiles_of_zero() -> None:
    assert Histogram().quantile(0.99) == 0.0
    assert Histogram().mean == 0.0


@pytest.mark.parametrize("bad", [-1, LARGEST_NS + 1])
def test_a_time_that_can_not_be_is_refused_and_nothing_is_counted(bad: int) -> None:
    histogram = Histogram()
    with pytest.raises(ValueError, match="they must be from 0 to"):
        histogram.add([5, bad])
    assert histogram.count == 0


def test_ten_million_values_take_the_memory_of_ten() -> None:
    histogram = Histogram()
    values = np.random.default_rng(0).integers(1, 10**9, 100_000)
    histogram.add(values)
    tracemalloc.start()
    for _ in range(100):
        histogram.add(values)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert histogram.count == 10_100_000
    assert kept < 200_000
