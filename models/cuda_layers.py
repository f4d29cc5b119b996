"""The decoder layers of a card: weights held there, and layers that write into buffers of their lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from muxk.models.config import ModelConfig
from muxk.models.cuda_batch import Batch
from muxk.models.cuda_kernels import Attend, Kernels, empty_kv_layer
from muxk.models.gguf_blocks import QuantisedMatrix
from muxk.models.ops import Attention, DecoderLayer, Embedding, HeadNorms, Heads, KvLayer, LayerStack, Linear
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


class DenseLinear:
    """A product over a weight [out, in] in the type that it is computed in."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.into(x, x.new_empty(x.shape[0], self._transposed.shape[1]))

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """x [rows, in] -> out [rows, out], which is returned."""
        if self._bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self._bias, x, self._transposed, out=out)
        return out


class Scratch:
    """The activations of a lane. What the attention of a layer needs makes room for what its MLP needs."""

    def __init__(self, config: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tokens = tokens
        qkv = config.query_width + 2 * config.kv_width
        self._attention = (qkv, config.query_width, config.query_width)
        self._mlp = (2 * config.intermediate, config.intermediate)
        wider = max(sum(self._attention), sum(self._mlp))
        self._shared = torch.empty(tokens * wider, dtype=dtype, device=device)
        self._normed = torch.empty(tokens, config.hidden, dtype=dtype, device=device)
        self._projected = torch.empty_like(self._normed)

    @property
    def like(self) -> Tensor:
        """A tensor of its type and device."""
        return self._normed

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (self._shared, self._normed, self._projected))

    def hidden(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(normed, projected), each [tokens, hidden]."""
        return self._normed[:tokens], self._projected[:tokens]

    def attention(self, tokens: int) -> list[Tensor]:
        """[qkv, queries, attended], each [tokens, width]."""
        return self._cut(self._attention, tokens)

    def mlp(self, tokens: int) -> list[Tensor]:
        """[gate and up, their product], each [tokens, width]."""
        return self._cut(self._mlp, tokens)

    def _cut(self, widths: Sequence[int], tokens: int) -> list[Tensor]:
        starts = np.cumsum([0, *(tokens * width for width in widths)]).tolist()
        return [
            self._shared[start : start + tokens * width].view(tokens, width)
            for start, width in zip(starts, widths, strict=False)
        ]


@dataclass(frozen=True)
class LaneAttention:
    """Implements `ops.Attention` for the layers of one window, and lends them the buffers of its lane."""

    kernels: Kernels
    scratch: Scratch
    heads: Heads
    rotation: Tensor
    """float32[positions, dim / 2, 2]."""
    batch: Batch
    attend: Attend
    window: int | None

    def __call__(self, qkv: Tensor, norms: HeadNorms | None, kv: KvLayer) -> Tensor:
        tokens = qkv.shape[0]
        _, queries, attended = self.scratch.attention(tokens)
        self.kernels.rotate_append(qkv, self.heads, norms, self.batch, self.rotation, kv, queries)
        shape = (tokens, self.heads.queries, self.heads.dim)
        self.attend(queries.view(shape), kv, self.window, attended.view(shape))
        return attended


class CudaOperators:
    """Implements `ops.Operators`: weights in one type on one device, layers as one call.

    Attention is made by the runner, for each lane by itself.
    """

    name: str

    def __init__(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        self.kernels = kernels
        self.name = kernels.name
        self.type = dtype
        self.device = device
        self.dtype = str(dtype).removeprefix("torch.")

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(self._placed(weight), None if bias is None else self._placed(bias))

    def embedding(self, weight: Tensor) -> Embedding:
        table = self._placed(weight)
        return lambda tokens: functional.embedding(tokens, table)

    def quantised_linear(self, matrix: QuantisedMatrix, bias: Tensor | None) -> Linear | None:
        return None

    def quantised_embedding(self, matrix: QuantisedMatrix) -> Embedding | None:
        return None

    def layer_stack(self, layers: Sequence[DecoderLayer], epsilon: float) -> LayerStack | None:
        return CudaLayerStack([self._placed_layer(layer) for layer in layers], epsilon)

    def padding(self, rows: int) -> int:
        return 0

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        self.kernels.rms_norm(x, self._placed(weight), epsilon, out)
        return out

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        self.kernels.add_rms_norm(x, added, self._placed(weight), epsilon, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self.kernels.silu_mul(gate_up, out)
        return out

    def prefill_attention(
        self,
        page_table: NDArray[np.int32],
        new_tokens: Sequence[int],
        reused_tokens: Sequence[int],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> Attention:
        raise NotImplementedError("the attention of a card belongs to a lane: see LaneAttention")

    def decode_attention(
        self,
        page_table: NDArray[np.int32],
        positions: NDArray[np.int32],
        heads: Heads,
        rotation: Tensor,
        window: int | None = None,
    ) -> Attention:
        raise NotImplementedError("the attention of a card belongs to a lane: see LaneAttention")

    def kv_layer(self, pages: int, kv_heads: int, head_dim: int) -> KvLayer:
        return empty_kv_layer(pages, kv_heads, head_dim, self.type, self.device)

    def _placed(self, tensor: Tensor) -> Tensor:
        """On the device and in its type; the tensor itself when it is."""
        return tensor.to(self.device).to(self.type).contiguous()

    def _placed_layer(self, layer: DecoderLayer) -> DecoderLayer:
        norms = layer.head_norms
        return DecoderLayer(
            input_norm=self._placed(layer.input_norm),
            qkv=layer.qkv,
            head_norms=norms and HeadNorms(self._placed(norms.queries), self._placed(norms.keys)),
            output=layer.output,
            mlp_norm=self._placed(layer.mlp_norm),
            gate_up=layer.gate_up,
            down=layer.down,
        )


class CudaLayerStack:
    """Layers one after the other; the last product of one is added with the first norm of the next."""

    def __init__(self, layers: Sequence[DecoderLayer], epsilon: float) -> None:
        self._layers = layers
        self._epsilon = epsilon

    def __call__(
        self, layers: range, hidden: Tensor, attentions: Sequence[Attention], kv: Sequence[KvLayer]
    ) -> Tensor | None:
        pending: Tensor | None = None
        for index, attention, pool in zip(layers, attentions, kv, strict=True):
            assert isinstance(attention, LaneAttention), attention
            pending = self._layer(self._layers[index], hidden, pending, attention, pool)
        return hidden if pending is None else hidden.add_(pending)

    def _layer(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        pending: Tensor | None,
        attention: LaneAttention,
        kv: KvLayer,
    ) -> Tensor:
        """Run a layer on `hidden` plus `pending`; gives what is still to be added to `hidden`."""
        tokens, kernels, scratch = hidden.shape[0], attention.kernels, attention.scratch
        normed, projected = scratch.hidden(tokens)
        if pending is None:
            kernels.rms_norm(hidden, layer.input_norm, self._epsilon, normed)
        else:
            kernels.add_rms_norm(hidden, pending, layer.input_norm, self._epsilon, normed)
        qkv, *_ = scratch.attention(tokens)
        attended = attention(_into(layer.qkv, normed, qkv), layer.head_norms, kv)
        _into(layer.output, attended, projected)
        kernels.add_rms_norm(hidden, projected, layer.mlp_norm, self._epsilon, normed)
        gate_up, product = scratch.mlp(tokens)
        kernels.silu_mul(_into(layer.gate_up, normed, gate_up), product)
        return _into(layer.down, product, projected)


def _into(linear: Linear, x: Tensor, out: Tensor) -> Tensor:
    assert isinstance(linear, DenseLinear), linear
    return linear.into(x, out)
