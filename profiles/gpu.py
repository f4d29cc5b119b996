"""Constants of a GPU, and the time of one operator on some of its SMs: a roofline with efficiencies.

Constants are data (`profiles/gpus/*.yaml`), written by `python -m muxk.profiles.fit_gpu`; a group names its
source and says `assumed` where no table of measurements stands behind it. Times are in ns, rates in bytes or
FLOPs a ns. On n of N SMs an operator needs its compute time on n SMs and its memory time at what n SMs can
draw of the HBM bandwidth. It takes the larger of both, smoothed where they are alike: the norm
(c^p + m^p)^(1/p), whose p is fitted, since the two do not overlap perfectly there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

GPUS_FOLDER = Path(__file__).parent / "gpus"
PROFILE_VERSION = 1
"""Of the YAML's form: a file of another version is refused."""
QUERY_TILE = 128
"""Queries that one block of a prefill attention kernel works on (FlashAttention, head_dim 128)."""
ELEMENTWISE = ("norm", "add", "rope", "activation")
"""Kernels that stream; keys of `ElementwiseConstants.kernels`."""
SPLITS_OF_K = (2, 4, 8)
"""Ways in which a GEMM library cuts the inner dimension when its tiles are fewer than the SMs."""


class GpuError(ValueError):
    """A profile of a GPU is missing or wrong; the text is for the user."""


class Grid(StrEnum):
    """For how many SMs a kernel that keeps its blocks for good sizes its grid."""

    PARTITION = "partition"
    """For those it runs on: it was told."""
    DEVICE = "device"
    """For all of the card: on a part of it the blocks run in rounds, and the last one may be nearly empty."""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Constants with one origin."""

    source: str
    assumed: bool
    """True where no table of measurements on this card stands behind it."""


class Card(Group, frozen=True):
    """What the data sheet says."""

    units: int
    memory_bytes: int
    flops: float
    """Dense bf16 FLOPs a ns."""
    bandwidth: float
    """HBM bytes a ns."""
    link_bandwidth: float
    """NVLink, bytes a ns, both directions together."""
    l2_bytes: int
    """What the kernels of a layer hand over through it is read faster than from HBM."""


class Partition(Group, frozen=True):
    """How a subset of SMs draws bandwidth."""

    saturating_units: int
    """SMs that draw the whole bandwidth; fewer draw their share of it."""


class Tile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel of the GEMM library: the part of the result that one SM works on at a time."""

    rows: int
    columns: int
    efficiency: float
    """Of the SM's peak."""


class GemmConstants(Group, frozen=True):
    """A product of bf16 matrices. The library is taken to choose the fastest tile."""

    floor_ns: float
    bandwidth_efficiency: float
    wave_weight: float
    """1: the last wave of tiles takes as long as a full one; 0: tiles flow evenly over the SMs."""
    sharpness: float
    inner_overhead: float
    """Start and end of a tile, as so many steps of its inner dimension."""
    split_ns: float
    """Cost of a split inner dimension: the partial results are added."""
    tiles: tuple[Tile, ...]
    grid: Grid = Grid.PARTITION


class DecodeAttentionConstants(Group, frozen=True):
    """Attention of one new token a row over its KV: bound by memory from a floor up."""

    floor_ns: float
    bandwidth_efficiency: float
    sharpness: float
    row_ns: float
    """Of each row and KV head on an SM of its own; rows spread over the SMs."""
    grid: Grid = Grid.PARTITION


class PrefillAttentionConstants(Group, frozen=True):
    """Causal attention of whole rows of queries."""

    floor_ns: float
    efficiency: float
    """Of peak FLOPs in the inner loop."""
    diagonal: float
    """Keys, as a multiple of a tile, that a block of queries pays beyond those it needs."""
    split_keys: float
    """Keys after which a block's work is shared with SMs that would idle."""
    sharpness: float
    ramp_tokens: float
    """A row of so many keys runs at half of the efficiency: short loops do not fill the pipeline."""
    bandwidth_efficiency: float
    grid: Grid = Grid.PARTITION


class ElementwiseKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    floor_ns: float
    bandwidth_efficiency: float
    sharpness: float
    cached_gain: float
    """Share of the streaming time that a kernel saves whose data all lie in the L2 cache."""
    row_ns: float
    """Of each token's block on an SM, however narrow it is; blocks spread over the SMs."""


class ElementwiseConstants(Group, frozen=True):
    """Kernels that stream their data once, in part from the L2 cache where the kernel before left them."""

    kernels: dict[str, ElementwiseKernel]


class AllReduceSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between so many GPUs: a floor, and bytes a ns of the message for long ones."""

    floor_ns: float
    bandwidth: float
    sharpness: float


class AllReduceConstants(Group, frozen=True):
    by_tp: dict[int, AllReduceSize]


class ExpertConstants(Group, frozen=True):
    """The grouped product of a mixture of experts, relative to the dense one."""

    efficiency: float
    """Of a tile's efficiency."""
    routing_ns: float
    """Router, sort and gather, a layer."""
    bandwidth_efficiency: float


