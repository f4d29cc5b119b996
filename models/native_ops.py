"""Operators of the CPU in C: products of weights in blocks, and what a step does besides its products.

Measured for a decode step of SmolLM2 at batch 1 on one thread: torch's operators outside the products took
25 to 30 ms, most of it the cost of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from muxk.models.cpu_ops import BLOCKS, CpuOperators
from muxk.models.gguf_blocks import QuantisedMatrix
from muxk.models.native_attention import NativeAttention
from muxk.models.native_blocks import BlockEmbedding, BlockLinear, takes
from muxk.models.native_layers import NativeLayers, all_of_blocks
from muxk.models.native_library import NativeLibrary, address
from muxk.models.ops import DecoderLayer, Embedding, Heads, LayerStack, Linear
from numpy.typing import NDArray
from torch import Tensor

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

    def layer_stack(self, layers: Sequence[DecoderLayer], epsilon: float) -> LayerStack | None:
        return NativeLayers(self._library, layers, epsilon) if all_of_blocks(layers) else None

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self._norm(x, None, weight, epsilon)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        assert added.shape == x.shape, (added.shape, x.shape)
        return self._norm(x, address(added), weight, epsilon)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        functions = self._library.for_work(rows * width * WORK_PER_SILU)
        functions.silu_mul(address(gate_up), out.data_ptr(), rows, width, torch.get_num_threads())
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
            address(x),
            added,
            address(weight),
            out.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
            epsilon,
        )
        return out
