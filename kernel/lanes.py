"""The items in flight on a device's lanes, and the ledger of the split in force."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from muxk.kernel.device import Device, ItemDone, ItemFailed, Lane
from muxk.kernel.idle import IdleLedger
from muxk.kernel.jobs import NO_TOKENS, Flight, Load, PrefillJob
from muxk.kernel.messages import ALONE_TOGETHER, MEASURED_TOGETHER, ItemMeasured, ItemsMeasured, RunProbe
from muxk.kernel.steps_in_flight import StepsInFlight
from muxk.kernel.work import (
    DECODE,
    PREFILL,
    DecodeWork,
    Item,
    Phase,
    PrefillShape,
    PrefillWork,
    ProbeWork,
    Split,
)

NO_LOAD = Load(0, 0)


@dataclass
class LaneTable:
    """Launches items and knows what is in flight where."""

    device: Device
    next_item: int
    flights: dict[int, Flight] = field(default_factory=dict)
    width: int = 1
    """Devices that work on each item that is launched now."""
    prefills: int = 0
    """Items of prefill in flight."""
    probes: int = 0
    """Measurements in flight."""
    early: dict[int, ItemDone | ItemFailed] = field(default_factory=dict)
    """Completions that arrived before those of items which ended before them."""
    untold: list[ItemMeasured] = field(default_factory=list)
    """What the estimator was not told yet: less than ALONE_TOGETHER."""
    told_at: int = ALONE_TOGETHER
    """Items of which it is told at once: fewer if one of `untold` was no decode step that ran alone."""
    idle: IdleLedger = field(init=False)

    def __post_init__(self) -> None:
        self.idle = IdleLedger(self.device.units)

    def launch_decode(self, units: int, work: DecodeWork, now_ns: int) -> None:
        """Queue a decode step on the decode lane of so many units."""
        lane = self.device.lane(DECODE, units)
        self._launch(lane, DECODE, work, range(self.device.layers), now_ns)

    def launch_probe(self, probe: RunProbe, now_ns: int) -> None:
        """Queue a measurement, behind those that are to run beside it; nothing else may be in flight."""
        assert not self.flights
        for work in probe.beside:
            self._launch(
                self.device.lane(work.phase, work.units), work.phase, work, range(probe.beside_layers), now_ns
            )
        work = probe.probe
        self._launch(self.device.lane(work.phase, work.units), work.phase, work, range(probe.layers), now_ns)

    def launch_prefill(self, units: int, job: PrefillJob, layers: int, now_ns: int) -> None:
        """Queue the next layers of the chunk that the job has begun."""
        lane = self.device.lane(PREFILL, units)
        self._launch(lane, PREFILL, job.work, job.take_layers(layers), now_ns, job)

    def launch_fused(self, job: PrefillJob, decode: DecodeWork, now_ns: int) -> None:
        """Queue a decode step and the chunk that the job has begun as one pass over the whole device."""
        lane = self.device.lane(DECODE, self.device.units)
        span = job.take_layers(self.device.layers)
        self._launch(lane, DECODE, job.work, span, now_ns, job, decode)

    def _launch(
        self,
        lane: Lane,
        phase: Phase,
        work: PrefillWork | DecodeWork | ProbeWork,
        layers: range,
        now_ns: int,
        job: PrefillJob | None = None,
        decode: DecodeWork | None = None,
    ) -> None:
        """Queue an item on a lane, behind all that it must not overtake.

        It waits, by order on the device, for items on other lanes whose units meet its own, for earlier items
        of its own batch, and for the decode step before it.
        """
        chained = decode is not None or isinstance(work, DecodeWork)
        after, older, others = [], [], []
        for flight in self.flights.values():
            if flight.lane is lane:
                older.append(flight.item_id)
                continue
            others.append(flight)
            if (
                flight.meets(lane.units)
                or (job is not None and flight.job is job)
                or (chained and (flight.decode is not None or isinstance(flight.work, DecodeWork)))
            ):
                after.append(flight.item_id)
        chunk = NO_TOKENS if job is None else job.chunk
        first, stop = layers.start, layers.stop
        item_id = self.next_item
        self.next_item += 1
        item = Item(item_id, work, first, stop, stop == self.device.layers, chunk.start, chunk.stop, decode)
        flight = self.flights[item_id] = Flight(
            item_id=item_id,
            lane=lane,
            phase=phase,
            work=work,
            layers=stop - first,
            job=job,
            load=NO_LOAD if job is None else job.begun,
            decode=decode,
            waits_for=(*after, *older),
            runnable_ns=now_ns,
            launched_ns=now_ns,
            begins_job=job is not None and first == chunk.start == 0,
            shared=bool(others),
            width=self.width,
            beside=_prefill_of(others) if others and phase is DECODE else None,
        )
        self._count(flight, 1)
        self.idle.launched(flight)
        self.device.launch(lane, item, after)

    def steps_ended(
        self, steps: StepsInFlight, context_tokens: int, works: tuple[DecodeWork, DecodeWork]
    ) -> None:
        """Take out steps, the first one's context given, and put in the two that are in flight now."""
        oldest, newest, count = steps.oldest, steps.newest, steps.ended
        units, rows, layers = len(oldest.lane.units), oldest.work.rows, self.device.layers
        for step in steps.steps[:count]:
            elapsed_ns = step.ended_ns - step.started_ns
            self.untold.append(
                ItemMeasured(DECODE, units, rows, rows, 0, context_tokens, layers, elapsed_ns, shared=False)
            )
            context_tokens += rows
        kept = {newest.item_id: newest} if count == 1 else {}
        self.flights.clear()
        for place, work in zip((count, count + 1), works, strict=True):
            flight = kept.get(steps.steps[place].item_id) or self._queued(steps, place, work)
            self.flights[flight.item_id] = flight
        first = self.flights[steps.steps[count].item_id]
        first.runnable_ns, first.ready_ns = steps.last_known_ns, steps.ready_ns(count)
        self.idle.steps_ended(steps)

    def _queued(self, steps: StepsInFlight, place: int, work: DecodeWork) -> Flight:
        """As `_launch` has it of one behind the others."""
        launched_ns = steps.launched_ns(place)
        return Flight(
            item_id=steps.steps[place].item_id,
            lane=steps.oldest.lane,
            phase=DECODE,
            work=work,
            layers=self.device.layers,
            job=None,
            load=NO_LOAD,
            decode=None,
            waits_for=(steps.steps[place - 1].item_id,),
            runnable_ns=launched_ns,
            launched_ns=launched_ns,
            shared=False,
            width=self.width,
        )

    def _count(self, flight: Flight, change: int) -> None:
        if flight.phase is PREFILL:
            self.prefills += change
        if isinstance(flight.work, ProbeWork):
            self.probes += change

    def next_completion(self) -> ItemDone | ItemFailed | None:
        """Take out an early completion for which nothing is missing any more."""
        for item_id in self.early:
            flight = self.flights.get(item_id)
            if flight is None or self.flights.keys().isdisjoint(flight.waits_for):
                return self.early.pop(item_id)
        return None

    def ended(self, message: ItemDone | ItemFailed, now_ns: int) -> Flight | None:
        """Take an item out; None for one of an older generation. One that failed counts as busy until now."""
        ended = self.flights.pop(message.item_id, None)
        if ended is None:
            return None
        self._count(ended, -1)
        if isinstance(message, ItemDone):
            started_ns, ended_ns = message.started_ns, message.ended_ns
        else:
            started_ns, ended_ns = max(ended.launched_ns, ended.ready_ns), now_ns
        self.idle.ended(ended, started_ns, ended_ns, now_ns)
        for flight in self.flights.values():
            if message.item_id in flight.waits_for:
                flight.runnable_ns = now_ns
                flight.ready_ns = max(flight.ready_ns, ended_ns)
        return ended

    def others(self, lane: Lane) -> list[Flight]:
        """What is in flight on other lanes, oldest first."""
        return [flight for flight in self.flights.values() if flight.lane is not lane]

    def has_other_widths(self) -> bool:
        """Items are in flight that were launched on more or fewer devices."""
        return any(flight.width != self.width for flight in self.flights.values())

    def measured(self, flight: Flight, done: ItemDone) -> ItemsMeasured | None:
        """What the estimator learns from an item, once there are enough to tell it."""
        found = self._measured(flight, done)
        if found is None:
            return None
        self.untold.append(found)
        if found.shared or found.phase is PREFILL:
            self.told_at = MEASURED_TOGETHER
        if len(self.untold) < self.told_at:
            return None
        told, self.untold, self.told_at = self.untold, [], ALONE_TOGETHER
        return ItemsMeasured(tuple(told))

    def _measured(self, flight: Flight, done: ItemDone) -> ItemMeasured | None:
        """None for a probe, which is reported by itself, and for a fused step, which is neither phase."""
        work = flight.work
        if isinstance(work, ProbeWork) or flight.decode is not None:
            return None
        others = self.others(flight.lane)
        # The prefill batch may have come while the step ran.
        joined = _prefill_of(others) if flight.phase is DECODE else None
        return ItemMeasured(
            phase=flight.phase,
            units=len(flight.lane.units),
            rows=work.rows,
            new_tokens=work.rows if flight.job is None else flight.load.new_tokens,
            pairs=flight.load.pairs,
            context_tokens=work.context_tokens if isinstance(work, DecodeWork) else 0,
            layers=flight.layers,
            elapsed_ns=done.ended_ns - done.started_ns,
            shared=flight.shared or bool(others),
            beside=flight.beside or joined,
        )

    def describe(self, now_ns: int) -> list[dict[str, Any]]:
        return [
            {
                "lane": flight.lane.name,
                "phase": "fused" if flight.decode is not None else str(flight.phase),
                "rows": flight.work.rows,
                "layers": flight.layers,
                "layers_left": 0 if flight.job is None else flight.job.view().layers_left,
                "tokens": flight.load.new_tokens,
                "running_ms": (now_ns - flight.runnable_ns) // 1_000_000,
                "stuck": flight.stuck,
            }
            for flight in self.flights.values()
        ]