class HostConstants(Group, frozen=True):
    """The process that launches."""

    decode_launch_ns: int
    """Of the CUDA graph of a decode step."""
    prefill_layer_launch_ns: int
    wakeup_ns: int
    """From the end of an item to the host knowing it."""
    switch_ns: int
    """Added to the wait for items on another lane."""


class CoRunConstants(Group, frozen=True):
    """What two lanes do to each other beyond sharing the bandwidth."""

    interference: float
    """A lane slows down by this times the share of the bandwidth that others draw."""
    slowdown_max: float
    """Bound of the slowdown that interference may reach, together with the sharing."""
    noise: float
    """Sigma of an item's log-normal factor."""


class MemoryConstants(Group, frozen=True):
    reserve_bytes: int
    """Kept from the KV pool: contexts, graphs, activations."""


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error of the fit on rows it did not see, relative to what was measured."""

    operator: str
    table: str
    fitted_rows: int
    held_out_rows: int
    median: float
    p90: float


class GpuProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All constants of a card."""

    version: int
    name: str
    card: Card
    partition: Partition
    gemm: GemmConstants
    decode_attention: DecodeAttentionConstants
    prefill_attention: PrefillAttentionConstants
    elementwise: ElementwiseConstants
    all_reduce: AllReduceConstants
    experts: ExpertConstants
    host: HostConstants
    co_run: CoRunConstants
    memory: MemoryConstants
    held_out: tuple[HeldOut, ...] = ()


class Cost(NamedTuple):
    """Of an operator that runs alone."""

    ns: float
    bytes: float
    """Moved to and from HBM."""


def known_gpus() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in GPUS_FOLDER.glob("*.yaml")))


def load_gpu(name: str) -> GpuProfile:
    """Raises GpuError."""
    if name not in known_gpus():
        raise GpuError(f"no GPU {name!r}: use {', '.join(known_gpus())}")
    return read_gpu((GPUS_FOLDER / f"{name}.yaml").read_text("utf-8"), f"{name}.yaml")


def read_gpu(text: str, origin: str) -> GpuProfile:
    """A profile from its YAML. Raises GpuError with what is wrong."""
    try:
        data = yaml.safe_load(text)
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != PROFILE_VERSION:
            raise GpuError(f"{origin}: version {version!r}, this muxk reads {PROFILE_VERSION}")
        return msgspec.convert(data, GpuProfile, strict=False)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise GpuError(f"{origin}: {error}") from error


def smooth_max(first: float, second: float, sharpness: float) -> float:
    """(a^p + b^p)^(1/p) without overflow."""
    high, low = (first, second) if first >= second else (second, first)
    if low <= 0.0:
        return high
    return high * math.pow(1.0 + math.pow(low / high, sharpness), 1.0 / sharpness)


def busy_units(profile: GpuProfile, grid: Grid, units: int) -> float:
    """SMs whose work counts: a grid for N SMs takes N/n rounds, rounded up, on n of them."""
    if grid is Grid.PARTITION:
        return units
    return profile.card.units / math.ceil(profile.card.units / units)


def drawn_bandwidth(profile: GpuProfile, efficiency: float, units: float) -> float:
    """Bytes a ns that `units` SMs draw: their share up to what saturates, then all."""
    share = min(1.0, units / profile.partition.saturating_units)
    return profile.card.bandwidth * min(efficiency, share)


def gemm_ns(profile: GpuProfile, tokens: int, columns: int, inner: int, units: int) -> float:
    """A dense product of `tokens` rows on so many SMs."""
    constants = profile.gemm
    busy = busy_units(profile, constants.grid, units)
    moved = 2.0 * (columns * inner + tokens * (columns + inner))
    memory = moved / drawn_bandwidth(profile, constants.bandwidth_efficiency, busy)
    compute = _fastest_tile_ns(profile, 1.0, tokens, columns, inner, busy)
    return constants.floor_ns + smooth_max(compute, memory, constants.sharpness)


def grouped_gemm_ns(
    profile: GpuProfile, groups: float, tokens: int, columns: int, inner: int, units: int
) -> float:
    """Products of `tokens` rows with each of `groups` (an expected number) weights, in one kernel."""
    constants = profile.experts
    busy = busy_units(profile, profile.gemm.grid, units)
    moved = 2.0 * groups * (columns * inner + tokens * (columns + inner))
    memory = moved / drawn_bandwidth(profile, constants.bandwidth_efficiency, busy)
    compute = _fastest_tile_ns(profile, groups, tokens, columns, inner, busy) / constants.efficiency
    return profile.gemm.floor_ns + smooth_max(compute, memory, profile.gemm.sharpness)


