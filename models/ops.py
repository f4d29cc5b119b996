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
from muxk.models.gguf_blocks import QuantisedMatrix
from numpy.typing import NDArray
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""float32[tokens, in] -> float32[tokens, out]."""
Embedding = Callable[[Tensor], Tensor]
"""int64[tokens] -> float32[tokens, hidden]."""


@dataclass(frozen=True)
class KvLayer:
    """The KV pool of one layer, laid out as the attention of its device reads it.

    On the CPU keys lie transposed in their page. On a card both are halves of one tensor: see
    `cuda_kernels.empty_kv_layer`.
    """

    keys: Tensor
    """float32[pages, kv_heads, head_dim, PAGE_SIZE] on the CPU."""
    values: Tensor
    """float32[pages, kv_heads, PAGE_SIZE, head_dim] on the CPU."""


@dataclass(frozen=True)
class Slots:
    """Where the keys and values of the new tokens go; made once a call, used by every layer."""

    pages: Tensor
    """int64[tokens]."""
    offsets: Tensor
    """int64[tokens]: the place inside the page."""


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model, as they lie in a qkv product: queries, keys, values."""

    queries: int
    kv: int
    dim: int
    epsilon: float
    """Of the norms of queries and keys, for models that have them."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.queries // self.kv


@dataclass(frozen=True)
class HeadNorms:
    """The RMS norms that qwen3 puts on each head before the rotation."""

    queries: Tensor
    """float32[dim], interleaved as the heads are."""
    keys: Tensor


class Attention(Protocol):
    """The attention of one call: page tables and rotations made once, used by every layer."""

    def __call__(self, qkv: Tensor, norms: HeadNorms | None, kv: KvLayer) -> Tensor:
        """qkv [rows, (heads + 2 * kv_heads) * dim] -> [rows, heads * dim]; may overwrite qkv.

        Norms and rotates queries and keys, writes keys and values into the pages of their tokens, attends.
        Rows past the tokens of the call are padding and become zero.
        """


@dataclass(frozen=True)
class DecoderLayer:
    """The packed weights of one layer."""

    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LayerStack(Protocol):
    """Layers of a decoder whose operators are one call."""

    def __call__(
        self, layers: range, hidden: Tensor, attentions: Sequence[Attention], kv: Sequence[KvLayer]
    ) -> Tensor | None:
        """Run `layers` over float32[rows, hidden] in place, as the single operators would, to the last bit.

        `attentions` and `kv` are those of these layers. None where it cannot with such attentions; then
        nothing was done.
        """


class Operators(Protocol):
    """What a device offers to decoders. Instances hold no scratch: two threads may call at once."""

    dtype: str
    """How weights are held: `fp16`, `float32`, or `blocks`: as the file does where it has blocks; on a card
    torch's name of their type."""
    name: str
    """What computes all that is not a product: `native` or `torch`, on a card `triton`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack a float32 weight [out, in] once; the result computes `x @ weight.T + bias`."""

    def embedding(self, weight: Tensor) -> Embedding:
        """Keep a float32 table [vocabulary, hidden]; the result maps int64[tokens] to float32 rows."""

    def quantised_linear(self, matrix: QuantisedMatrix, bias: Tensor | None) -> Linear | None:
        """Pack a weight in blocks once, as `linear` does; None where it has to be dequantised for `linear`.

        Exact: each weight is what the file says, and activations stay float32.
        """

    def quantised_embedding(self, matrix: QuantisedMatrix) -> Embedding | None:
        """Keep a table in blocks, as `embedding` does; None where it has to be dequantised for it."""

    def layer_stack(self, layers: Sequence[DecoderLayer], epsilon: float) -> LayerStack | None:
        """All layers of a decoder; None where they have to run operator by operator."""

    def padding(self, rows: int) -> int:
        """How many rows to add so that the result of a row does not depend on how many there are."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight for [rows, width], as a new tensor."""

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add to x in place, then `rms_norm` of it as a new tensor."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2n] -> [rows, n]: silu of the first half times the second."""

    def prefill_attention(
        self,
        page_table: NDArray[np.int32],
        new_tokens: Sequence[int],
        reused_tokens: Sequence[int],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> Attention:
        """Causal attention of rows of new tokens, each after the reused tokens in its pages.

        `rotation` complex64[tokens, 1, dim / 2]: of each new token's position. With a `window` a token sees
        itself and the `window - 1` tokens before it, otherwise all before it.
        """

    def decode_attention(
        self,
        page_table: NDArray[np.int32],
        positions: NDArray[np.int32],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> Attention:
        """Attention of one token a row over `positions + 1` tokens; `positions` must ascend.

        `window` as in `prefill_attention`.
        """

    def kv_layer(self, pages: int, kv_heads: int, head_dim: int) -> KvLayer:
        """An empty KV pool of one layer."""


def kv_bytes_per_page(layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one page over all layers, float32."""
    return layers * 2 * kv_heads * head_dim * PAGE_SIZE * 4
