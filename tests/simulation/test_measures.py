"""Measures of made-up runs whose answers are known, and of random ones beside numpy on everything at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from muxk.client.histogram import RELATIVE_ERROR
from muxk.client.measures import FLUSH_REQUESTS, Measures, Objectives, Served
from muxk.client.traffic import WorkloadError

MS = 1_000_000


def served(arrival_ms: float, *tokens_ms: float, prompt: int = 100, completed: bool = True) -> Served:
    return Served(round(arrival_ms * MS), prompt, [round(at * MS) for at in tokens_ms], completed)


def measured(requests: Sequence[Served], objectives: Objectives = Objectives()) -> Measures:  # noqa: B008
    measures = Measures(objectives)
    for request in requests:
        measures.add(request)
    return measures


def steady(arrival_ms: float, ttft_ms: float, gap_ms: float, tokens: int, prompt: int = 100) -> Served:
    first = arrival_ms + ttft_ms
    return served(arrival_ms, *(first + gap_ms * token for token in range(tokens)), prompt=prompt)


def test_the_figures_of_two_requests_are_those_counted_by_hand() -> None:
    figures = measured([served(0, 100, 110, 150), served(1000, 1200, 1220)]).figures()
    assert figures["duration"] == pytest.approx(1.22)
    assert (figures["completed"], figures["failed"]) == (2, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (200, 5)
    assert figures["mean_ttft_ms"] == pytest.approx(150)
    assert figures["mean_itl_ms"] == pytest.approx((10 + 40 + 20) / 3)
    assert figures["max_itl_ms"] == 40
    assert figures["mean_tpot_ms"] == pytest.approx((25 + 20) / 2)
    assert figures["mean_e2el_ms"] == pytest.approx((150 + 220) / 2)
    assert figures["mean_max_gap_ms"] == pytest.approx(30)
    assert figures["request_throughput"] == pytest.approx(2 / 1.22)
    assert figures["output_throughput"] == pytest.approx(5 / 1.22)
    assert figures["total_token_throughput"] == pytest.approx(205 / 1.22)
    assert figures["request_goodput"] == pytest.approx(2 / 1.22)


def test_the_keys_are_those_that_scripts_read_from_vllm_bench_serve() -> None:
    figures = measured([steady(0, 10, 10, 5)]).figures()
    times = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
    wanted = {f"{kind}_{name}" for kind in ("mean", "median", "std", "p99") for name in times}
    wanted |= {"duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    wanted |= {"request_goodput", "output_throughput", "total_token_throughput"}
    assert wanted <= figures.keys()


def test_a_stall_that_the_mean_per_token_hides_fails_the_strict_objective() -> None:
    # One gap of 300 ms in 40: 2.5 % of the gaps, and a mean of 27 ms a token.
    tokens = [20.0 * token + (280 if token > 20 else 0) for token in range(41)]
    run = measured([served(1000 * n, *(1000 * n + 100 + at for at in tokens)) for n in range(50)])
    assert run.figures()["p99_tpot_ms"] < 30
    assert run.figures()["p99_itl_ms"] == pytest.approx(300, rel=RELATIVE_ERROR)
    assert run.totals.stalls == 50
    assert (run.judge().strict, run.judge().joint) == (False, True)


@pytest.mark.parametrize(("slow", "strict"), [(10, True), (11, False)])
def test_one_gap_in_a_hundred_may_be_over_the_slo_and_not_one_more(slow: int, strict: bool) -> None:
    gaps = [50.001] * slow + [50.0] * (1000 - slow)
    run = measured([served(0, 10, *(10 + np.cumsum(gaps))), *(served(n, n + 1) for n in range(100))])
    assert run.judge().gaps_over_share == slow / 1000
    assert run.judge().strict is strict


def test_gaps_are_pooled_over_requests_and_the_first_token_is_no_gap() -> None:
    run = measured([steady(0, 5000, 10, 100), served(0, 1)], Objectives(tbt_ms=20))
    assert run.totals.tbt.count == 99
    assert run.judge().gaps_over_share == 0


@pytest.mark.parametrize(("overload", "stable"), [(1.04, True), (1.06, False)])
def test_a_queue_is_stable_while_at_most_5_per_cent_of_the_requests_are_left_over(
    overload: float, stable: bool
) -> None:
    # A server that begins one request each 10 ms, and requests that come a little faster.
    rows = [steady(10 * n / overload, 10 * n * (1 - 1 / overload) + 1, 10, 2) for n in range(2000)]
    for order in (rows, rows[::-1], sorted(rows, key=lambda request: request.arrival_ns % 7919)):
        judged = measured(order).judge()
        assert judged.waiting_share == pytest.approx(1 - 1 / overload, rel=0.02)
        assert (judged.stable, judged.strict) == (stable, stable)


@pytest.mark.parametrize("requests", [10, 20, 200])
def test_what_a_server_that_keeps_up_has_under_way_is_no_queue_that_grows_in_short_runs_either(
    requests: int,
) -> None:
    # The last to come is 10 or 5 % of them, and with its prompt nearly all the tokens that wait then.
    rows = [steady(1000 * n, 100, 10, 2, prompt=100 + 20_000 * (n == requests - 1)) for n in range(requests)]
    judged = measured(rows).judge()
    assert judged.stable
    assert judged.waiting_share < 0.02


def test_one_burst_in_the_middle_that_was_served_is_no_queue_that_grows() -> None:
    burst = [steady(500, 50 + n, 10, 2) for n in range(60)]
    assert measured([*(steady(10 * n, 5, 10, 2) for n in range(140)), *burst]).judge().stable


def test_requests_that_all_come_at_once_are_no_load_that_a_server_keeps_up_with() -> None:
    judged = measured([steady(0, 10, 10, 2) for _ in range(100)]).judge()
    assert (judged.waiting_share, judged.stable) == (1.0, False)


def test_few_requests_with_most_of_the_tokens_make_an_unstable_queue() -> None:
    runs = [steady(10 * n, 5, 10, 2) for n in range(100)]
    runs.append(steady(700, 500, 10, 2, prompt=50_000))
    judged = measured(runs).judge()
    assert judged.waiting_share < 0.05
    assert judged.waiting_tokens_share > 0.8
    assert not judged.strict


def test_an_overload_with_perfect_gaps_does_not_pass_the_strict_objective() -> None:
    # Service at half the arrival rate: each decodes without a stall, the queue grows all the time.
    run = measured([steady(10 * n, 10 * n + 5, 10, 20) for n in range(500)])
    assert run.judge().gaps_over_share == 0
    assert run.judge().waiting_share == pytest.approx(0.5, abs=0.01)
    assert not run.judge().strict


@pytest.mark.parametrize("completed", [True, False])
def test_prompts_that_are_computed_at_once_and_then_held_back_are_a_queue_too(completed: bool) -> None:
    # Each has its first token after 5 ms. Decode takes one up each 20 ms, of those that come each 10 ms.
    rows = []
    for n in range(500):
        first, second = 10 * n + 5, 20 * n + 20
        rest = [second + 10 * token for token in range(400)] if completed or n < 250 else []
        rows.append(served(10 * n, first, *rest, completed=completed or n < 250))
    judged = measured(rows).judge()
    assert judged.gaps_over_share < 0.01
    assert judged.waiting_share == pytest.approx(0.5, abs=0.05)
    assert not judged.strict


def test_a_stall_of_all_that_passes_before_the_end_is_no_queue() -> None:
    # Half a second without a token for anybody, in a run of ten, once in 200 gaps.
    rows = [steady(10 * n, 5, 10, 2) for n in range(1000)]
    rows += [served(0, *(5 + 10 * n + 500 * (n > 500) for n in range(1000))) for _ in range(50)]
    judged = measured(rows).judge()
    assert judged.waiting_share < 0.01
    assert judged.strict


def test_requests_without_any_token_wait_and_meet_nothing() -> None:
    rows = [steady(n, 0.5, 10, 3) if n % 10 < 7 else served(n, completed=False) for n in range(1000)]
    run = measured(rows)
    judged = run.judge()
    assert judged.waiting_share == pytest.approx(0.3, abs=0.01)
    assert (judged.good_share, judged.joint, judged.strict) == (0.7, False, False)
    assert run.figures()["failed"] == 300


def test_the_ttft_slo_grows_with_the_prompt() -> None:
    short = steady(0, 1500, 10, 3, prompt=400)
    long = steady(0, 1500, 10, 3, prompt=600)
    assert measured([short]).judge().good_share == 0
    assert measured([long]).judge().good_share == 1
    assert measured([short], Objectives(ttft_ms=1100)).judge().good_share == 1


@pytest.mark.parametrize(("bad", "joint"), [(10, True), (11, False)])
def test_nine_in_ten_requests_must_meet_both_ttft_and_tpot(bad: int, joint: bool) -> None:
    slow_first = [steady(n, 9000, 10, 3) for n in range(bad // 2)]
    slow_after = [steady(n, 10, 60, 3) for n in range(bad - bad // 2)]
    fine = [steady(n, 10, 10, 3) for n in range(100 - bad)]
    assert measured([*fine, *slow_first, *slow_after]).judge().joint is joint


def test_a_request_that_was_cut_counts_its_gaps_and_no_completion() -> None:
    run = measured([steady(0, 10, 10, 5), served(0, 10, 500, completed=False)])
    figures = run.figures()
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (1, 1, 7)
    assert figures["max_itl_ms"] == 490
    assert figures["max_e2el_ms"] == 50
    assert figures["max_tpot_ms"] == 10


def test_an_empty_run_meets_nothing_and_has_figures_of_zero() -> None:
    run = measured([])
    assert (run.judge().strict, run.judge().joint) == (False, False)
    assert {*run.figures().values()} == {0}


def test_times_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="times must ascend"):
        Measures().add(served(10, 5))
    with pytest.raises(ValueError, match="times must ascend"):
        Measures().add(served(0, 5, 4))
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        Measures().add(served(0, 5, prompt=0))
    with pytest.raises(WorkloadError, match="TBT SLO is 0"):
        Objectives(tbt_ms=0)


runs_of_requests = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(1, 3000),
        st.lists(st.integers(0, 400), min_size=1, max_size=8),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


def within(request: Served, start_ns: int, end_ns: int) -> int:
    """For how long it waited for a token in a window, in ns: for its first, in stalls, or for good."""
    times = list(request.token_ns)
    waits = [(request.arrival_ns, times[0])]
    waits += [(since, until) for since, until in pairwise(times) if until - since > 4 * 50 * MS]
    waits += [] if request.completed else [(times[-1], end_ns)]
    return sum(max(0, min(end_ns, until) - max(start_ns, since)) for since, until in waits)


@given(runs_of_requests, st.integers(0, 1000))
def test_streaming_says_what_numpy_says_on_everything_at_once(
    drawn: list[tuple[int, int, list[int], bool]], shuffle: int
) -> None:
    requests = [
        served(arrival, *(arrival + np.cumsum(steps)), prompt=prompt, completed=done)
        for arrival, prompt, steps, done in drawn
    ]
    order = np.random.default_rng(shuffle).permutation(len(requests))
    run = measured([requests[index] for index in order])
    judged, figures = run.judge(), run.figures()
    gaps = np.concatenate([np.diff(r.token_ns) for r in requests]) / MS
    last = max(r.arrival_ns for r in requests)
    window_ns = (last - min(r.arrival_ns for r in requests)) // 4
    for share, load in (
        (judged.waiting_share, [1] * len(requests)),
        (judged.waiting_tokens_share, [r.prompt_tokens for r in requests]),
    ):
        waited = sum(one * within(r, last - window_ns, last) for r, one in zip(requests, load, strict=True))
        mean = waited / window_ns / sum(load) / (7 / 8) if window_ns else 1.0
        assert share == pytest.approx(min(1.0, mean), abs=0.04)
    assert judged.gaps_over_share == pytest.approx((gaps > 50).mean() if len(gaps) else 0)
    if len(gaps):
        expected = np.quantile(gaps, 0.99)
        assert figures["p99_itl_ms"] == pytest.approx(expected, rel=RELATIVE_ERROR * 1.001, abs=0)
    ttft = np.array([r.token_ns[0] - r.arrival_ns for r in requests]) / MS
    assert figures["mean_ttft_ms"] == pytest.approx(ttft.mean())
    tpot = [
        (r.token_ns[-1] - r.token_ns[0]) / MS / (len(r.token_ns) - 1)
        for r in requests
        if r.completed and len(r.token_ns) > 1
    ]
    assert figures["max_tpot_ms"] == pytest.approx(max(tpot, default=0), abs=1e-6)


def test_memory_does_not_grow_with_requests_that_end_in_order() -> None:
    run = Measures()

    def add(first: int, last: int) -> None:
        for number in range(first, last):
            run.add(steady(10 * number, 300, 10, 8))

    add(0, 10 * FLUSH_REQUESTS)
    tracemalloc.start()
    add(10 * FLUSH_REQUESTS, 17 * FLUSH_REQUESTS)
    kept, _ = tracemalloc.get_traced_memory()
    add(17 * FLUSH_REQUESTS, 24 * FLUSH_REQUESTS)
    later, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert abs(later - kept) < 100_000
    assert run.judge().strict
