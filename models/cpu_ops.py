"""Operators on the cores of this machine.

Measured on two AVX2 cores (SmolLM2's shapes, 1 to 1,500 tokens): FBGEMM's packed fp16 product, which keeps
activations in float32, is at least as fast as float32 at every number of tokens, and 2 to 4 times as fast
for a decode step. So it is the only packed product here; float32 is the reference and the fallback.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cpu_attention import TorchAttention
from muxk.models.cpu_decode import DecodeAttention
from muxk.models.cpu_prefill import PrefillAttention
from muxk.models.errors import ModelError
from muxk.models.gguf_blocks import QuantisedMatrix
from muxk.models.ops import Attention, DecoderLayer, Embedding, Heads, KvLayer, LayerStack, Linear
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

TILED_ROWS = 120
"""FBGEMM cuts this many rows into tiles at once."""
BLOCKS = "blocks"
"""Weights in blocks of small integers, as their file holds them: for native operators only."""
DTYPES = ("auto", BLOCKS, "fp16", "float32")


class CpuOperators:
    """Operators in float32, torch's, over weights in float32 or packed fp16."""

    name = "torch"

    def __init__(self, dtype: str = "auto") -> None:
        """`auto` is fp16 where the packed product works, float32 elsewhere. ModelError if fp16 cannot."""
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is not known; known: {', '.join(DTYPES)}")
        if dtype == BLOCKS:
            raise ModelError("dtype 'blocks' needs the native operators; build them or use dtype auto")
        available = dtype != "float32" and packed_fp16_works()
        if dtype == "fp16" and not available:
            raise ModelError("packed fp16 products do not work on this machine; use dtype float32")
        self.dtype = "fp16" if available else "float32"
        self._half = available
        self._padding = _probed_padding() if available else ()

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._half:
            return Fp16Linear(weight, bias, self._padding)
        return Float32Linear(weight, bias)

    def embedding(self, weight: Tensor) -> Embedding:
        return TableEmbedding(weight.half() if self._half else weight)

    def quantised_linear(self, matrix: QuantisedMatrix, bias: Tensor | None) -> Linear | None:
        return None

    def quantised_embedding(self, matrix: QuantisedMatrix) -> Embedding | None:
        return None

    def layer_stack(self, layers: Sequence[DecoderLayer], epsilon: float) -> LayerStack | None:
        return None

    def padding(self, rows: int) -> int:
        return self._padding[rows % TILED_ROWS] if self._padding else 0

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return functional.rms_norm(x.add_(added), (x.shape[-1],), weight, epsilon)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def prefill_attention(
        self,
        page_table: NDArray[np.int32],
        new_tokens: Sequence[int],
        reused_tokens: Sequence[int],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> Attention:
        return TorchAttention(
            PrefillAttention(page_table, new_tokens, reused_tokens, window), heads, rotation
        )

    def decode_attention(
        self,
        page_table: NDArray[np.int32],
        positions: NDArray[np.int32],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> Attention:
        paged = DecodeAttention(page_table, positions, heads, window)
        return TorchAttention(paged, heads, rotation)

    def kv_layer(self, pages: int, kv_heads: int, head_dim: int) -> KvLayer:
        return KvLayer(
            keys=torch.zeros(pages, kv_heads, head_dim, PAGE_SIZE),
            values=torch.zeros(pages, kv_heads, PAGE_SIZE, head_dim),
        )


class Float32Linear:
    """The reference product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class Fp16Linear:
    """FBGEMM's product of float32 activations with a packed fp16 weight, accumulated in float32.

    FBGEMM cuts rows into tiles, and its kernels for tiles of different heights round differently. Rows are
    padded to a number whose tiles all round alike, so that a row's result never depends on its batch.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, padding: Sequence[int] = (0,) * TILED_ROWS
    ) -> None:
        """`padding[n]`: rows to add to `n` rows, counted modulo TILED_ROWS; see `row_padding`."""
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default
        self._padding = padding

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        added = self._padding[rows % TILED_ROWS]
        if added == 0:
            return self._product(x, self._packed)  # type: ignore[no-any-return]
        padded = functional.pad(x, (0, 0, 0, added))
        return self._product(padded, self._packed)[:rows]  # type: ignore[no-any-return]


def row_padding() -> tuple[int, ...]:
    """For each number of rows modulo TILED_ROWS, how many to add so that all tiles round alike.

    Found by trying, because the tiles differ between processors. With AVX2 it adds 2 to 1 row, 1 to 2 or 7.
    """
    generator = torch.Generator().manual_seed(0)
    product = Fp16Linear(torch.randn(96, 64, generator=generator), None)
    x = torch.randn(TILED_ROWS, 64, generator=generator)
    whole = product(x)
    alike = [torch.equal(product(x[:rows].contiguous()), whole[:rows]) for rows in range(1, TILED_ROWS + 1)]
    added = [alike.index(True, rows - 1) + 1 - rows for rows in range(1, TILED_ROWS + 1)]
    return (added[-1], *added[:-1])


def _probed_padding() -> tuple[int, ...]:
    """`row_padding` on one thread: products this small only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return row_padding()
    finally:
        torch.set_num_threads(threads)


class TableEmbedding:
    """A table of rows, kept in its own type and read as float32."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._table.index_select(0, tokens).float()


def packed_fp16_works() -> bool:
    """Whether FBGEMM's fp16 product runs here and agrees with float32 (it needs x86 with AVX2)."""
    weight = torch.linspace(-1.0, 1.0, 64 * 32).view(64, 32)
    x = torch.linspace(-1.0, 1.0, 2 * 32).view(2, 32)
    try:
        found = Fp16Linear(weight, None)(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(found, functional.linear(x, weight), rtol=1e-2, atol=1e-2))
