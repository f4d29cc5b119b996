"""A small simulated device: given costs per work item, in whatever time the runtime keeps.

It is the test bench of actors and policies, not a model of any card. Its KV pool holds the tokens that were
written to each slot, and the next token of a row is a hash of all tokens that its page table leads to: a page
that was shared wrongly, released too early or filled from the wrong prompt changes the output. Sampling
with a temperature mixes in the seed and the position, greedy does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from muxk.kernel.device import DevicePort, ItemDone, Lane
from muxk.kernel.work import (
    PAGE_SIZE,
    ChunkRow,
    DecodeWork,
    Item,
    Phase,
    PrefillWork,
    ProbeWork,
    RowLogprobs,
    SamplingColumns,
    Split,
    StepOutput,
    attention_pairs,
    chunk_rows,
    int32_array,
    int32_bytes,
)

END_TOKEN = 256
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
KEPT_STEPS = 1
"""Decode steps before the last whose tokens are kept for those that follow."""
PARKED_BYTES_PER_TOKEN = 8192
"""A hidden state of 4096 numbers of two bytes."""
END_EVERY = 509
"""One sampled token in so many is the end token."""


Memory = npt.NDArray[np.int64]
"""The token in each slot, or -1."""


def new_memory(pages: int) -> Memory:
    return np.full(pages * PAGE_SIZE, -1, dtype=np.int64)


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
    migration_token_ns: float = 600.0
    """Of each token whose KV moves to another device: 128 KiB at 200 GB/s take 655."""


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
        chunk_tokens_max: int = 1 << 20,
        parked_bytes_per_token: int = PARKED_BYTES_PER_TOKEN,
        memory: Memory | None = None,
    ) -> None:
        """`memory` is that of all devices of a server, where there are several, by slot."""
        self.name = f"sim:{units}"
        self.units = units
        self.layers = layers
        self.pages = pages
        self.chunk_tokens_max = chunk_tokens_max
        self.decode_ahead = 1
        self.parked_bytes_per_token = parked_bytes_per_token
        self._costs = costs or SimCosts()
        self._granularity = granularity
        self.width = 1
        """Devices that work as one."""
        self._slots: Memory = new_memory(pages) if memory is None else memory
        self._powers = _powers_of_factor(len(self._slots))
        self._lanes: dict[tuple[Phase, int], SimLane] = {}
        self._ends_ns: dict[int, int] = {}
        self._touches: list[_Touch] = []
        self._steps: dict[int, npt.NDArray[np.int32]] = {}
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
        touches = _touches_of(item)
        self._check_pages(touches, now_ns, ends_ns)
        decode = None if item.decode is None else self._decode(item.decode)
        output = self._run(item)
        logprobs = output.logprobs
        done = ItemDone(item.item_id, begins_ns, ends_ns, output.tokens, logprobs, decode=decode)
        self._port.post_after(ends_ns - now_ns, done)

    def discard(self, batch_id: int) -> None:
        """Nothing is parked here."""

    def reset(self) -> None:
        self._touches.clear()
        self._steps.clear()

    def describe(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        self._lanes.clear()

    def resize(self, width: int) -> None:
        """See `kernel.device.ElasticDevice`: a prefill is shared out, of a decode step all but its base."""
        self.width = width

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """What a migration moves, from page to page."""
        slots = self._slots.reshape(-1, PAGE_SIZE)
        slots[list(targets)] = slots[list(sources)]

    def _end_of(self, item_id: int) -> int:
        return self._ends_ns.get(item_id, 0)

    def _cost_ns(self, item: Item, units: int) -> int:
        share = units / self.units
        layers = item.last_layer - item.first_layer
        work = item.work
        if isinstance(work, PrefillWork):
            return self._chunk_ns(item, work, layers, share)
        if isinstance(work, DecodeWork):
            return self._decode_ns(work.rows, work.context_tokens, share)
        if work.phase is Phase.DECODE:
            return self._decode_ns(work.rows, work.rows * work.context_tokens, share)
        pairs = attention_pairs((work.new_tokens,) * work.rows, (work.context_tokens,) * work.rows)
        return self._prefill_ns(layers, work.rows * work.new_tokens, pairs, share)

    def _chunk_ns(self, item: Item, work: PrefillWork, layers: int, share: float) -> int:
        """A fused step reads the weights once: the decode step's base pays for that of the layers."""
        rows = chunk_rows(work, range(item.first_token, item.last_token))
        pairs = attention_pairs(
            tuple(row.new_tokens for row in rows), tuple(row.reused_tokens for row in rows)
        )
        cost_ns = self._prefill_ns(layers, item.last_token - item.first_token, pairs, share)
        if item.decode is None:
            return cost_ns
        base_ns = round(layers * self._costs.prefill_layer_base_ns / share)
        return cost_ns - base_ns + self._decode_ns(item.decode.rows, item.decode.context_tokens, share)

    def _decode_ns(self, rows: int, context_tokens: int, share: float) -> int:
        costs = self._costs
        of_rows = rows * costs.decode_row_ns + context_tokens * costs.decode_context_token_ns
        full = costs.decode_base_ns + of_rows / self.width
        return round(full * max(1.0, costs.decode_saturation / share))

    def _prefill_ns(self, layers: int, new_tokens: int, pairs: int, share: float) -> int:
        costs = self._costs
        layer = costs.prefill_layer_base_ns + new_tokens * costs.prefill_token_ns
        return round(layers * (layer + pairs * costs.prefill_pair_ns) / share / self.width)

    def _check_pages(self, touches: Sequence[_Reach], now_ns: int, ends_ns: int) -> None:
        """Refuse an item that writes a page which an older item of other requests may still touch."""
        self._touches = [touch for touch in self._touches if touch.ends_ns > now_ns]
        for reach in touches:
            for touch in self._touches:
                both = reach.written & touch.pages
                if both and not set(touch.requests) & set(reach.requests):
                    raise PageMisuse(f"pages {sorted(both)} are in flight for {touch.requests}")
            self._touches.append(_Touch(ends_ns, reach.requests, reach.pages))

    def _run(self, item: Item) -> StepOutput:
        work = item.work
        if isinstance(work, DecodeWork):
            return self._decode(work)
        if isinstance(work, ProbeWork) or not item.is_last:
            return StepOutput()
        return self._prefill(work, range(item.first_token, item.last_token))

    def _prefill(self, work: PrefillWork, tokens: range) -> StepOutput:
        """Write the chunk's tokens, sample the rows that end in it."""
        rows = chunk_rows(work, tokens)
        table = _table(work)
        self._slots[_chunk_slots(table, rows)] = int32_array(work.tokens)[tokens.start : tokens.stop]
        ended = [row for row in rows if row.ends]
        indices = [row.row for row in ended]
        lengths = [row.new_tokens + row.reused_tokens for row in ended]
        sampled = self._sample(table, indices, lengths, work.sampling)
        return StepOutput(int32_bytes(sampled), _logprobs(work.sampling, indices, lengths, sampled))

    def _decode(self, work: DecodeWork) -> StepOutput:
        table = _table(work)
        tokens = int32_array(work.tokens).copy()
        if work.carried_rows:
            tokens[int32_array(work.carried_rows)] = self._steps[work.after_step][
                int32_array(work.carried_from)
            ]
        positions = int32_array(work.positions).astype(np.int64)
        rows = np.arange(work.rows)
        self._slots[_slots_of(table, rows, positions)] = tokens
        lengths = (positions + 1).tolist()
        sampled = self._sample(table, rows.tolist(), lengths, work.sampling)
        self._steps = {step: kept for step, kept in self._steps.items() if step >= work.step_id - KEPT_STEPS}
        self._steps[work.step_id] = np.array(sampled, dtype=np.int32)
        return StepOutput(int32_bytes(sampled), _logprobs(work.sampling, rows.tolist(), lengths, sampled))

    def _sample(
        self,
        table: npt.NDArray[np.int32],
        rows: list[int],
        lengths: list[int],
        sampling: SamplingColumns,
    ) -> list[int]:
        """One token for each of `rows`, whose contexts have `lengths` tokens."""
        temperatures = np.frombuffer(sampling.temperature, dtype="<f4")
        seeds = np.frombuffer(sampling.seed, dtype="<u8")
        choices = np.frombuffer(sampling.choice, dtype="<u4")
        banned = {extras.row: int32_array(extras.banned).tolist() for extras in sampling.extras}
        tokens = []
        for row, length in zip(rows, lengths, strict=True):
            positions = np.arange(length)
            context = self._slots[_slots_of(table, np.full(length, row), positions)].astype(np.uint64)
            with np.errstate(over="ignore"):
                mixed = int(((context + np.uint64(1)) * self._powers[:length]).sum())
            if temperatures[row] > 0:
                mixed ^= _mix(int(seeds[row]) ^ _mix(length) ^ _mix(int(choices[row]) << 32))
            tokens.append(_allowed_token(_mix(mixed), banned.get(row, ())))
        return tokens


