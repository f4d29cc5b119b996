"""Operators of the CPU in C: products of weights in blocks, and what a step does besides its products.

Measured for a decode step of SmolLM2 at batch 1 on one thread: torch's operators outside the products took
25 to 30 ms, most of it the cost of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np
import torch
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cpu_ops import BLOCKS, CpuOperators
from muxk.models.cpu_prefill import row_positions
from muxk.models.gguf_blocks import QuantisedMatrix
from muxk.models.native_blocks import BlockEmbedding, BlockLinear, takes
from muxk.models.native_library import (
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    TILE_ROWS,
    Batch,
    Layer,
    NativeLibrary,
)
from muxk.models.ops import Embedding, HeadNorms, Heads, KvLayer, Linear
from numpy.typing import NDArray
from torch import Tensor

UNLIMITED = 1 << 40
"""A window that no context reaches."""
WORK_PER_NORMED = 2
WORK_PER_SILU = 16


class NativeOperators(CpuOperators):
    """Products of blocks and all that is not a product from the native library, other products from torch."""

    name = "native"

    def __init__(self, library: NativeLibrary, dtype: str = "auto") -> None:
        """`blocks` and `auto` keep weights in blocks as their file does, and others as `auto` elsewhere."""
        super().__init__("auto" if dtype == BLOCKS else dtype)
        self._library = library
        self._pads = False
        if dtype in ("auto", BLOCKS):
            self.dtype = BLOCKS

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        self._pads = True
        return super().linear(weight, bias)

    def padding(self, rows: int) -> int:
        """None as long as all products are of blocks."""
        return super().padding(rows) if self._pads else 0

    def quantised_linear(self, matrix: QuantisedMatrix, bias: Tensor | None) -> Linear | None:
        if self.dtype != BLOCKS or not takes(matrix):
            return None
        return BlockLinear(self._library, matrix, bias)

    def quantised_embedding(self, matrix: QuantisedMatrix) -> Embedding | None:
        return BlockEmbedding(matrix) if self.dtype == BLOCKS else None

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self._norm(x, None, weight, epsilon)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        assert added.shape == x.shape, (added.shape, x.shape)
        return self._norm(x, _address(added), weight, epsilon)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        functions = self._library.for_work(rows * width * WORK_PER_SILU)
        functions.silu_mul(_address(gate_up), out.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def prefill_attention(
        self,
        page_table: NDArray[np.int32],
        new_tokens: Sequence[int],
        reused_tokens: Sequence[int],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> NativeAttention:
        return NativeAttention(self._library, page_table, new_tokens, reused_tokens, heads, rotation, window)

    def decode_attention(
        self,
        page_table: NDArray[np.int32],
        positions: NDArray[np.int32],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> NativeAttention:
        ones = (1,) * len(positions)
        return NativeAttention(self._library, page_table, ones, positions.tolist(), heads, rotation, window)

    def _norm(self, x: Tensor, added: int | None, weight: Tensor, epsilon: float) -> Tensor:
        rows, width = x.shape
        assert weight.shape == (width,), (weight.shape, width)
        out = torch.empty(rows, width)
        functions = self._library.for_work(rows * width * WORK_PER_NORMED)
        functions.rms_norm(
            _address(x),
            added,
            _address(weight),
            out.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
            epsilon,
        )
        return out


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
        self._batch = _batch(self._kept, heads, work, UNLIMITED if window is None else window)

    def __call__(self, qkv: Tensor, norms: HeadNorms | None, kv: KvLayer) -> Tensor:
        heads = self._heads
        rows = qkv.shape[0]
        assert qkv.shape[1] == (heads.queries + 2 * heads.kv) * heads.dim, qkv.shape
        assert rows >= self._batch.tokens, (rows, self._batch.tokens)
        out = torch.empty(rows, heads.queries * heads.dim)
        self._batch.padded_tokens = rows
        layer = Layer(
            qkv=_address(qkv),
            query_norm=_address(norms.queries) if norms else None,
            key_norm=_address(norms.keys) if norms else None,
            keys=_address(kv.keys),
            values=_address(kv.values),
            out=out.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._functions.attend(byref(self._batch), byref(layer))
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


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.dtype == torch.float32, tensor.dtype
    return tensor.data_ptr()