def _prefill_of(flights: list[Flight]) -> PrefillShape | None:
    """The oldest prefill batch among them."""
    return next((flight.job.shape for flight in flights if flight.job is not None), None)


class SplitLedger:
    """The split in force, which splits are legal on a device, and how long each was in force."""

    def __init__(self, device: Device) -> None:
        self.whole = Split(device.units, device.units)
        self.disjoint = device.splits()
        self.current = self.whole
        self.legal = self._legal_splits()
        self._since_ns = 0
        self._residency_ns: Counter[Split] = Counter()

    def _legal_splits(self) -> frozenset[Split]:
        """Disjoint splits and what is left of them when one phase is held, and the whole device."""
        units = self.whole.decode_units
        legal = {self.whole, Split(units, 0), Split(0, units)}
        for split in self.disjoint:
            legal |= {split, Split(split.decode_units, 0), Split(0, split.prefill_units)}
        return frozenset(legal)

    def begin(self, now_ns: int) -> None:
        """The clock of residencies starts here."""
        self._since_ns = now_ns

    @property
    def shares_time(self) -> bool:
        """True when both phases take turns on one lane over the whole device."""
        return self.current == self.whole

    def change(self, split: Split, now_ns: int) -> None:
        assert split in self.legal
        self._residency_ns[self.current] += now_ns - self._since_ns
        self.current = split
        self._since_ns = now_ns

    def residency_ms(self, now_ns: int) -> dict[str, int]:
        """Milliseconds each split was in force, as `decode+prefill` units."""
        residency = dict(self._residency_ns)
        residency[self.current] = residency.get(self.current, 0) + now_ns - self._since_ns
        return {
            f"{split.decode_units}+{split.prefill_units}": ns // 1_000_000
            for split, ns in sorted(residency.items())
        }
