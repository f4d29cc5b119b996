"""What `muxk profile` measures: the grid of MuxWise's estimator (section 3.3), as far as a device goes.

Solo runs of both phases on every number of units; then decode steps beside prefills for the five variables of
the guard: new and reused tokens of the prefill in powers of 4 from 2K to 128K, some 20 batch sizes, total
context of decode, and every split. Beyond the paper's grid there are prompts of 512 tokens and prefills that
reuse nothing, which chats are made of, and total contexts of 512K, which cards hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muxk.kernel.device import Device
from muxk.kernel.work import PAGE_SIZE, Phase, ProbeWork, attention_pairs
from muxk.profiles.predictor import DecodeSample, PrefillSample

PROBE_LAYERS = 4
"""Layers of a prefill probe: a layer's share of what comes once an item is small."""
BATCH_MAX = 512
CO_RUN_NEW = (512, 2048, 8192, 32768, 131072)
CO_RUN_REUSED = (0, 2048, 8192, 32768, 131072)
CO_RUN_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
CO_RUN_CONTEXT = (2048, 8192, 32768, 131072, 524288)
SOLO_ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 65, 96, 128, 129, 160, 192, 193, 224, 256, 257),
    *(320, 321, 384, 385, 448, 449, 512),
)
SOLO_CONTEXT = (64, 512, 2048, 8192, 32768, 65536, 131072, 262144, 524288)
SOLO_NEW = (
    *(16, 64, 65, 128, 129, 192, 256, 257, 384, 512, 513, 640, 768, 769, 1024, 1025, 1280, 1536, 1537, 1792),
    *(2048, 2049, 2176, 2304, 2560, 2816, 3072, 3073, 3584, 4096, 4097, 5120, 6144, 8192),
    *(16384, 32768, 65536, 131072),
)
"""Both sides of tile borders: a step is fitted where it was seen."""
SOLO_REUSING = (16, 128, 512, 2048, 8192, 32768)
"""New tokens of prefills that reuse some."""
READS_ONLY = (512, 32768)
"""Fewer new tokens that reuse more are left out: they only read KV, for which the features have no term."""
SOLO_BATCHED = (128, 512, 2048, 8192)
"""New tokens of each row of prefills with BATCHED rows."""
BATCHED = 4
OVERLAP = 2.0
"""A prefill beside a step is made to last so many times as long as the step alone, ..."""
OVERLAP_NS = 2_000_000
"""... and this much more: for the slowdown, and for launches."""
BESIDE_MAX = 24
"""Prefill probes beside one decode step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can run."""

    units: int
    decode_units: tuple[int, ...]
    prefill_units: tuple[int, ...]
    """The units of the decode and prefill lanes of its splits, pair by pair."""
    layers: int
    context: int
    """Tokens of a row."""
    kv_tokens: int
    chunk_tokens: int
    batch: int = BATCH_MAX

    @staticmethod
    def of(device: Device, context: int, batch: int = BATCH_MAX) -> Limits:
        splits = device.splits()
        return Limits(
            device.units,
            tuple(split.decode_units for split in splits),
            tuple(split.prefill_units for split in splits),
            device.layers,
            context,
            (device.pages - 1) * PAGE_SIZE,
            device.chunk_tokens_max,
            min(batch, device.pages - 1),
        )

    def prefills(self, rows: int, new: int, reused: int) -> bool:
        """Whether a prefill of so many rows fits."""
        tokens = rows * (new + reused)
        return new + reused <= self.context and tokens <= self.kv_tokens and rows * new <= self.chunk_tokens

    def decodes(self, rows: int, context_tokens: int) -> bool:
        """Whether a decode step of so much context in all fits."""
        each = max(1, context_tokens // rows)
        return rows <= self.batch and each < self.context and rows * each <= self.kv_tokens


@dataclass(frozen=True, slots=True)
class Size:
    """How fine a grid is."""

    name: str
    repeats: int
    solo_rows: tuple[int, ...]
    solo_context: tuple[int, ...]
    solo_new: tuple[int, ...]
    new: tuple[int, ...]
    reused: tuple[int, ...]
    rows: tuple[int, ...]
    context: tuple[int, ...]


FULL = Size(
    "full",
    5,
    SOLO_ROWS,
    SOLO_CONTEXT,
    SOLO_NEW,
    CO_RUN_NEW,
    CO_RUN_REUSED,
    CO_RUN_ROWS,
    CO_RUN_CONTEXT,
)
QUICK = Size(
    "quick",
    3,
    (1, 4, 16, 32, 64, 65, 128, 129, 256),
    (512, 8192, 65536, 262144),
    (16, 64, 128, 256, 257, 512, 1024, 1025, 2048, 2049, 2304, 3072, 4096, 8192, 32768, 131072),
    (512, 8192, 131072),
    (0, 32768),
    (1, 16, 64, 128, 256),
    (2048, 32768, 524288),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A point of the grid; the identity of what is measured there."""

    phase: Phase
    units: int
    rows: int
    new_tokens: int
    context_tokens: int
    """Of each row: its context (decode), or what it reuses (prefill)."""
    beside_units: int = 0
    beside_new: int = 0
    beside_reused: int = 0
    """The prefill that runs beside a decode step; no units: none."""

    @property
    def key(self) -> str:
        """In files."""
        own = f"{self.phase} {self.units} {self.rows} {self.new_tokens} {self.context_tokens}"
        return f"{own} {self.beside_units} {self.beside_new} {self.beside_reused}"

    @property
    def total_context(self) -> int:
        return self.rows * self.context_tokens

    @property
    def pairs(self) -> int:
        return attention_pairs((self.new_tokens,) * self.rows, (self.context_tokens,) * self.rows)

    def probe(self, probe_id: int) -> ProbeWork:
        return ProbeWork(probe_id, self.phase, self.units, self.rows, self.new_tokens, self.context_tokens)

    def beside(self, probe_id: int) -> ProbeWork:
        assert self.beside_units, "it runs alone"
        return ProbeWork(probe_id, Phase.PREFILL, self.beside_units, 1, self.beside_new, self.beside_reused)


def solo_shapes(limits: Limits, size: Size) -> list[Shape]:
    """What runs alone, without a shape twice."""
    decode_units = sorted({*limits.decode_units, limits.units})
    prefill_units = sorted({*limits.prefill_units, limits.units})
    found: dict[Shape, None] = {}
    for units in decode_units:
        for rows, context in _decodes(limits, size.solo_rows, (0, *size.solo_context)):
            found[Shape(Phase.DECODE, units, rows, 1, max(1, context // rows))] = None
    for units in prefill_units:
        for rows, new, reused in _prefills(limits, size):
            found[Shape(Phase.PREFILL, units, rows, new, reused)] = None
    return list(found)


def _decodes(limits: Limits, rows: Sequence[int], contexts: Sequence[int]) -> Iterator[tuple[int, int]]:
    for count in rows:
        yield from ((count, context) for context in contexts if limits.decodes(count, context))


def _prefills(limits: Limits, size: Size) -> Iterator[tuple[int, int, int]]:
    """(rows, new, reused of each): single rows, up to the largest; rows that reuse; batches."""
    largest = min(limits.context, limits.chunk_tokens, limits.kv_tokens)
    lengths = sorted({*(new for new in size.solo_new if new < largest), largest})
    wanted = [(1, new, 0) for new in lengths]
    wanted += [
        (1, new, reused)
        for new in SOLO_REUSING
        for reused in CO_RUN_REUSED
        if reused and (new >= READS_ONLY[0] or reused <= READS_ONLY[1])
    ]
    wanted += [(BATCHED, new, reused) for new in SOLO_BATCHED for reused in (0, 8192)]
    return (shape for shape in wanted if limits.prefills(*shape))


@dataclass(frozen=True, slots=True)
class Levels:
    """The grid of the guard on one device."""

    new: tuple[int, ...]
    reused: tuple[int, ...]
    rows: tuple[int, ...]
    context: tuple[int, ...]


def levels(limits: Limits, size: Size) -> Levels:
    """What fits of each variable by itself, at least one level each."""
    return Levels(
        _fitting(size.new, min(limits.context, limits.chunk_tokens, limits.kv_tokens)),
        _fitting(size.reused, min(limits.context, limits.kv_tokens) - 1),
        _fitting(size.rows, limits.batch),
        _fitting(size.context, limits.kv_tokens),
    )


def _fitting(wanted: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(level for level in wanted if level <= most) or (most,)


def co_run_shapes(limits: Limits, grid: Levels) -> list[Shape]:
    """Decode steps beside a prefill on the other lane of each split; what does not fit is left out."""
    return [
        Shape(Phase.DECODE, units, rows, 1, max(1, context // rows), beside, new, reused)
        for units, beside in zip(limits.decode_units, limits.prefill_units, strict=True)
        for new in grid.new
        for reused in grid.reused
        if limits.prefills(1, new, reused)
        for rows, context in _decodes(limits, grid.rows, grid.context)
    ]


def decode_sample(shape: Shape, ns: float) -> DecodeSample:
    return DecodeSample(shape.units, shape.rows, shape.total_context, ns)


def prefill_sample(shape: Shape, layers: int, ns: float) -> PrefillSample:
    """`ns` of so many layers."""
    return PrefillSample(shape.units, shape.rows * shape.new_tokens, shape.pairs, ns / layers)
