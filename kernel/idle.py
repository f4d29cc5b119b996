"""The ledger of a device's time: every unit at every moment is busy, or idle for one cause.

The arbiter tells it what was launched, what ended, and, after each turn, why units that nothing is launched
on are free (`kernel/idle_causes.py`). An item that ended brings the device's own times: what lies between
the end of the item before and its start was host time before its launch, a wait for items on other lanes,
or the launch itself. Nothing is computed as a remainder. A time for which no condition of ours held is
booked as unexplained. All in whole unit-nanoseconds, so that the sum is exact.
A bubble is a stretch of time and units with one cause. Their sizes are counted in powers of two, so that the
ledger's memory is bounded. What runs now is booked when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
from muxk.kernel.jobs import Flight
from muxk.kernel.steps_in_flight import StepsInFlight
from muxk.kernel.work import Phase, ProbeWork

BUCKETS = 48
"""Bucket i holds bubbles of 2^(i-1) ns up to 2^i ns; the last one also all that are longer (39 hours)."""


class Cause(StrEnum):
    """Why a unit had no kernel."""

    NO_WORK = "no work"
    """Nobody decodes, and no prompt waits that could start."""
    NO_PAGES = "no pages"
    """Prompts wait for KV pages."""
    LAUNCH = "launch"
    """Launched by the host, and not begun: launch costs, and what a switch costs on the device."""
    DRAIN = "drain"
    """Items of the split before still run: what comes next waits for them, or can not be moved from there."""
    MERGE = "merge wait"
    """A step is held for rows that come, or units wait for the rows of a prompt that runs."""
    OVER_RESERVED = "over-reservation"
    """The split keeps the unit for a phase that has nothing to do, and the other one has work."""
    UNASSIGNED = "unassigned"
    """The split gives the unit to no phase, and one has work."""
    PREEMPTION = "preemption"
    """From the parking of a batch to the first item of the one that it was parked for."""
    HOST = "host"
    """An item ended, and the host has not noticed, answered or decided yet."""
    UNEXPLAINED = "unexplained"
    """None of these conditions held: a gap in our account."""


class Busy(StrEnum):
    """What a unit did."""

    DECODE = "decode"
    PREFILL = "prefill"
    FUSED = "fused"
    PROBE = "probe"


HOST, DRAIN, LAUNCH, PREEMPTION = Cause.HOST, Cause.DRAIN, Cause.LAUNCH, Cause.PREEMPTION
BUSY_WITH: Mapping[Phase, Busy] = {Phase.DECODE: Busy.DECODE, Phase.PREFILL: Busy.PREFILL}


class Bubbles(msgspec.Struct, frozen=True):
    """The idle time of one cause."""

    counts: tuple[int, ...]
    """Bubbles by length, see `BUCKETS`."""
    unit_ns: tuple[int, ...]
    """Their length times their units, by length."""
    lasting_unit_ns: int = 0
    """Of bubbles that have not ended, which are not counted yet."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def total_unit_ns(self) -> int:
        return sum(self.unit_ns) + self.lasting_unit_ns

    def quantile_ns(self, share: float) -> int:
        """At least this share of the bubbles are shorter than this, a power of two."""
        wanted, seen = share * self.count, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return 1 << bucket
        return 0

    def unit_ns_below(self, ns: int) -> int:
        """Idle time in bubbles shorter than a power of two of ns."""
        return sum(self.unit_ns[: ns.bit_length()])

    def minus(self, earlier: Bubbles) -> Bubbles:
        """A bubble that lasted then is counted here, and its time before then taken off the sum."""
        return Bubbles(
            _each(int.__sub__, self.counts, earlier.counts),
            _each(int.__sub__, self.unit_ns, earlier.unit_ns),
            self.lasting_unit_ns - earlier.lasting_unit_ns,
        )

    def plus(self, other: Bubbles) -> Bubbles:
        return Bubbles(
            _each(int.__add__, self.counts, other.counts),
            _each(int.__add__, self.unit_ns, other.unit_ns),
            self.lasting_unit_ns + other.lasting_unit_ns,
        )


