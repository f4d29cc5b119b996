"""Arrivals are the process that they say they are."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from muxk.client.arrivals import Arrivals
from muxk.client.traffic import WorkloadError


def gaps_s(arrivals: Arrivals, count: int) -> np.ndarray:
    times = np.array([0, *islice(arrivals.times_ns(), count)])
    return np.diff(times) / 1e9


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_gaps_follow_the_gamma_distribution_which_is_a_poisson_process_for_1(
    burstiness: float, seed: int
) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rate = 2.5
    gaps = gaps_s(Arrivals(rate, burstiness, seed), 20_000)
    exact = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, exact.cdf).pvalue > 0.01
    wrong = stats.gamma(burstiness * 1.1, scale=1 / (rate * burstiness * 1.1))
    assert stats.kstest(gaps, wrong.cdf).pvalue < 0.01


def test_gaps_are_independent_of_the_ones_before() -> None:
    gaps = gaps_s(Arrivals(1.0, seed=4), 20_000)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_the_mean_rate_is_the_one_asked_for_whatever_the_burstiness(
    burstiness: float, variation: float
) -> None:
    gaps = gaps_s(Arrivals(8.0, burstiness, 2), 50_000)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03)


def test_times_never_descend_and_the_same_seed_gives_the_same_ones() -> None:
    times = list(islice(Arrivals(1e6, 0.1, 5).times_ns(), 10_000))
    assert times == sorted(times)
    assert times == list(islice(Arrivals(1e6, 0.1, 5).times_ns(), 10_000))
    assert times != list(islice(Arrivals(1e6, 0.1, 6).times_ns(), 10_000))


@pytest.mark.parametrize("rate", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_with_what_would_be_right(rate: float) -> None:
    with pytest.raises(WorkloadError, match=r"rate is .*; it must be a finite number above 0"):
        Arrivals(rate)


def test_a_burstiness_of_zero_and_a_negative_seed_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"burstiness is 0\.0"):
        Arrivals(1.0, 0.0)
    with pytest.raises(WorkloadError, match="seed is -1; it must be 0 or more"):
        Arrivals(1.0, seed=-1)
