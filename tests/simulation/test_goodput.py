"""The search for the highest rate, on systems whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from muxk.client.goodput import T_975, Goodput, Limit, Search, goodput, search_rate
from muxk.client.traffic import WorkloadError

SEARCH = Search(start=4.0, lowest=0.1, highest=100.0, tolerance=0.02)


def up_to(limit: float) -> Callable[[float, int], bool]:
    return lambda rate, _seed: rate <= limit


@given(st.floats(0.1, 99.9))
def test_a_monotone_system_is_found_within_the_tolerance(limit: float) -> None:
    found = search_rate(up_to(limit), SEARCH, 0)
    assert found.limit is Limit.FOUND
    assert found.not_met is not None
    assert found.rate <= limit < found.not_met <= found.rate * 1.02
    assert found.met_above == ()
    assert len(found.runs) <= 20


def test_no_rate_is_run_twice_and_every_run_gets_the_seed() -> None:
    asked: list[tuple[float, int]] = []

    def run(rate: float, seed: int) -> bool:
        asked.append((rate, seed))
        return rate <= 7.7

    goodput(run, SEARCH, (3, 5))
    assert len({*asked}) == len(asked)
    assert {seed for _, seed in asked} == {3, 5}


def test_a_system_that_meets_everything_has_at_least_the_highest_rate() -> None:
    found = goodput(up_to(1e9), SEARCH, (0, 1))
    assert (found.rate, found.exact) == (100.0, False)
    assert found.seeds[0].limit is Limit.ABOVE_HIGHEST
    assert found.seeds[0].not_met is None


def test_a_system_that_meets_nothing_has_a_goodput_of_zero() -> None:
    found = goodput(up_to(0.0), SEARCH, (0,))
    assert (found.rate, found.low, found.high, found.exact) == (0.0, 0.0, 0.0, False)
    assert found.seeds[0].limit is Limit.BELOW_LOWEST
    assert found.seeds[0].not_met == 0.1


def test_an_island_that_is_met_above_the_answer_is_reported_and_changes_nothing() -> None:
    found = goodput(lambda rate, _seed: rate <= 5 or 5.8 <= rate <= 6.3, SEARCH, (0,))
    assert found.seeds[0].rate == pytest.approx(5, rel=0.02)
    assert found.seeds[0].met_above
    assert all(5.8 <= rate <= 6.3 for rate in found.seeds[0].met_above)
    assert not found.monotone


def test_a_hole_below_the_answer_lowers_it_to_the_hole() -> None:
    # Bisection from 4 goes up and settles at 10; a look further down finds the hole.
    found = goodput(lambda rate, _seed: rate <= 10 and not 8.1 <= rate <= 8.5, SEARCH, (0,))
    assert found.seeds[0].rate == pytest.approx(8.1, rel=0.021)
    assert found.seeds[0].rate < 8.1
    assert not found.monotone


@given(st.floats(0.2, 90.0), st.integers(0, 2**20))
def test_a_noisy_system_never_gets_more_than_the_lowest_rate_that_was_not_met(edge: float, salt: int) -> None:
    def run(rate: float, seed: int) -> bool:
        noise = np.random.default_rng((salt, seed, int(rate * 1e6))).normal(0, 0.2)
        return rate < edge * math.exp(noise)

    found = search_rate(run, SEARCH, 1)
    assert found == search_rate(run, SEARCH, 1)
    refused = [rate for rate, met in found.runs if not met]
    assert all(rate > found.rate for rate in refused)
    assert found.rate == 0 or (found.rate, True) in found.runs
    assert len(found.runs) <= SEARCH.runs_max


def test_a_search_whose_runs_are_spent_says_so_and_keeps_what_it_has() -> None:
    found = search_rate(up_to(50.0), Search(1.0, 0.1, 100.0, runs_max=5), 0)
    assert found.limit is Limit.RUNS_SPENT
    assert len(found.runs) == 5
    assert (found.rate, found.not_met) == (16.0, None)


def test_the_interval_is_students_t_over_the_seeds() -> None:
    limits = {0: 9.0, 1: 10.0, 2: 11.0}
    found = goodput(lambda rate, seed: rate <= limits[seed], SEARCH, (0, 1, 2))
    rates = [one.rate for one in found.seeds]
    assert found.rate == pytest.approx(10.0, rel=0.02)
    half = 4.303 * np.std(rates, ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == (pytest.approx(found.rate - half), pytest.approx(found.rate + half))
    assert found.exact
    assert found.monotone


def test_one_seed_has_no_interval_and_none_has_no_goodput() -> None:
    one: Goodput = goodput(up_to(10.0), SEARCH, (0,))
    assert one.low == one.rate == one.high
    with pytest.raises(WorkloadError, match="one seed at least"):
        goodput(up_to(10.0), SEARCH, ())


def test_the_table_of_t_is_the_distributions() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    exact = [stats.t.ppf(0.975, freedom) for freedom in range(1, len(T_975) + 1)]
    assert pytest.approx(exact, abs=6e-4) == T_975


@pytest.mark.parametrize(
    ("start", "lowest", "highest", "complaint"),
    [
        (0.0, 0.1, 10.0, "start rate is 0.0"),
        (1.0, float("nan"), 10.0, "lowest rate is nan"),
        (1.0, 0.1, float("inf"), "highest rate is inf"),
        (20.0, 0.1, 10.0, "the start must lie between the two"),
    ],
)
def test_a_search_over_rates_that_are_none_is_refused(
    start: float, lowest: float, highest: float, complaint: str
) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        Search(start, lowest, highest)


def test_a_tolerance_under_what_can_be_told_apart_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"tolerance of 1e-09; it must be 0\.0001 or more"):
        Search(1.0, 0.1, 10.0, tolerance=1e-9)
