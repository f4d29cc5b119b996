"""Attention of the CPU in C, from the qkv product to the input of the output product."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np
import torch
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cpu_prefill import row_positions
from muxk.models.native_library import (
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    TILE_ROWS,
    Batch,
    Layer,
    NativeLibrary,
    address,
)
from muxk.models.ops import HeadNorms, Heads, KvLayer
from numpy.typing import NDArray
from torch import Tensor

UNLIMITED = 1 << 40
"""A window that no context reaches."""


class NativeAttention:
    """The attention of one call, prefill or decode: the C code knows no difference."""

    def __init__(
        self,
        library: NativeLibrary,
        page_table: NDArray[np.int32],
        new_tokens: Sequence[int],
        reused_tokens: Sequence[int],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> None:
        """page_table int32[rows, pages]; rotation complex64[tokens, 1, dim / 2]; a window is at least 1."""
        assert window is None or window >= 1, window
        assert supports(heads.dim), heads.dim
        positions = row_positions(new_tokens, reused_tokens).astype(np.int32)
        owners = np.repeat(np.arange(len(page_table), dtype=np.int32), new_tokens)
        tiles = _tiles(new_tokens, max(1, TILE_ROWS // heads.group))
        assert rotation.shape[0] == len(positions), (rotation.shape, len(positions))
        assert positions.max() < page_table.shape[1] * PAGE_SIZE, (positions.max(), page_table.shape)
        seen = positions.astype(np.int64) + 1 if window is None else np.minimum(positions + 1, window)
        work = 2 * int(seen.sum(dtype=np.int64)) * heads.queries * heads.dim
        self._heads = heads
        self._functions = library.for_work(work)
        # The struct holds addresses only; these are what they point to.
        self._kept = (owners, positions, np.ascontiguousarray(page_table), tiles, rotation.contiguous())
        self.batch = _batch(self._kept, heads, work, UNLIMITED if window is None else window)

    def __call__(self, qkv: Tensor, norms: HeadNorms | None, kv: KvLayer) -> Tensor:
        heads = self._heads
        rows = qkv.shape[0]
        assert qkv.shape[1] == (heads.queries + 2 * heads.kv) * heads.dim, qkv.shape
        assert rows >= self.batch.tokens, (rows, self.batch.tokens)
        out = torch.empty(rows, heads.queries * heads.dim)
        self.batch.padded_tokens = rows
        layer = Layer(
            qkv=address(qkv),
            query_norm=address(norms.queries) if norms else None,
            key_norm=address(norms.keys) if norms else None,
            keys=address(kv.keys),
            values=address(kv.values),
            out=out.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._functions.attend(byref(self.batch), byref(layer))
        return out


def supports(head_dim: int) -> bool:
    """Whether the C code can work on heads of this size."""
    return head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM


def _batch(
    kept: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Tensor],
    heads: Heads,
    work: int,
    window: int,
) -> Batch:
    owners, positions, pages, tiles, rotation = kept
    return Batch(
        tokens=len(positions),
        padded_tokens=len(positions),
        tiles=len(tiles),
        pages_per_row=pages.shape[1],
        heads=heads.queries,
        kv_heads=heads.kv,
        dim=heads.dim,
        work=work,
        window=window,
        epsilon=heads.epsilon,
        owners=owners.ctypes.data,
        positions=positions.ctypes.data,
        pages=pages.ctypes.data,
        tiles_of=tiles.ctypes.data,
        rotation=rotation.data_ptr(),
    )


def _tiles(new_tokens: Sequence[int], tile_tokens: int) -> NDArray[np.int32]:
    """Cut rows into tiles: int32[tiles, 2], the first token of each and how many it has."""
    tiles, first = [], 0
    for new in new_tokens:
        tiles += [(first + at, min(tile_tokens, new - at)) for at in range(0, new, tile_tokens)]
        first += new
    return np.array(tiles, dtype=np.int32)
