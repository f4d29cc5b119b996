"""Lanes that share bandwidth: who gets what, when jobs end, and that a plan made piece by piece holds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from muxk.kernel.bandwidth import Sharing, max_min, rates, rates_of_two
from muxk.kernel.timeline import Job, PhaseCost, Timeline

ALONE = Sharing(bandwidth=100.0, interference=0.0, slowdown_max=0.3)
DISTURBED = Sharing(bandwidth=100.0, interference=0.15, slowdown_max=0.2)
DEMANDS = some.floats(0.0, 200.0)
WAITS = some.floats(0.0, 1.0)


def job(
    job_id: int, lane: int, ns: float, demand: float, ready_ns: int = 0, after: tuple[int, ...] = ()
) -> Job:
    return Job(job_id, lane, (PhaseCost(ns, ns * demand),), ready_ns, ready_ns, after)


def bytes_moved(job: Job, begin_ns: int, end_ns: int) -> float:
    """What a finished job moved in an interval, by its log of rates."""
    assert job.end_ns is not None
    moved = 0.0
    for place, (ns, phase, _, rate) in enumerate(job.log):
        if phase < len(job.phases):
            until_ns = job.log[place + 1][0] if place + 1 < len(job.log) else job.end_ns
            inside_ns = min(until_ns, end_ns) - max(ns, begin_ns)
            cost = job.phases[phase]
            moved += max(0, inside_ns) * rate * cost.bytes / cost.ns
    return moved


def test_bandwidth_is_shared_max_min() -> None:
    assert max_min([30.0, 60.0], 100.0) == [30.0, 60.0]
    assert max_min([30.0, 90.0], 100.0) == [30.0, 70.0]
    assert max_min([80.0, 90.0], 100.0) == [50.0, 50.0]
    assert max_min([90.0, 10.0, 90.0], 100.0) == [45.0, 10.0, 45.0]


@given(some.lists(some.tuples(DEMANDS, WAITS), min_size=1, max_size=4), some.sampled_from([ALONE, DISTURBED]))
def test_no_share_exceeds_its_demand_nor_their_sum_the_bandwidth(
    lanes: list[tuple[float, float]], sharing: Sharing
) -> None:
    demands, waits = [demand for demand, _ in lanes], [wait for _, wait in lanes]
    found = rates(demands, waits, sharing)
    drawn = sum(demand * rate for demand, rate in zip(demands, found, strict=True))
    assert drawn <= sharing.bandwidth * (1 + 1e-9)
    assert all(0 < rate <= 1 for rate in found)


@given(DEMANDS, DEMANDS, WAITS, WAITS, some.sampled_from([ALONE, DISTURBED]))
def test_the_short_way_for_two_lanes_gives_what_the_general_one_does(
    first: float, second: float, one: float, two: float, sharing: Sharing
) -> None:
    short = rates_of_two(first, second, one, two, sharing)
    assert short == pytest.approx(rates([first, second], [one, two], sharing), rel=1e-9)


@given(some.floats(0.0, 100.0), some.floats(0.0, 100.0), WAITS)
def test_interference_alone_slows_down_by_no_more_than_its_bound(
    first: float, second: float, wait: float
) -> None:
    """The sharing itself may go further."""
    share, _ = max_min([first, second], 100.0)
    rate, _ = rates_of_two(first, second, wait, 1.0, Sharing(100.0, interference=5.0, slowdown_max=0.2))
    shared = first / share if share else 1.0
    assert 1 / rate <= max(shared, 1.2) * (1 + 1e-9)


def test_others_traffic_slows_down_who_waits_for_memory_and_hardly_who_computes() -> None:
    sharing = Sharing(100.0, interference=0.5, slowdown_max=1.0)
    memory, compute = (rates_of_two(10.0, 80.0, wait, 1.0, sharing)[0] for wait in (1.0, 0.15))
    assert 1 / memory == pytest.approx(1.4)
    assert 1 / compute < 1.01


def test_a_lane_slows_down_while_the_other_runs_and_catches_up_no_time() -> None:
    timeline = Timeline(ALONE, switch_ns=0)
    timeline.add(job(1, 0, ns=1000, demand=80.0), 0)
    changed = timeline.add(job(2, 1, ns=500, demand=80.0, ready_ns=200), 100)
    first, second = changed
    # From 200 on both get 50 of the 80 that they ask for: the second needs 800, the first has 800 left then.
    assert second.end_ns == 200 + 800
    assert first.end_ns == 200 + 800 + (1000 - 200 - 500)


def test_a_job_begins_when_its_lane_its_host_and_those_before_it_allow() -> None:
    timeline = Timeline(ALONE, switch_ns=7)
    timeline.add(job(1, 0, ns=100, demand=1.0), 0)
    timeline.add(job(2, 0, ns=100, demand=1.0), 0)
    [_, third] = timeline.add(job(3, 1, ns=10, demand=1.0, after=(1,)), 50)
    assert third.start_ns == 107, "the end of an item on another lane, and the switch"
    [fourth] = timeline.add(job(4, 1, ns=10, demand=1.0, ready_ns=400), 60)
    assert fourth.start_ns == 400


def test_a_job_does_not_end_before_the_host_has_launched_all_of_it() -> None:
    timeline = Timeline(ALONE, switch_ns=0)
    [only] = timeline.add(Job(1, 0, (PhaseCost(10.0, 0.0),), ready_ns=5, launched_ns=90), 0)
    assert (only.start_ns, only.end_ns) == (5, 90)


def test_jobs_that_ended_are_forgotten_and_no_longer_waited_for() -> None:
    timeline = Timeline(ALONE, switch_ns=5)
    timeline.add(job(1, 0, ns=100, demand=1.0), 0)
    assert timeline.forget(104) == []
    assert timeline.forget(105) == [1]
    [second] = timeline.add(job(2, 1, ns=10, demand=1.0, after=(1, 99)), 105)
    assert second.start_ns == 105


PHASES = some.lists(
    some.tuples(some.floats(1.0, 5000.0), some.floats(0.0, 300.0)).map(
        lambda p: PhaseCost(p[0], p[0] * p[1])
    ),
    min_size=1,
    max_size=3,
)
LAUNCHES = some.lists(
    some.tuples(some.integers(0, 2), PHASES, some.integers(0, 4000), some.integers(0, 3000), some.booleans()),
    min_size=1,
    max_size=12,
)


def planned(launches: list[tuple[int, list[PhaseCost], int, int, bool]], sharing: Sharing) -> dict[int, Job]:
    """Launch one after the other, as time goes on; the jobs as they were planned last."""
    timeline, jobs, now_ns, host_ns = Timeline(sharing, switch_ns=3), {}, 0, 0
    for job_id, (lane, phases, wait_ns, launch_ns, follows) in enumerate(launches):
        now_ns += wait_ns
        host_ns = max(now_ns, host_ns) + launch_ns
        after = (job_id - 1,) if follows and job_id else ()
        for changed in timeline.add(Job(job_id, lane, phases, host_ns, host_ns, after), now_ns):
            assert changed.end_ns is not None
            assert changed.end_ns >= now_ns, "what is past can not change"
            jobs[changed.job_id] = changed
    return jobs


@settings(max_examples=150, deadline=None)
@given(LAUNCHES, some.sampled_from([ALONE, DISTURBED]))
def test_bytes_moved_never_exceed_bandwidth_times_time(
    launches: list[tuple[int, list[PhaseCost], int, int, bool]], sharing: Sharing
) -> None:
    jobs = planned(launches, sharing).values()
    moments = sorted({mark[0] for job in jobs for mark in job.log} | {job.end_ns or 0 for job in jobs})
    for begin_ns, end_ns in itertools.pairwise(moments):
        moved = sum(bytes_moved(job, begin_ns, end_ns) for job in jobs)
        assert moved <= sharing.bandwidth * (end_ns - begin_ns) * (1 + 1e-6)
    for job in jobs:
        asked = sum(cost.bytes for cost in job.phases)
        # Ends are whole nanoseconds, so that each phase may move up to one more at its rate.
        assert bytes_moved(job, 0, moments[-1]) >= asked * (1 - 1e-6)
        assert job.end_ns is not None
        assert job.start_ns is not None
        assert job.end_ns - job.start_ns >= math.floor(sum(cost.ns for cost in job.phases))


@settings(max_examples=150, deadline=None)
@given(LAUNCHES)
def test_a_plan_that_was_mended_at_each_launch_is_the_one_made_with_all_known(
    launches: list[tuple[int, list[PhaseCost], int, int, bool]],
) -> None:
    """The same jobs, all known at time 0 with the host times they had, begin and end at the same moments."""
    mended = planned(launches, DISTURBED)
    whole = Timeline(DISTURBED, switch_ns=3)
    at_once: dict[int, Job] = {}
    for job_id, (lane, phases, _, _, follows) in enumerate(launches):
        after = (job_id - 1,) if follows and job_id else ()
        ready_ns = mended[job_id].ready_ns
        for changed in whole.add(Job(job_id, lane, phases, ready_ns, ready_ns, after), 0):
            at_once[changed.job_id] = changed
    spans = {job_id: (job.start_ns, job.end_ns) for job_id, job in mended.items()}
    assert spans == {job_id: (job.start_ns, job.end_ns) for job_id, job in at_once.items()}


@given(LAUNCHES, LAUNCHES)
@settings(max_examples=60, deadline=None)
def test_lanes_never_run_two_jobs_at_once(
    launches: list[tuple[int, list[PhaseCost], int, int, bool]],
    more: list[tuple[int, list[PhaseCost], int, int, bool]],
) -> None:
    by_lane: dict[int, list[Job]] = {}
    for job in sorted(planned(launches + more, ALONE).values(), key=lambda job: job.job_id):
        by_lane.setdefault(job.lane, []).append(job)
    for jobs in by_lane.values():
        for earlier, later in itertools.pairwise(jobs):
            assert earlier.end_ns is not None
            assert later.start_ns is not None
            assert earlier.end_ns <= later.start_ns
