"""The ledger of idle time by itself: each cause by hand, and random schedules against a plain count."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from muxk.kernel.idle import Cause, IdleLedger, IdleReport, combined
from muxk.kernel.idle_summary import bubble_sizes, idle_summary
from muxk.kernel.jobs import Flight, Load
from muxk.kernel.work import Phase, ProbeWork

UNITS = 12
PROBE = ProbeWork(1, Phase.DECODE, 1, 1, 1, 0)


@dataclass(frozen=True)
class Lane:
    name: str
    units: range


class Parked:
    """Of a prefill job only this matters here."""

    depth = 1


def flight(
    item_id: int, units: range, launched_ns: int, ready_ns: int = 0, phase: Phase = Phase.PREFILL, **more: Any
) -> Flight:
    made: dict[str, Any] = {
        "item_id": item_id,
        "lane": Lane(f"{units}", units),
        "phase": phase,
        "work": None,
        "layers": 1,
        "job": None,
        "load": Load(0, 0),
        "decode": None,
        "waits_for": (),
        "runnable_ns": launched_ns,
        "shared": False,
        "launched_ns": launched_ns,
        "ready_ns": ready_ns,
    }
    return Flight(**(made | more))


def unit_ns(report: IdleReport) -> dict[str, int]:
    """All that is not zero, idle and busy."""
    idle = {cause.value: bubbles.total_unit_ns for cause, bubbles in report.idle.items()}
    busy = {f"busy {kind.value}": ns for kind, ns in report.busy.items()}
    return {name: ns for name, ns in (idle | busy).items() if ns}


def exact(ledger: IdleLedger, now_ns: int) -> IdleReport:
    report = ledger.report(now_ns)
    assert report.booked_unit_ns == report.total_unit_ns
    return report


def test_time_before_an_item_is_without_work_then_its_launch_and_after_it_the_host() -> None:
    ledger = IdleLedger(UNITS)
    ledger.begin(100)
    first = flight(1, range(UNITS), 150, phase=Phase.DECODE)
    ledger.launched(first)
    ledger.ended(first, 170, 270, 300)
    ledger.explain([(UNITS, Cause.NO_WORK)], 300)
    assert unit_ns(exact(ledger, 400)) == {
        "no work": (50 + 100) * UNITS,
        "launch": 20 * UNITS,
        "host": 30 * UNITS,
        "busy decode": 100 * UNITS,
    }


def test_an_item_behind_another_lane_of_the_split_before_drains_it() -> None:
    ledger = IdleLedger(UNITS)
    old = flight(1, range(4), 0, phase=Phase.DECODE)
    ledger.launched(old)
    new = flight(2, range(UNITS), 10, ready_ns=500)
    ledger.launched(new)
    ledger.ended(old, 0, 500, 505)
    ledger.ended(new, 507, 600, 600)
    assert unit_ns(exact(ledger, 600)) == {
        "no work": 10 * 8,
        "drain": 490 * 8,
        "launch": 7 * UNITS,
        "busy decode": 500 * 4,
        "busy prefill": 93 * UNITS,
    }


def test_an_item_that_was_launched_late_behind_one_that_had_ended_is_the_hosts_delay() -> None:
    ledger = IdleLedger(UNITS)
    one, two = flight(1, range(UNITS), 0), flight(2, range(UNITS), 130)
    ledger.launched(one)
    ledger.launched(two)  # at 130, when the device has ended the first and the host does not know
    ledger.ended(one, 0, 100, 140)
    ledger.ended(two, 135, 200, 200)
    assert unit_ns(exact(ledger, 200)) == {
        "host": 30 * UNITS,
        "launch": 5 * UNITS,
        "busy prefill": (100 + 65) * UNITS,
    }


def test_the_first_item_of_a_batch_for_which_another_was_parked_waits_for_that() -> None:
    ledger = IdleLedger(UNITS)
    ledger.explain([(UNITS, Cause.PREEMPTION)], 0)
    first = flight(1, range(UNITS), 40, ready_ns=60, job=Parked(), begins_job=True)
    ledger.launched(first)
    ledger.ended(first, 70, 100, 100)
    second = flight(2, range(UNITS), 100, job=Parked())
    ledger.launched(second)
    ledger.ended(second, 110, 120, 120)
    found = unit_ns(exact(ledger, 120))
    assert found == {"preemption": 70 * UNITS, "launch": 10 * UNITS, "busy prefill": 40 * UNITS}


def test_units_of_a_lane_without_work_are_booked_while_the_other_one_runs() -> None:
    ledger = IdleLedger(UNITS)
    step = flight(1, range(4), 0, phase=Phase.DECODE)
    ledger.launched(step)
    ledger.explain([(4, Cause.HOST), (UNITS, Cause.OVER_RESERVED)], 0)
    ledger.ended(step, 0, 50, 50)
    ledger.explain([(UNITS, Cause.NO_WORK)], 50)
    report = exact(ledger, 80)
    assert unit_ns(report) == {"over-reservation": 50 * 8, "busy decode": 50 * 4, "no work": 30 * UNITS}
    assert report.idle[Cause.OVER_RESERVED].count == 1


def test_what_runs_now_is_neither_busy_nor_idle_yet() -> None:
    ledger = IdleLedger(UNITS)
    ledger.launched(flight(1, range(4), 0))
    ledger.explain([(4, Cause.HOST), (UNITS, Cause.OVER_RESERVED)], 0)
    report = exact(ledger, 30)
    assert report.open_unit_ns == 30 * 4
    assert unit_ns(report) == {"over-reservation": 30 * 8}


def test_a_bubble_of_a_whole_lane_is_one_though_its_units_come_from_two_lanes() -> None:
    ledger = IdleLedger(UNITS)
    halves = flight(1, range(6), 0), flight(2, range(6, UNITS), 0)
    for half in halves:
        ledger.launched(half)
    whole = flight(3, range(UNITS), 5)
    ledger.launched(whole)
    for half in halves:
        ledger.ended(half, 0, 100, 100)
    ledger.ended(whole, 100, 200, 220)
    ledger.explain([(UNITS, Cause.NO_WORK)], 220)
    again = flight(4, range(UNITS), 230)
    ledger.launched(again)
    ledger.ended(again, 230, 240, 240)
    report = exact(ledger, 240)
    assert [report.idle[cause].count for cause in (Cause.HOST, Cause.NO_WORK)] == [1, 1]


def test_times_of_a_device_whose_clock_runs_ahead_are_cut_to_what_is_possible() -> None:
    ledger = IdleLedger(UNITS)
    one, two = flight(1, range(UNITS), 0), flight(2, range(UNITS), 0)
    ledger.launched(one)
    ledger.launched(two)
    ledger.ended(one, 0, 130, 120)
    ledger.ended(two, 110, 150, 140)
    assert unit_ns(exact(ledger, 140)) == {"busy prefill": 140 * UNITS}


def test_sizes_of_bubbles_are_counted_by_powers_of_two() -> None:
    ledger = IdleLedger(1)
    at_ns = 0
    for item_id, gap_ns in enumerate([3, 900, 1000, 1 << 62], 1):
        one = flight(item_id, range(1), at_ns)
        ledger.launched(one)
        ledger.ended(one, at_ns + gap_ns, at_ns + gap_ns + 1, at_ns + gap_ns + 1)
        at_ns += gap_ns + 1
    report = exact(ledger, at_ns)
    launch = report.idle[Cause.LAUNCH]
    assert launch.count == 4
    assert launch.quantile_ns(0.25) == 4
    assert launch.quantile_ns(0.75) == 1024
    assert launch.unit_ns_below(1024) == 1903
    sizes = bubble_sizes(report)["launch"]
    assert [(row["below_us"], row["bubbles"]) for row in sizes[:2]] == [(0.004, 1), (1.024, 2)]


def test_a_later_report_less_an_earlier_one_is_what_came_between() -> None:
    ledger = IdleLedger(UNITS)
    earlier = ledger.report(70)
    step = flight(1, range(UNITS), 100)
    ledger.launched(step)
    ledger.ended(step, 110, 150, 150)
    between = ledger.report(150).minus(earlier)
    assert between.booked_unit_ns == between.total_unit_ns == 80 * UNITS
    assert unit_ns(between) == {
        "no work": 30 * UNITS,
        "launch": 10 * UNITS,
        "busy prefill": 40 * UNITS,
    }
    assert between.idle_share == pytest.approx(10 / 50)
    both = combined([between, between])
    assert both.booked_unit_ns == both.total_unit_ns == 2 * 80 * UNITS
    assert idle_summary(both)["causes"]["launch"]["bubbles"] == 2


# --- random schedules ---


@dataclass
class Unit:
    """One unit, told by itself: the same rules without pieces of units."""

    since_ns: int = 0
    cause: Cause = Cause.NO_WORK
    flights: list[int] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)

    def until(self, at_ns: int, what: str) -> None:
        self.found[what] += max(0, at_ns - self.since_ns)
        self.since_ns = max(self.since_ns, at_ns)


class EachUnit:
    """The ledger's methods, over units one by one."""

    def __init__(self) -> None:
        self.units = [Unit() for _ in range(UNITS)]

    def launched(self, one: Flight) -> None:
        for unit in [self.units[index] for index in one.lane.units]:
            if not unit.flights:
                unit.until(one.launched_ns, unit.cause.value)
            unit.flights.append(one.item_id)

    def ended(self, one: Flight, started_ns: int, ended_ns: int) -> None:
        for unit in [self.units[index] for index in one.lane.units]:
            unit.until(min(one.launched_ns, started_ns), "host")
            unit.until(min(one.ready_ns, started_ns), "drain")
            unit.until(started_ns, "launch")
            unit.until(ended_ns, "busy probe")
            unit.flights.remove(one.item_id)
            unit.cause = Cause.HOST

    def explain(self, regions: list[tuple[int, Cause]], now_ns: int) -> None:
        for index, unit in enumerate(self.units):
            if not unit.flights:
                unit.until(now_ns, unit.cause.value)
                unit.cause = next(cause for stop, cause in regions if index < stop)

    def total(self, now_ns: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for unit in self.units:
            if not unit.flights:
                unit.until(now_ns, unit.cause.value)
            found += unit.found
        return found


class RandomDevice:
    """Launches on random lanes and lets items end in an order that a device could have."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ledger, self.each = IdleLedger(UNITS), EachUnit()
        self.now_ns = 0
        self.flights: dict[int, Flight] = {}
        self.free_ns = [0] * UNITS
        self.next_item = 1

    def launch(self) -> None:
        first, stop = sorted(self.draw.sample(range(UNITS + 1), 2))
        older = [one for one in self.flights.values() if one.meets(range(first, stop))]
        waits_for = tuple(one.item_id for one in older)
        one = flight(self.next_item, range(first, stop), self.now_ns, work=PROBE, waits_for=waits_for)
        self.next_item += 1
        self.flights[one.item_id] = one
        self.ledger.launched(one)
        self.each.launched(one)

    def end(self) -> None:
        """One that waits for none in flight, at times that lie before now."""
        one = self.draw.choice(
            [one for one in self.flights.values() if self.flights.keys().isdisjoint(one.waits_for)]
        )
        del self.flights[one.item_id]
        units = one.lane.units
        least = max(one.launched_ns, *(self.free_ns[unit] for unit in units))
        started_ns, ended_ns = sorted(self.draw.randrange(least, self.now_ns + 1) for _ in range(2))
        for unit in units:
            self.free_ns[unit] = ended_ns
        self.ledger.ended(one, started_ns, ended_ns, self.now_ns)
        self.each.ended(one, started_ns, ended_ns)
        for other in self.flights.values():
            if one.item_id in other.waits_for:
                other.ready_ns = max(other.ready_ns, ended_ns)

    def explain(self) -> None:
        borders = sorted(self.draw.sample(range(1, UNITS), self.draw.randrange(3)))
        regions = [(stop, self.draw.choice(list(Cause))) for stop in (*borders, UNITS)]
        self.ledger.explain(regions, self.now_ns)
        self.each.explain(regions, self.now_ns)

    def step(self) -> None:
        self.now_ns += self.draw.choice([0, 1, 7, 300, 5000])
        if self.flights and self.draw.random() < 0.5:
            self.end()
        elif len(self.flights) < 6:
            self.launch()
        self.explain()


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_are_booked_as_if_each_unit_was_told_by_itself(seed: int) -> None:
    device = RandomDevice(seed)
    for _ in range(150):
        device.step()
        exact(device.ledger, device.now_ns)
    while device.flights:
        device.end()
        device.explain()
    report = exact(device.ledger, device.now_ns)
    assert report.open_unit_ns == 0
    assert unit_ns(report) == {name: ns for name, ns in device.each.total(device.now_ns).items() if ns}
    assert all(count >= 0 for bubbles in report.idle.values() for count in bubbles.counts)


def test_a_ledger_keeps_no_more_pieces_than_lanes_need() -> None:
    device = RandomDevice(99)
    for _ in range(300):
        device.step()
    pieces = device.ledger._pieces
    assert len(pieces) <= UNITS
    assert pieces[0].first == 0
    assert all(one.stop == two.first for one, two in pairwise(pieces))
    assert pieces[-1].stop == UNITS