def _allowed_token(mixed: int, banned: Sequence[int]) -> int:
    token = _token_of(mixed)
    while token in banned:
        mixed = _mix(mixed + 1)
        token = _token_of(mixed)
    return token


def _logprobs(
    sampling: SamplingColumns, rows: list[int], lengths: list[int], tokens: list[int]
) -> tuple[RowLogprobs, ...]:
    """A certain token for each row that asks: this device knows no probabilities."""
    asked = {extras.row for extras in sampling.extras if extras.logprobs is not None}
    return tuple(
        RowLogprobs(row, length, token, 0.0, 1, (token,), (0.0,))
        for row, length, token in zip(rows, lengths, tokens, strict=True)
        if row in asked
    )


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a part of an item may touch."""

    requests: tuple[int, ...]
    pages: frozenset[int]
    written: frozenset[int]


def _touches_of(item: Item) -> list[_Reach]:
    work = item.work
    found = []
    if isinstance(work, PrefillWork):
        found.append(_prefill_reach(work, range(item.first_token, item.last_token)))
    step = work if isinstance(work, DecodeWork) else item.decode
    if step is not None:
        table = _table(step)
        positions = int32_array(step.positions).astype(np.int64)
        written = frozenset((_slots_of(table, np.arange(step.rows), positions) // PAGE_SIZE).tolist())
        found.append(_Reach(step.requests, frozenset(table.ravel().tolist()) - {0}, written))
    return found


def _prefill_reach(work: PrefillWork, tokens: range) -> _Reach:
    """Only rows of the chunk: the pages of a row that ended before may be somebody else's by now."""
    rows = chunk_rows(work, tokens)
    table = _table(work)
    written = frozenset((_chunk_slots(table, rows) // PAGE_SIZE).tolist())
    indices = [row.row for row in rows]
    pages = frozenset(table[indices].ravel().tolist()) - {0}
    return _Reach(tuple(work.requests[row] for row in indices), pages, written)


def _chunk_slots(table: npt.NDArray[np.int32], rows: Sequence[ChunkRow]) -> npt.NDArray[np.int64]:
    owners = np.repeat([row.row for row in rows], [row.new_tokens for row in rows])
    positions = np.concatenate(
        [np.arange(row.reused_tokens, row.reused_tokens + row.new_tokens) for row in rows]
    )
    return _slots_of(table, owners, positions)


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