def _fastest_tile_ns(
    profile: GpuProfile, groups: float, tokens: int, columns: int, inner: int, units: float
) -> float:
    """Waves of the fastest tile over the SMs; the inner dimension is split where tiles are few."""
    constants = profile.gemm
    sm_flops = profile.card.flops / profile.card.units
    weight, overhead = constants.wave_weight, constants.inner_overhead
    best = math.inf
    for tile in constants.tiles:
        tiles = groups * (-(-tokens // tile.rows) * -(-columns // tile.columns))
        step = 2.0 * tile.rows * tile.columns / (sm_flops * tile.efficiency)
        waves = weight * math.ceil(tiles / units) + (1.0 - weight) * max(tiles / units, 1.0)
        best = min(best, waves * step * (inner + overhead))
        if tiles < units:
            for split in SPLITS_OF_K:
                parts = tiles * split / units
                waves = weight * math.ceil(parts) + (1.0 - weight) * max(parts, 1.0)
                best = min(best, waves * step * (inner / split + overhead) + constants.split_ns)
    return best


def decode_attention_ns(
    profile: GpuProfile, rows: int, context_tokens: int, heads: int, kv_heads: int, head_dim: int, units: int
) -> float:
    """One layer; `context_tokens` is the sum over the rows."""
    return DecodeAttention(profile, heads, kv_heads, head_dim, units).ns(rows, context_tokens)


class DecodeAttention:
    """`decode_attention_ns` of one model on so many SMs, with what steps have in common found once."""

    def __init__(self, profile: GpuProfile, heads: int, kv_heads: int, head_dim: int, units: int) -> None:
        constants = profile.decode_attention
        self._heads, self._kv_heads, self._bytes = heads, kv_heads, 4.0 * head_dim
        self._busy = busy_units(profile, constants.grid, units)
        self._bandwidth = drawn_bandwidth(profile, constants.bandwidth_efficiency, self._busy)
        self._row_ns, self._floor_ns = constants.row_ns, constants.floor_ns
        self._sharpness = constants.sharpness

    def ns(self, rows: int, context_tokens: int) -> float:
        """One layer; `context_tokens` is the sum over the rows."""
        moved = self._bytes * (self._kv_heads * context_tokens + self._heads * rows)
        streamed = moved / self._bandwidth
        streamed += self._row_ns * rows * self._kv_heads / self._busy
        return smooth_max(self._floor_ns, streamed, self._sharpness)


def prefill_attention_ns(
    profile: GpuProfile,
    tokens: float,
    pairs: float,
    context_tokens: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
    units: int,
) -> float:
    """One layer of causal attention; `tokens`, `pairs` and `context_tokens` are sums over the rows.

    Blocks of queries spread over the SMs. When there are fewer blocks than SMs the longest one, cut at
    `split_keys`, is what takes the time.
    """
    constants = profile.prefill_attention
    busy = busy_units(profile, constants.grid, units)
    flops_per_pair = 4.0 * head_dim
    sm_flops = profile.card.flops / profile.card.units * constants.efficiency
    keys = pairs / tokens
    work = flops_per_pair * heads * (pairs + constants.diagonal * QUERY_TILE * tokens)
    work *= 1.0 + constants.ramp_tokens / (keys + QUERY_TILE)
    spread = work / (sm_flops * busy)
    longest = flops_per_pair * QUERY_TILE * (min(2.0 * keys, constants.split_keys) + QUERY_TILE) / sm_flops
    compute = smooth_max(spread, longest, constants.sharpness)
    moved = 4.0 * head_dim * (kv_heads * context_tokens + heads * tokens)
    memory = moved / drawn_bandwidth(profile, constants.bandwidth_efficiency, busy)
    return constants.floor_ns + smooth_max(compute, memory, constants.sharpness)


def cached_share(card: Card, moved: float) -> float:
    """Of so many bytes, what the L2 cache still holds: all up to half its size, nothing from 1.5 times it."""
    return min(1.0, max(0.0, 1.5 - moved / card.l2_bytes))


def elementwise_ns(profile: GpuProfile, kernel: str, tokens: float, moved: float, units: int) -> float:
    """`moved` bytes in all, over `tokens` blocks. An SM draws from the L2 cache no faster than from HBM."""
    constants = profile.elementwise.kernels[kernel]
    cached = constants.cached_gain * cached_share(profile.card, moved)
    share = units / profile.partition.saturating_units
    if cached < 1.0:
        share = min(share, constants.bandwidth_efficiency / (1.0 - cached))
    streamed = moved / (profile.card.bandwidth * share) + constants.row_ns * tokens / units
    return smooth_max(constants.floor_ns, streamed, constants.sharpness)


def all_reduce_ns(profile: GpuProfile, tp: int, message_bytes: float) -> float:
    """A sum over `tp` GPUs; 0 for one. A few SMs suffice for it, so that the partition does not matter."""
    if tp == 1:
        return 0.0
    constants = profile.all_reduce.by_tp[tp]
    return smooth_max(constants.floor_ns, message_bytes / constants.bandwidth, constants.sharpness)