class IdleReport(msgspec.Struct, frozen=True):
    """The account of a device over some time."""

    units: int
    elapsed_ns: int
    busy: Mapping[Busy, int]
    """Unit-ns."""
    idle: Mapping[Cause, Bubbles]
    open_unit_ns: int = 0
    """Of units on which something runs now: not known yet what it was."""

    @property
    def total_unit_ns(self) -> int:
        return self.units * self.elapsed_ns

    @property
    def booked_unit_ns(self) -> int:
        """Equal to `total_unit_ns`, by construction and by test."""
        idle = sum(bubbles.total_unit_ns for bubbles in self.idle.values())
        return sum(self.busy.values()) + idle + self.open_unit_ns

    @property
    def worked_unit_ns(self) -> int:
        """Unit time while there was work for the unit: all but `no work`, and what is not known yet."""
        return self.total_unit_ns - self.idle[Cause.NO_WORK].total_unit_ns - self.open_unit_ns

    def share(self, cause: Cause) -> float:
        """Of the unit time with work; of `no work` its share of all unit time."""
        whole = self.total_unit_ns if cause is Cause.NO_WORK else self.worked_unit_ns
        return self.idle[cause].total_unit_ns / whole if whole else 0.0

    @property
    def idle_share(self) -> float:
        """Of the unit time with work, that without a kernel."""
        return sum(self.share(cause) for cause in Cause if cause is not Cause.NO_WORK)

    def minus(self, earlier: IdleReport) -> IdleReport:
        """What came after an earlier report of the same ledger."""
        return IdleReport(
            self.units,
            self.elapsed_ns - earlier.elapsed_ns,
            {kind: unit_ns - earlier.busy[kind] for kind, unit_ns in self.busy.items()},
            {cause: bubbles.minus(earlier.idle[cause]) for cause, bubbles in self.idle.items()},
            self.open_unit_ns - earlier.open_unit_ns,
        )

    def _plus(self, other: IdleReport) -> IdleReport:
        return IdleReport(
            self.units + other.units,
            max(self.elapsed_ns, other.elapsed_ns),
            {kind: unit_ns + other.busy[kind] for kind, unit_ns in self.busy.items()},
            {cause: bubbles.plus(other.idle[cause]) for cause, bubbles in self.idle.items()},
            self.open_unit_ns + other.open_unit_ns,
        )


def combined(reports: Sequence[IdleReport]) -> IdleReport:
    """Of several devices over the same time; at least one."""
    first, *others = reports
    for other in others:
        first = first._plus(other)
    return first


@dataclass(slots=True)
class _Account:
    """Bubbles of one cause so far."""

    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    unit_ns: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def book(self, ns: int, units: int) -> None:
        bucket = min(ns.bit_length(), BUCKETS - 1)
        self.counts[bucket] += 1
        self.unit_ns[bucket] += ns * units


@dataclass(slots=True)
class _Piece:
    """Units next to each other that have the same past."""

    first: int
    stop: int
    since_ns: int
    """All before is booked."""
    cause: Cause = Cause.NO_WORK
    """Why they have been idle since, when nothing is launched on them."""
    flights: list[int] = field(default_factory=list)
    """Items that are launched on them, in the order in which they run."""

    @property
    def units(self) -> int:
        return self.stop - self.first


