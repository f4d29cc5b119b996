"""Operators of a lane as Triton kernels: what runs on a card, and in CI under Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cuda_batch import Batch, Tables, upload_arrays
from muxk.models.cuda_kernels import Attend, AttentionShape, LanePlanner, Planner
from muxk.models.ops import HeadNorms, Heads, KvLayer
from muxk.models.triton_attention import attend_kernel, merge_kernel
from muxk.models.triton_kernels import rms_norm_kernel, rotate_append_kernel, silu_mul_kernel
from numpy.typing import NDArray
from torch import Tensor

SILU_BLOCK = 1024
HEADS_A_PROGRAM = 8
PREFILL_TILE = 64
"""Queries of a tile, those of all heads that share a KV head counted."""
STEP_TILE = 16
"""The least that tensor cores multiply."""
KEYS_A_BLOCK = 64
PROGRAMS_A_UNIT = 2
"""Contexts are split until each SM of the partition has so many programs."""


class TritonKernels:
    """Implements `cuda_kernels.Kernels`."""

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        self._norm(x, None, weight, epsilon, out)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        self._norm(x, added, weight, epsilon, out)

    def _norm(self, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, out: Tensor) -> None:
        rows, width = x.shape
        block = triton.next_power_of_2(width)
        rms_norm_kernel[rows,](
            *(x, x if added is None else added, weight, out, width, epsilon),
            HAS_ADDED=added is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        rows, width = out.shape
        grid = (rows, triton.cdiv(width, SILU_BLOCK))
        silu_mul_kernel[grid](gate_up, out, width, BLOCK=SILU_BLOCK)

    def rotate_append(
        self,
        qkv: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        batch: Batch,
        rotation: Tensor,
        kv: KvLayer,
        queries: Tensor,
    ) -> None:
        total = heads.queries + 2 * heads.kv
        block_heads = min(HEADS_A_PROGRAM, triton.next_power_of_2(total))
        grid = (qkv.shape[0], triton.cdiv(total, block_heads))
        query_norm, key_norm = (qkv, qkv) if norms is None else (norms.queries, norms.keys)
        rotate_append_kernel[grid](
            *(qkv, queries, kv.keys, kv.values, query_norm, key_norm),
            *(batch.positions, batch.slots, rotation, kv.keys.stride(0), heads.epsilon),
            HAS_NORMS=norms is not None,
            HEADS=heads.queries,
            KV_HEADS=heads.kv,
            DIM=heads.dim,
            PAGE=PAGE_SIZE,
            BLOCK_HEADS=block_heads,
            BLOCK_PAIRS=triton.next_power_of_2(heads.dim // 2),
        )


@dataclass(frozen=True)
class TritonAttentionKind:
    """Our own paged attention: where FlashInfer is not installed, and the second opinion where it is."""

    shape: AttentionShape
    name: str = "triton"

    def planner(self, units: int) -> LanePlanner:
        return TritonPlanner(self.shape, units)


@dataclass(frozen=True)
class _Tiles:
    """Which queries each tile of a launch holds."""

    size: int
    rows: Tensor
    """int32[tiles]."""
    firsts: Tensor
    """int32[tiles]: the first new token of the row that is in the tile."""
    splits: int
    """Programs that share the keys of a tile."""


class TritonPlanner:
    """Tiles of whole batches, for a launch at a time."""

    def __init__(self, shape: AttentionShape, units: int) -> None:
        self._shape = shape
        self._units = units
        self._workspace = _Workspace(shape, units, _tile(shape.heads, PREFILL_TILE))

    @property
    def bytes(self) -> int:
        return self._workspace.bytes

    def step_planner(self, rows: int, pages: int) -> Planner:
        return TritonStepPlanner(self._shape, self._units, rows, self._workspace)

    def plan(self, batch: Batch) -> Attend:
        heads, tables = self._shape.heads, batch.host
        size = _tile(heads, STEP_TILE if tables.most_new_tokens == 1 else PREFILL_TILE)
        rows, firsts = _tiles_of(tables, size // heads.group)
        blocks = -(-int(tables.contexts.max()) // KEYS_A_BLOCK)
        splits = splits_for(self._units, len(rows) * heads.kv, blocks)
        rows_there, firsts_there = upload_arrays([rows, firsts], self._shape.device)
        tiles = _Tiles(size, rows_there, firsts_there, splits)
        return _attend(self._shape, batch, tiles, self._workspace)


class TritonStepPlanner:
    """The tiles of a decode step of a fixed number of rows: the same for each."""

    bytes = 0

    def __init__(self, shape: AttentionShape, units: int, rows: int, workspace: _Workspace) -> None:
        self._shape = shape
        self._workspace = workspace
        size = _tile(shape.heads, STEP_TILE)
        every = torch.arange(rows, dtype=torch.int32, device=shape.device)
        self._tiles = _Tiles(size, every, torch.zeros_like(every), splits_for(units, rows * shape.heads.kv))

    def plan(self, batch: Batch) -> Attend:
        return _attend(self._shape, batch, self._tiles, self._workspace)


class _Workspace:
    """What split programs leave for the merge: sums, and (maximum, sum of weights) of each query."""

    def __init__(self, shape: AttentionShape, units: int, tile: int) -> None:
        queries = 2 * PROGRAMS_A_UNIT * units * tile
        width = _block_dim(shape.heads)
        self.parts = torch.empty(queries * width, dtype=torch.float32, device=shape.device)
        self.statistics = torch.empty(queries * 2, dtype=torch.float32, device=shape.device)

    @property
    def bytes(self) -> int:
        return self.parts.nbytes + self.statistics.nbytes


def splits_for(units: int, programs: int, blocks: int | None = None) -> int:
    """Programs that share the keys of each tile, so that a partition of so many units is full.

    Never more than key blocks, where that is known. Where there is more than one, `programs` times it is
    less than 2 * PROGRAMS_A_UNIT * units, which workspaces are made for.
    """
    wanted = max(1, -(-PROGRAMS_A_UNIT * units // programs))
    return wanted if blocks is None else min(wanted, blocks)


def _tiles_of(tables: Tables, queries: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(row, first new token in it) of each tile of at most so many new tokens; the last tiles of a row first.

    They see the most keys, so that what runs at the end is short.
    """
    new = np.diff(tables.query_starts)
    counts = -(-new // queries)
    rows = np.repeat(np.arange(len(new), dtype=np.int32), counts)
    ends = np.repeat(np.cumsum(counts), counts)
    firsts = (ends - 1 - np.arange(len(rows))) * queries
    return rows, firsts.astype(np.int32)


def _attend(shape: AttentionShape, batch: Batch, tiles: _Tiles, workspace: _Workspace) -> Attend:
    heads, count = shape.heads, tiles.rows.shape[0]
    common = {
        "KV_HEADS": heads.kv,
        "GROUP": heads.group,
        "DIM": heads.dim,
        "TILE": tiles.size,
        "BLOCK_DIM": _block_dim(heads),
    }

    def attend(queries: Tensor, kv: KvLayer, window: int | None, out: Tensor) -> None:
        attend_kernel[count, heads.kv, tiles.splits](
            *(queries, kv.keys, kv.values, out, workspace.parts, workspace.statistics),
            *(tiles.rows, tiles.firsts, batch.query_starts, batch.page_starts, batch.contexts, batch.pages),
            *(kv.keys.stride(0), heads.dim**-0.5 * math.log2(math.e), window or 0),
            HAS_WINDOW=window is not None,
            SPLIT=tiles.splits > 1,
            PAGE=PAGE_SIZE,
            KEYS=KEYS_A_BLOCK,
            **common,
        )
        if tiles.splits > 1:
            merge_kernel[count, heads.kv](
                *(out, workspace.parts, workspace.statistics, tiles.rows, tiles.firsts, batch.query_starts),
                tiles.splits,
                **common,
            )

    return attend


def _tile(heads: Heads, least: int) -> int:
    return max(least, int(triton.next_power_of_2(heads.group)))


def _block_dim(heads: Heads) -> int:
    return max(16, int(triton.next_power_of_2(heads.dim)))
