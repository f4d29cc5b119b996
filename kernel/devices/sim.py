"""A small simulated device: given costs per work item, in whatever time the runtime keeps.

It is the test bench of actors and policies, not a model of any card. Its KV pool holds the tokens that were
written to each slot, and the next token of a row is a hash of all tokens that its page table leads to: a page
that was shared wrongly, released too early or filled from the wrong prompt changes the output. Sampling
with a temperature mixes in the seed and the position, greedy does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from muxk.kernel.device import DevicePort, ItemDone, Lane
from muxk.kernel.work import (
    PAGE_SIZE,
    DecodeWork,
    Item,
    Phase,
    PrefillWork,
    ProbeWork,
    SamplingColumns,
    Split,
    attention_pairs,
    int32_array,
    int32_bytes,
)

END_TOKEN = 256
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
END_EVERY = 509
"""One sampled token in so many is the end token."""


class SimCosts(msgspec.Struct, frozen=True):
    """Costs on the whole device, in ns; a phase on fewer units takes longer."""

    launch_ns: int = 20_000
    decode_base_ns: int = 6_000_000
    decode_row_ns: int = 40_000
    decode_context_token_ns: int = 150
    decode_saturation: float = 0.25
    """Share of the units from which decode gets no faster: it is bound by memory."""
    prefill_layer_base_ns: int = 50_000
    prefill_token_ns: int = 2_500
    prefill_pair_ns: float = 0.2


@dataclass(slots=True)
class SimLane:
    """A lane is a time from which it is free."""

    name: str
    units: range
    free_ns: int = 0


@dataclass(slots=True)
class _Touch:
    """Pages that an item in flight may read or write."""

    ends_ns: int
    requests: tuple[int, ...]
    pages: frozenset[int] = field(default_factory=frozenset)


class PageMisuse(AssertionError):
    """A page was given to another request while an item in flight may touch it."""


class SimDevice:
    """Implements `kernel.device.Device` in the runtime's own time."""

    def __init__(
        self,
        units: int = 8,
        layers: int = 4,
        pages: int = 513,
        costs: SimCosts | None = None,
        granularity: int = 1,
    ) -> None:
        self.name = f"sim:{units}"
        self.units = units
        self.layers = layers
        self.pages = pages
        self.chunk_tokens_max = 1 << 20
        self.decode_ahead = 0
        self._costs = costs or SimCosts()
        self._granularity = granularity
        self._slots: npt.NDArray[np.int64] = np.full(pages * PAGE_SIZE, -1, dtype=np.int64)
        self._powers = _powers_of_factor(pages * PAGE_SIZE)
        self._lanes: dict[tuple[Phase, int], SimLane] = {}
        self._ends_ns: dict[int, int] = {}
        self._touches: list[_Touch] = []
        self._port: DevicePort | None = None

    def splits(self) -> tuple[Split, ...]:
        step = self._granularity
        return tuple(Split(units, self.units - units) for units in range(step, self.units, step))

    def start(self, port: DevicePort) -> None:
        self._port = port

    def lane(self, phase: Phase, units: int) -> SimLane:
        if units == self.units:
            phase = Phase.DECODE
        if (phase, units) not in self._lanes:
            self._lanes[phase, units] = self._make_lane(phase, units)
        return self._lanes[phase, units]

    def _make_lane(self, phase: Phase, units: int) -> SimLane:
        if units == self.units:
            return SimLane("whole", range(self.units))
        if phase is Phase.DECODE:
            return SimLane(f"decode@{units}", range(units))
        return SimLane(f"prefill@{units}", range(self.units - units, self.units))

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        assert isinstance(lane, SimLane)
        assert self._port is not None, "start the device before launching"
        now_ns = self._port.now_ns()
        begins_ns = max(now_ns + self._costs.launch_ns, lane.free_ns, *[self._end_of(i) for i in after], 0)
        ends_ns = begins_ns + self._cost_ns(item, len(lane.units))
        lane.free_ns = ends_ns
        self._ends_ns = {i: ns for i, ns in self._ends_ns.items() if ns > now_ns}
        self._ends_ns[item.item_id] = ends_ns
        self._check_pages(item, now_ns, ends_ns)
        tokens = self._run(item)
        done = ItemDone(item.item_id, begins_ns, ends_ns, tokens)
        self._port.post_after(ends_ns - now_ns, done)

    def discard(self, batch_id: int) -> None:
        """Nothing is parked here."""

    def reset(self) -> None:
        self._touches.clear()

    def close(self) -> None:
        self._lanes.clear()

    def _end_of(self, item_id: int) -> int:
        return self._ends_ns.get(item_id, 0)

    def _cost_ns(self, item: Item, units: int) -> int:
        share = units / self.units
        layers = item.last_layer - item.first_layer
        work = item.work
        if isinstance(work, PrefillWork):
            pairs = attention_pairs(work.new_tokens, work.reused_tokens)
            return self._prefill_ns(layers, sum(work.new_tokens), pairs, share)
        if isinstance(work, DecodeWork):
            return self._decode_ns(work.rows, work.context_tokens, share)
        if work.phase is Phase.DECODE:
            return self._decode_ns(work.rows, work.rows * work.context_tokens, share)
        pairs = attention_pairs((work.new_tokens,) * work.rows, (work.context_tokens,) * work.rows)
        return self._prefill_ns(layers, work.rows * work.new_tokens, pairs, share)

    def _decode_ns(self, rows: int, context_tokens: int, share: float) -> int:
        costs = self._costs
        full = costs.decode_base_ns + rows * costs.decode_row_ns
        full += context_tokens * costs.decode_context_token_ns
        return round(full * max(1.0, costs.decode_saturation / share))

    def _prefill_ns(self, layers: int, new_tokens: int, pairs: int, share: float) -> int:
        costs = self._costs
        layer = costs.prefill_layer_base_ns + new_tokens * costs.prefill_token_ns
        return round(layers * (layer + pairs * costs.prefill_pair_ns) / share)

    def _check_pages(self, item: Item, now_ns: int, ends_ns: int) -> None:
        """Refuse an item that writes a page which an older item of other requests may still touch."""
        work = item.work
        if isinstance(work, ProbeWork):
            return
        self._touches = [touch for touch in self._touches if touch.ends_ns > now_ns]
        written = frozenset(self._written_slots(work) // PAGE_SIZE)
        for touch in self._touches:
            if written & touch.pages and not set(touch.requests) & set(work.requests):
                raise PageMisuse(f"pages {sorted(written & touch.pages)} are in flight for {touch.requests}")
        pages = frozenset(int32_array(work.page_table).tolist()) - {0}
        self._touches.append(_Touch(ends_ns, work.requests, pages))

    def _written_slots(self, work: PrefillWork | DecodeWork) -> npt.NDArray[np.int64]:
        table = _table(work)
        if isinstance(work, DecodeWork):
            return _slots_of(table, np.arange(work.rows), int32_array(work.positions).astype(np.int64))
        rows = np.repeat(np.arange(work.rows), work.new_tokens)
        positions = np.concatenate(
            [np.arange(r, r + n) for n, r in zip(work.new_tokens, work.reused_tokens, strict=True)]
        )
        return _slots_of(table, rows, positions)

    def _run(self, item: Item) -> bytes:
        work = item.work
        if isinstance(work, ProbeWork) or not item.is_last:
            return b""
        self._slots[self._written_slots(work)] = int32_array(work.tokens)
        return int32_bytes(self._sample(_table(work), self._lengths(work), work.sampling))

    def _lengths(self, work: PrefillWork | DecodeWork) -> list[int]:
        """Context of each row once the work is done."""
        if isinstance(work, DecodeWork):
            return [position + 1 for position in int32_array(work.positions).tolist()]
        return [new + reused for new, reused in zip(work.new_tokens, work.reused_tokens, strict=True)]

    def _sample(
        self, table: npt.NDArray[np.int32], lengths: list[int], sampling: SamplingColumns
    ) -> list[int]:
        temperatures = np.frombuffer(sampling.temperature, dtype="<f4")
        seeds = np.frombuffer(sampling.seed, dtype="<u8")
        choices = np.frombuffer(sampling.choice, dtype="<u4")
        tokens = []
        for row, length in enumerate(lengths):
            positions = np.arange(length)
            context = self._slots[_slots_of(table, np.full(length, row), positions)].astype(np.uint64)
            with np.errstate(over="ignore"):
                mixed = int(((context + np.uint64(1)) * self._powers[:length]).sum())
            if temperatures[row] > 0:
                mixed ^= _mix(int(seeds[row]) ^ _mix(length) ^ _mix(int(choices[row]) << 32))
            tokens.append(_token_of(_mix(mixed)))
        return tokens


def _powers_of_factor(count: int) -> npt.NDArray[np.uint64]:
    factors = np.full(count, HASH_FACTOR, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return np.cumprod(factors, dtype=np.uint64)


def _table(work: PrefillWork | DecodeWork) -> npt.NDArray[np.int32]:
    return int32_array(work.page_table).reshape(work.rows, work.pages_per_row)


def _slots_of(
    table: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    pages = table[rows, positions // PAGE_SIZE].astype(np.int64)
    return pages * PAGE_SIZE + positions % PAGE_SIZE


def _mix(value: int) -> int:
    """A 64-bit finaliser (splitmix64): spreads every input bit over the result."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def _token_of(mixed: int) -> int:
    """Lower-case letters and spaces, now and then the end token."""
    if mixed % END_EVERY == 0:
        return END_TOKEN
    letter = (mixed >> 16) % 27
    return 32 if letter == 26 else 97 + letter
