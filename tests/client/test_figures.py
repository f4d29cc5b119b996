"""The figures of a phase, from made-up arrivals whose answers are known."""

from __future__ import annotations

import pytest
from muxk.client.figures import (
    distribution,
    gaps_ms,
    phase_figures,
    run_ratios,
    strict_goodput_tokens,
    time_per_token_ms,
    tokens_in,
    ttft_ms,
)
from muxk.client.records import LONG, SHORT, Phase, Record

MS = 1_000_000


def record(
    arrivals_ms: list[int],
    *,
    submitted_ms: int = 0,
    kind: str = SHORT,
    tokens: list[int] | None = None,
    ended_ms: int = 0,
) -> Record:
    return Record(
        kind,
        32,
        submitted_ms * MS,
        [at * MS for at in arrivals_ms],
        tokens or [1] * len(arrivals_ms),
        ended_ms * MS,
    )


def phase(start_ms: int, end_ms: int) -> Phase:
    return Phase("mixed", start_ms * MS, end_ms * MS)


def test_n_token_events_make_n_minus_one_gaps() -> None:
    assert gaps_ms(record([10, 20, 50]), phase(0, 100)) == [10.0, 30.0]
    assert gaps_ms(record([10]), phase(0, 100)) == []
    assert gaps_ms(record([]), phase(0, 100)) == []


def test_the_time_to_the_first_token_is_no_gap() -> None:
    assert gaps_ms(record([5000, 5010], submitted_ms=0), phase(0, 6000)) == [10.0]


def test_a_stall_over_the_border_belongs_to_the_phase_in_which_it_ends() -> None:
    stalled = record([90, 170, 180])
    assert gaps_ms(stalled, phase(0, 100)) == []
    assert gaps_ms(stalled, phase(100, 200)) == [80.0, 10.0]


def test_a_phase_holds_its_first_moment_and_not_its_end() -> None:
    at_borders = record([100, 150, 200])
    assert gaps_ms(at_borders, phase(100, 200)) == [50.0]
    assert tokens_in(at_borders, phase(100, 200)) == 2
    assert tokens_in(at_borders, phase(0, 100)) == 0


def test_percentiles_of_one_to_a_hundred_and_one_are_their_ranks() -> None:
    times = distribution([float(value) for value in range(1, 102)])
    assert (times.count, times.p50, times.p90, times.p99, times.max) == (101, 51.0, 91.0, 100.0, 101.0)
    assert times.mean == 51.0


def test_nothing_has_a_distribution_of_zeros() -> None:
    assert distribution([]).count == 0
    assert distribution([]).p99 == 0.0


def test_several_tokens_in_one_event_are_one_gap_and_all_of_the_output() -> None:
    bursts = record([10, 20, 40], tokens=[1, 3, 2])
    assert gaps_ms(bursts, phase(0, 100)) == [10.0, 20.0]
    assert tokens_in(bursts, phase(0, 100)) == 6


def test_an_event_without_tokens_is_not_recorded() -> None:
    text_only = Record(SHORT, 32, 0)
    text_only.arrived(10 * MS, 1)
    text_only.arrived(30 * MS, 0)
    text_only.arrived(40 * MS, 1)
    assert gaps_ms(text_only, phase(0, 100)) == [30.0]


def test_ttft_counts_requests_submitted_and_answered_in_the_phase() -> None:
    records = [
        record([130, 140], submitted_ms=100),
        record([110], submitted_ms=90),
        record([210], submitted_ms=190),
        record([], submitted_ms=150),
    ]
    assert ttft_ms(records, phase(100, 200)) == [30.0]


def test_one_gap_over_the_slo_takes_all_tokens_of_its_request_out_of_the_goodput() -> None:
    good, late = record([0, 100, 200]), record([0, 101, 200])
    assert strict_goodput_tokens([good, late], phase(0, 1000), slo_ms=100.0) == 3
    assert strict_goodput_tokens([good, late], phase(0, 1000), slo_ms=101.0) == 6


def test_a_request_cut_at_the_end_counts_up_to_the_cut() -> None:
    cut = record([0, 50, 100, 400])
    assert strict_goodput_tokens([cut], phase(0, 200), slo_ms=100.0) == 3


def test_a_single_token_has_no_gap_to_miss() -> None:
    assert strict_goodput_tokens([record([10])], phase(0, 100), slo_ms=1.0) == 1


def test_time_per_token_divides_by_the_tokens_after_the_first() -> None:
    assert time_per_token_ms(record([0, 10, 40])) == 20.0
    assert time_per_token_ms(record([0, 30], tokens=[2, 3])) == 10.0
    assert time_per_token_ms(record([5])) == 0.0


def test_the_figures_of_a_phase_add_up() -> None:
    records = [
        record([1010, 1020, 1030], submitted_ms=1000, ended_ms=1031),
        record([1500, 1900], submitted_ms=1001, kind=LONG),
        record([], submitted_ms=1900, kind=LONG),
    ]
    figures = phase_figures(records, phase(1000, 2000), slo_ms=100.0)
    assert (figures.gaps.count, figures.gaps.max, figures.gaps_over_slo) == (3, 400.0, 1)
    assert figures.gaps_over_slo_share == pytest.approx(1 / 3)
    assert (figures.longs_sent, figures.longs_unanswered, figures.ttft_long.max) == (2, 1, 499.0)
    assert (figures.output_tokens, figures.output_tokens_per_s) == (5, 5.0)
    assert (figures.goodput_tokens_per_s, figures.goodput_share) == (3.0, 0.6)
    assert (figures.completed, figures.end_to_end.p50, figures.input_tokens) == (1, 31.0, 64)


def test_ratios_compare_the_mixed_phase_with_the_solo_step() -> None:
    solo = phase_figures([record(list(range(0, 1000, 20)))], phase(0, 1000), 100.0)
    mixed = phase_figures([record([0, 40, 140])], phase(0, 1000), 100.0)
    ratios = run_ratios(solo, mixed)
    assert solo.gaps.p50 == 20.0
    assert ratios.max_gap_to_solo_step == 5.0
    assert ratios.p99_gap_to_solo_step == pytest.approx((40 + 0.99 * 60) / 20)
    assert ratios.output_to_solo == pytest.approx(3 / 50)
    assert ratios.goodput_share == 1.0
