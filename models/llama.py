"""Decoders of the llama family, one layer at a time: llama, mistral, qwen2, qwen3.

State is passed in and out; nothing is kept between calls, so that a prefill may stop after any layer and
two lanes may run at once. Query, key and value projections are one product, and so are gate and up.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from muxk.models.config import ModelConfig
from muxk.models.errors import ModelError, wrong_shape
from muxk.models.ops import Attention, Embedding, HeadNorms, Heads, KvLayer, Linear, Operators
from muxk.models.weights import Progress, Weights
from torch import Tensor
from torch.nn import functional

MLP_BLOCK = 480
"""Tokens whose gate and up values exist at once; bounds the scratch of long prompts."""

LOADING_THREADS = 4
"""Threads that dequantise and pack; what is unpacked at once is one layer a thread and the head."""


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


class LlamaDecoder:
    """Embedding, layers and head over packed weights."""

    def __init__(
        self,
        config: ModelConfig,
        operators: Operators,
        embedding: Embedding,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self.operators = operators
        self.heads = Heads(config.heads, config.kv_heads, config.head_dim, config.rms_epsilon)
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rope = rope_table(config)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64[tokens] -> float32[rows, hidden]: padded once, so that no product of the layers has to."""
        added = self.operators.padding(tokens.shape[0])
        return self._embedding(functional.pad(tokens, (0, added)) if added else tokens)

    def rotation(self, positions: Tensor) -> Tensor:
        """complex64[tokens, 1, head_dim / 2] for int64[tokens] positions, for attention."""
        return self._rope.index_select(0, positions)

    def layer(self, index: int, hidden: Tensor, attention: Attention, kv: KvLayer) -> Tensor:
        """Run one layer over float32[rows, hidden], which it changes in place and returns."""
        layer = self._layers[index]
        normed = self.operators.rms_norm(hidden, layer.input_norm, self.config.rms_epsilon)
        attended = layer.output(attention(layer.qkv(normed), layer.head_norms, kv))
        for start in range(0, hidden.shape[0], MLP_BLOCK):
            block = slice(start, start + MLP_BLOCK)
            self._mlp(layer, hidden[block], attended[block])
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Logits float32[tokens, vocabulary] of float32[tokens, hidden]."""
        return self._head(self.operators.rms_norm(hidden, self._final_norm, self.config.rms_epsilon))

    def _mlp(self, layer: DecoderLayer, hidden: Tensor, attended: Tensor) -> None:
        normed = self.operators.add_rms_norm(hidden, attended, layer.mlp_norm, self.config.rms_epsilon)
        hidden.add_(layer.down(self.operators.silu_mul(layer.gate_up(normed))))


def rope_table(config: ModelConfig) -> Tensor:
    """exp(i * position * theta^(-2j/dim)) for every position and pair j: complex64[positions, 1, dim / 2].

    RoFormer, section 3.4.2. Angles are computed in float32 as transformers does.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    positions = torch.arange(config.max_context_tokens, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def load_decoder(weights: Weights, operators: Operators, progress: Progress | None = None) -> LlamaDecoder:
    """Read and pack every tensor. ModelError names a tensor that is missing or has a wrong shape."""
    config = weights.config
    reader = _Reader(weights, progress)
    with ThreadPoolExecutor(LOADING_THREADS) as pool:
        ends = pool.submit(_load_ends, reader, config, operators)
        try:
            load = partial(_load_layer, reader, config, operators)
            layers = tuple(pool.map(load, range(config.layers)))
            embedding, final_norm, head = ends.result()
        except ModelError:
            pool.shutdown(cancel_futures=True)
            raise
    return LlamaDecoder(config, operators, embedding, layers, final_norm, head)


def tensor_names(config: ModelConfig) -> tuple[str, ...]:
    """The tensors of a checkpoint, under their Hugging Face names."""
    parts = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    parts += ["self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    if config.query_key_norm:
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.tied_embeddings:
        names.append("lm_head.weight")
    for index in range(config.layers):
        names += [f"model.layers.{index}.{part}.weight" for part in parts]
        if config.qkv_bias:
            names += [f"model.layers.{index}.self_attn.{part}_proj.bias" for part in "qkv"]
    return tuple(names)


class _Reader:
    """Takes tensors from a checkpoint, checks their shape and reports progress, one call at a time."""

    def __init__(self, weights: Weights, progress: Progress | None) -> None:
        self._weights = weights
        self._progress = progress
        self._total = sum(weights.stored_bytes(name) for name in tensor_names(weights.config))
        self._done = 0
        self._lock = threading.Lock()

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._weights.tensor(name)
        if tuple(tensor.shape) != shape:
            raise wrong_shape(self._weights.path, name, shape, tuple(tensor.shape))
        with self._lock:
            self._done += self._weights.stored_bytes(name)
            if self._progress is not None:
                self._progress(self._done, self._total, name)
        return tensor


def _load_ends(
    reader: _Reader, config: ModelConfig, operators: Operators
) -> tuple[Embedding, Tensor, Linear]:
    """What lies before and after the layers: embedding, final norm, head."""
    table = reader.take("model.embed_tokens.weight", config.vocabulary, config.hidden)
    head = table
    if not config.tied_embeddings:
        head = reader.take("lm_head.weight", config.vocabulary, config.hidden)
    final_norm = reader.take("model.norm.weight", config.hidden)
    return operators.embedding(table), final_norm, operators.linear(head, None)


def _load_layer(reader: _Reader, config: ModelConfig, operators: Operators, index: int) -> DecoderLayer:
    place = f"model.layers.{index}"
    hidden, inner = config.hidden, config.intermediate
    gate = reader.take(f"{place}.mlp.gate_proj.weight", inner, hidden)
    up = reader.take(f"{place}.mlp.up_proj.weight", inner, hidden)
    down = reader.take(f"{place}.mlp.down_proj.weight", hidden, inner)
    output = reader.take(f"{place}.self_attn.o_proj.weight", hidden, config.query_width)
    return DecoderLayer(
        input_norm=reader.take(f"{place}.input_layernorm.weight", hidden),
        qkv=_load_qkv(reader, config, operators, f"{place}.self_attn"),
        head_norms=_load_head_norms(reader, config, f"{place}.self_attn"),
        output=operators.linear(output, None),
        mlp_norm=reader.take(f"{place}.post_attention_layernorm.weight", hidden),
        gate_up=operators.linear(torch.cat([gate, up]), None),
        down=operators.linear(down, None),
    )


def _load_qkv(reader: _Reader, config: ModelConfig, operators: Operators, place: str) -> Linear:
    """The three projections as one product, queries and keys with interleaved heads."""
    widths = (("q", config.query_width), ("k", config.kv_width), ("v", config.kv_width))
    weights = [reader.take(f"{place}.{part}_proj.weight", width, config.hidden) for part, width in widths]
    biases: list[Tensor] = []
    if config.qkv_bias:
        biases = [reader.take(f"{place}.{part}_proj.bias", width) for part, width in widths]
    return operators.linear(
        torch.cat(_interleaved_qk(weights, config)),
        torch.cat(_interleaved_qk(biases, config)) if biases else None,
    )


def _load_head_norms(reader: _Reader, config: ModelConfig, place: str) -> HeadNorms | None:
    if not config.query_key_norm:
        return None
    norms = [reader.take(f"{place}.{part}_norm.weight", config.head_dim) for part in "qk"]
    return HeadNorms(*(interleave_heads(norm, config.head_dim) for norm in norms))


def _interleaved_qk(qkv: list[Tensor], config: ModelConfig) -> list[Tensor]:
    """Queries and keys with interleaved heads, values as they are."""
    dims = config.head_dim
    return [interleave_heads(part, dims) for part in qkv[:2]] + qkv[2:]


def interleave_heads(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from halves (x0 x1 .. y0 y1 ..) to pairs (x0 y0 x1 y1 ..)."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
