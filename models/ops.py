"""The operators a decoder is written in: the seam between models and devices.

Tensors of one call hold the tokens of all its rows, one row after the other, without padding. Rotary
embedding works on *interleaved* heads (pairs `2i, 2i+1`), so that it is one complex product; decoders
permute query and key weights for it once, when they load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from muxk.kernel.work import PAGE_SIZE
from numpy.typing import NDArray
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""float32[tokens, in] -> float32[tokens, out]."""
Embedding = Callable[[Tensor], Tensor]
"""int64[tokens] -> float32[tokens, hidden]."""


@dataclass(frozen=True)
class KvLayer:
    """The KV pool of one layer. Keys lie transposed in their page, as decode attention reads them."""

    keys: Tensor
    """float32[pages, kv_heads, head_dim, PAGE_SIZE]."""
    values: Tensor
    """float32[pages, kv_heads, PAGE_SIZE, head_dim]."""


@dataclass(frozen=True)
class Slots:
    """Where the keys and values of the new tokens go; made once a call, used by every layer."""

    pages: Tensor
    """int64[tokens]."""
    offsets: Tensor
    """int64[tokens]: the place inside the page."""


class Attention(Protocol):
    """The attention of one call: page tables and masks made once, used by every layer."""

    slots: Slots

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, kv: KvLayer) -> Tensor:
        """queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim] -> [tokens, heads * dim].

        The new keys and values are in `kv` already.
        """


class Operators(Protocol):
    """What a device offers to decoders. Instances hold no scratch: two threads may call at once."""

    dtype: str
    """How weights are held: `fp16` or `float32`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack a float32 weight [out, in] once; the result computes `x @ weight.T + bias`."""

    def embedding(self, weight: Tensor) -> Embedding:
        """Keep a float32 table [vocabulary, hidden]; the result maps int64[tokens] to float32 rows."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, as a new tensor."""

    def rope(self, heads: Tensor, table: Tensor) -> Tensor:
        """Rotate interleaved pairs of [tokens, heads, dim] by complex64[tokens, 1, dim / 2]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2n] -> [tokens, n]: silu of the first half times the second."""

    def append_kv(self, kv: KvLayer, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [tokens, kv_heads, dim] into their pages."""

    def prefill_attention(
        self, page_table: NDArray[np.int32], new_tokens: Sequence[int], reused_tokens: Sequence[int]
    ) -> Attention:
        """Causal attention of rows of new tokens, each after the reused tokens in its pages."""

    def decode_attention(
        self, page_table: NDArray[np.int32], positions: NDArray[np.int32], heads: int, kv_heads: int, dim: int
    ) -> Attention:
        """Attention of one token a row over `positions + 1` tokens; `positions` must ascend."""

    def kv_layer(self, pages: int, kv_heads: int, head_dim: int) -> KvLayer:
        """An empty KV pool of one layer."""


def kv_bytes_per_page(layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one page over all layers, float32."""
    return layers * 2 * kv_heads * head_dim * PAGE_SIZE * 4
