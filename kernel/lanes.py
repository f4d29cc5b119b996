"""The items in flight on a device's lanes, and the ledger of the split in force."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from muxk.kernel.device import Device, ItemDone, Lane
from muxk.kernel.jobs import Flight, PrefillJob
from muxk.kernel.messages import ItemMeasured
from muxk.kernel.work import DecodeWork, Item, Phase, PrefillWork, ProbeWork, Split


@dataclass
class LaneTable:
    """Launches items and knows what is in flight where."""

    device: Device
    next_item: int
    flights: dict[int, Flight] = field(default_factory=dict)

    def launch(
        self,
        phase: Phase,
        units: int,
        work: PrefillWork | DecodeWork | ProbeWork,
        layers: range,
        job: PrefillJob | None = None,
    ) -> None:
        """Queue layers of a work on the lane of a phase, behind all that it must not overtake.

        It waits, by order on the device, for items on other lanes whose units meet its own, and for earlier
        layers of its own batch.
        """
        lane = self.device.lane(phase, units)
        after = [
            flight.item_id
            for flight in self.flights.values()
            if flight.lane is not lane
            and (flight.meets(lane.units) or (job is not None and flight.job is job))
        ]
        item = Item(
            self.next_item,
            work,
            layers.start,
            layers.stop,
            layers.stop == self.device.layers,
            last_token=sum(work.new_tokens) if isinstance(work, PrefillWork) else 0,
        )
        self.next_item += 1
        shared = self.others_busy(lane)
        self.flights[item.item_id] = Flight(item.item_id, lane, phase, work, len(layers), job, shared)
        self.device.launch(lane, item, after)

    def ended(self, item_id: int) -> Flight | None:
        """Take an item out; None for one of an older generation."""
        return self.flights.pop(item_id, None)

    def others_busy(self, lane: Lane) -> bool:
        return any(flight.lane is not lane for flight in self.flights.values())

    def prefills(self) -> int:
        return sum(flight.phase is Phase.PREFILL for flight in self.flights.values())

    def probing(self) -> bool:
        return any(isinstance(flight.work, ProbeWork) for flight in self.flights.values())

    def measured(self, flight: Flight, done: ItemDone) -> ItemMeasured | None:
        """What the estimator learns from an item; None for a probe, which is reported by itself."""
        work = flight.work
        if isinstance(work, ProbeWork):
            return None
        return ItemMeasured(
            phase=flight.phase,
            units=len(flight.lane.units),
            rows=work.rows,
            new_tokens=work.rows if flight.job is None else flight.job.new_tokens,
            pairs=0 if flight.job is None else flight.job.pairs,
            context_tokens=work.context_tokens if isinstance(work, DecodeWork) else 0,
            layers=flight.layers,
            elapsed_ns=done.ended_ns - done.started_ns,
            shared=flight.shared or self.others_busy(flight.lane),
        )

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "lane": flight.lane.name,
                "phase": str(flight.phase),
                "rows": flight.work.rows,
                "layers": flight.layers,
                "layers_left": 0 if flight.job is None else flight.job.layers_left,
                "tokens": 0 if flight.job is None else flight.job.new_tokens,
            }
            for flight in self.flights.values()
        ]


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