class IdleLedger:
    """One an arbiter. A few microseconds an item."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._pieces = [_Piece(0, units, 0)]
        self._accounts = {cause: _Account() for cause in Cause}
        self._busy = dict.fromkeys(Busy, 0)
        self._began_ns = 0
        self.has_free = True
        """Nothing is launched on some units: `explain` them."""

    def begin(self, now_ns: int) -> None:
        """The account starts here."""
        self._began_ns = now_ns
        for piece in self._pieces:
            piece.since_ns = now_ns

    def launched(self, flight: Flight) -> None:
        """An item was queued on its lane, at `flight.launched_ns`."""
        for piece in self._on(flight.lane.units):
            if not piece.flights:
                self._close(piece, flight.launched_ns)
            piece.flights.append(flight.item_id)
        self._look_for_free()

    def ended(self, flight: Flight, started_ns: int, ended_ns: int, now_ns: int) -> None:
        """An item ran on the device between these times, and the host knows it now.

        All items that it waited for were told before. Times of a device's own clock are cut to what is
        possible: not before those items, not after now.
        """
        begin_ns = started_ns if started_ns < now_ns else now_ns
        last_ns = ended_ns if ended_ns < now_ns else now_ns
        kind, pieces = _kind(flight), self._on(flight.lane.units)
        for piece in pieces:
            if begin_ns > piece.since_ns:
                self._book_wait(piece, flight, begin_ns)
            end_ns = last_ns if last_ns > piece.since_ns else piece.since_ns
            self._busy[kind] += (end_ns - piece.since_ns) * (piece.stop - piece.first)
            piece.since_ns, piece.cause = end_ns, HOST
            piece.flights.remove(flight.item_id)
            if not piece.flights:
                self.has_free = True
        if len(pieces) > 1:
            self._join()

    def steps_ended(self, steps: StepsInFlight) -> None:
        """As `ended` and `launched` of decode steps one behind the other; the last two are in flight."""
        pieces = self._on(steps.oldest.lane.units)
        for piece in pieces:
            units = piece.stop - piece.first
            for place, step in enumerate(steps.steps[: steps.ended]):
                if step.started_ns > piece.since_ns:
                    waits_ns = (steps.launched_ns(place), steps.ready_ns(place))
                    self._book_gap(piece, waits_ns, step.started_ns, DRAIN, LAUNCH)
                self._busy[Busy.DECODE] += (step.ended_ns - piece.since_ns) * units
                piece.since_ns, piece.cause = step.ended_ns, HOST
            piece.flights = [step.item_id for step in steps.steps[steps.ended :]]
        if len(pieces) > 1:
            self._join()

    def explain(self, regions: Sequence[tuple[int, Cause]], now_ns: int) -> None:
        """Why units that nothing is launched on are idle from now on: (where a region stops, its cause),
        ascending, the last one at the end of the device."""
        index = region = 0
        while index < len(self._pieces):
            piece = self._pieces[index]
            index += 1
            if piece.flights:
                continue
            while regions[region][0] <= piece.first:
                region += 1
            stop, cause = regions[region]
            if stop < piece.stop:
                self._cut(index - 1, stop)
            if cause is not piece.cause:
                self._close(piece, now_ns)
                piece.cause = cause

    def report(self, now_ns: int) -> IdleReport:
        """Up to now."""
        lasting = dict.fromkeys(Cause, 0)
        open_unit_ns = 0
        for piece in self._pieces:
            unit_ns = (now_ns - piece.since_ns) * piece.units
            if piece.flights:
                open_unit_ns += unit_ns
            else:
                lasting[piece.cause] += unit_ns
        idle = {
            cause: Bubbles(tuple(account.counts), tuple(account.unit_ns), lasting[cause])
            for cause, account in self._accounts.items()
        }
        return IdleReport(self._units, now_ns - self._began_ns, dict(self._busy), idle, open_unit_ns)

    # --- pieces ---

    def _on(self, units: range) -> list[_Piece]:
        """The pieces of a lane's units; one that sticks out is cut."""
        found = []
        for index, piece in enumerate(self._pieces):
            if piece.first == units.start and piece.stop == units.stop:
                return [piece]
            if piece.stop <= units.start or piece.first >= units.stop:
                continue
            if piece.first < units.start or piece.stop > units.stop:
                border = units.start if piece.first < units.start else units.stop
                self._cut(index, border)
                return self._on(units)
            found.append(piece)
        return found

    def _cut(self, index: int, border: int) -> None:
        piece = self._pieces[index]
        rest = _Piece(border, piece.stop, piece.since_ns, piece.cause, piece.flights[:])
        self._pieces.insert(index + 1, rest)
        piece.stop = border

    def _join(self) -> None:
        """Make one of neighbours that have the same past again."""
        joined = self._pieces[:1]
        for piece in self._pieces[1:]:
            last = joined[-1]
            if (last.since_ns, last.cause, last.flights) == (piece.since_ns, piece.cause, piece.flights):
                last.stop = piece.stop
            else:
                joined.append(piece)
        self._pieces = joined

    def _look_for_free(self) -> None:
        for piece in self._pieces:
            if not piece.flights:
                self.has_free = True
                return
        self.has_free = False

    # --- booking ---

    def _book_wait(self, piece: _Piece, flight: Flight, begin_ns: int) -> None:
        """The gap before an item: the host's until its launch, then that of items it waits for, then its own
        launch. A batch for which another was parked waits for that alone."""
        preempts = flight.begins_job and flight.job is not None and flight.job.depth > 0
        drain, launch = (PREEMPTION, PREEMPTION) if preempts else (DRAIN, LAUNCH)
        self._book_gap(piece, (flight.launched_ns, flight.ready_ns), begin_ns, drain, launch)

    def _book_gap(
        self, piece: _Piece, waits_ns: tuple[int, int], begin_ns: int, drain: Cause, launch: Cause
    ) -> None:
        """`waits_ns`: when the item was launched, and when what it waits for had ended."""
        launched_ns, ready_ns = waits_ns
        self._book_until(piece, min(launched_ns, begin_ns), HOST)
        self._book_until(piece, min(ready_ns, begin_ns), drain)
        self._book_until(piece, begin_ns, launch)

    def _book_until(self, piece: _Piece, until_ns: int, cause: Cause) -> None:
        if until_ns > piece.since_ns:
            self._accounts[cause].book(until_ns - piece.since_ns, piece.units)
            piece.since_ns = until_ns

    def _close(self, piece: _Piece, now_ns: int) -> None:
        """The bubble of a piece ends here."""
        self._book_until(piece, now_ns, piece.cause)


def _kind(flight: Flight) -> Busy:
    if flight.decode is not None:
        return Busy.FUSED
    if isinstance(flight.work, ProbeWork):
        return Busy.PROBE
    return BUSY_WITH[flight.phase]


def _each(how: Callable[[int, int], int], one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(how, one, other))
