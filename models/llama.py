"""Decoders of the llama family, one layer at a time: llama, mistral, qwen2, qwen3.

State is passed in and out; nothing is kept between calls, so that a prefill may stop after any layer and
two lanes may run at once. Query, key and value projections are one product, and so are gate and up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from muxk.models.config import ModelConfig
from muxk.models.errors import ModelError, wrong_shape
from muxk.models.gguf_blocks import QuantisedMatrix, concat
from muxk.models.ops import (
    Attention,
    DecoderLayer,
    Embedding,
    HeadNorms,
    Heads,
    KvLayer,
    Linear,
    Operators,
)
from muxk.models.rope import rope_table
from muxk.models.weights import Progress, QuantisedWeights, Weights
from torch import Tensor
from torch.nn import functional

MLP_BLOCK = 480
"""Tokens whose gate and up values exist at once; bounds the scratch of long prompts."""

LOADING_THREADS = 4
"""Threads that dequantise and pack; what is unpacked at once is one layer a thread and the head."""


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
        self._stack = operators.layer_stack(layers, config.rms_epsilon)
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

    def window(self, index: int) -> int | None:
        """Tokens that a token sees in a layer, itself included; None where it sees all before it.

        The attention given to `layer` has to keep to it. Pages that a window has passed stay in use.
        """
        return self.config.window(index)

    def layers(
        self, layers: range, hidden: Tensor, attentions: Sequence[Attention], kv: Sequence[KvLayer]
    ) -> Tensor:
        """Run layers over float32[rows, hidden], in place; `attentions` and `kv` are those of the layers."""
        if self._stack is not None:
            done = self._stack(layers, hidden, attentions, kv)
            if done is not None:
                return done
        for index, attention, pool in zip(layers, attentions, kv, strict=True):
            hidden = self.layer(index, hidden, attention, pool)
        return hidden

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


def load_decoder(weights: Weights, operators: Operators, progress: Progress | None = None) -> LlamaDecoder:
    """Read and pack every tensor. ModelError names a tensor that is missing or has a wrong shape."""
    config = weights.config
    packer = _Packer(_Reader(weights, progress), config, operators)
    with ThreadPoolExecutor(LOADING_THREADS) as pool:
        ends = pool.submit(packer.ends)
        try:
            layers = tuple(pool.map(packer.layer, range(config.layers)))
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
    biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if config.qkv_bias else []
    biased += ["self_attn.o_proj"] if config.output_bias else []
    biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if config.mlp_bias else []
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.tied_embeddings:
        names.append("lm_head.weight")
    for index in range(config.layers):
        names += [f"model.layers.{index}.{part}.weight" for part in parts]
        names += [f"model.layers.{index}.{part}.bias" for part in biased]
    return tuple(names)


class _Reader:
    """Takes tensors from a checkpoint, checks their shape and reports progress, one call at a time."""

    def __init__(self, weights: Weights, progress: Progress | None) -> None:
        self._weights = weights
        self._progress = progress
        self._left = {name: weights.stored_bytes(name) for name in tensor_names(weights.config)}
        self._total = sum(self._left.values())
        self._done = 0
        self._lock = threading.Lock()

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32."""
        tensor = self._weights.tensor(name)
        self._taken(name, shape, tuple(tensor.shape))
        return tensor

    def matrix(self, name: str, *shape: int) -> QuantisedMatrix | None:
        """A matrix as the file holds it, None where it does not hold it in blocks."""
        if not isinstance(self._weights, QuantisedWeights):
            return None
        matrix = self._weights.quantised(name)
        if matrix is not None:
            self._taken(name, shape, matrix.shape)
        return matrix

    def _taken(self, name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> None:
        if found != wanted:
            raise wrong_shape(self._weights.path, name, wanted, found)
        with self._lock:
            self._done += self._left.pop(name, 0)  # Some are taken twice, such as tied embeddings.
            if self._progress is not None:
                self._progress(self._done, self._total, name)


@dataclass(frozen=True)
class _Projection:
    """A weight, one of those that make a product together, and its bias."""

    name: str
    rows: int
    biased: bool = False
    interleaved_dim: int | None = None
    """The size of the heads that its rows are, where they are to be interleaved."""

    def ordered(self, rows: Tensor) -> Tensor:
        return rows if self.interleaved_dim is None else interleave_heads(rows, self.interleaved_dim)

    def ordered_matrix(self, matrix: QuantisedMatrix) -> QuantisedMatrix:
        if self.interleaved_dim is None:
            return matrix
        return matrix.rows(interleave_heads(torch.arange(self.rows), self.interleaved_dim).numpy())


class _Packer:
    """Makes the products of a decoder from the tensors of a checkpoint."""

    def __init__(self, reader: _Reader, config: ModelConfig, operators: Operators) -> None:
        self._reader = reader
        self._config = config
        self._operators = operators

    def ends(self) -> tuple[Embedding, Tensor, Linear]:
        """What lies before and after the layers: embedding, final norm, head.

        A tied head and its embedding are made of one read of the table, and share its memory in float32.
        """
        config, operators, name = self._config, self._operators, "model.embed_tokens"
        final_norm = self._reader.take("model.norm.weight", config.hidden)
        matrix = self._matrix(config.hidden, [_Projection(name, config.vocabulary)])
        embedding = None if matrix is None else operators.quantised_embedding(matrix)
        if not config.tied_embeddings:
            head: Linear | None = self._linear(config.hidden, _Projection("lm_head", config.vocabulary))
        else:
            head = None if matrix is None else operators.quantised_linear(matrix, None)
        if embedding is None or head is None:
            table = self._reader.take(f"{name}.weight", config.vocabulary, config.hidden)
            embedding = operators.embedding(table) if embedding is None else embedding
            head = operators.linear(table, None) if head is None else head
        return embedding, final_norm, head

    def layer(self, index: int) -> DecoderLayer:
        config, place = self._config, f"model.layers.{index}"
        hidden, inner, mlp_bias = config.hidden, config.intermediate, config.mlp_bias
        output = _Projection(f"{place}.self_attn.o_proj", hidden, config.output_bias)
        gate_up = [_Projection(f"{place}.mlp.{part}_proj", inner, mlp_bias) for part in ("gate", "up")]
        return DecoderLayer(
            input_norm=self._reader.take(f"{place}.input_layernorm.weight", hidden),
            qkv=self._qkv(f"{place}.self_attn"),
            head_norms=self._head_norms(f"{place}.self_attn"),
            output=self._linear(config.query_width, output),
            mlp_norm=self._reader.take(f"{place}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(hidden, *gate_up),
            down=self._linear(inner, _Projection(f"{place}.mlp.down_proj", hidden, mlp_bias)),
        )

    def _qkv(self, place: str) -> Linear:
        """The three projections as one product, queries and keys with interleaved heads."""
        config, dims, biased = self._config, self._config.head_dim, self._config.qkv_bias
        return self._linear(
            config.hidden,
            _Projection(f"{place}.q_proj", config.query_width, biased, dims),
            _Projection(f"{place}.k_proj", config.kv_width, biased, dims),
            _Projection(f"{place}.v_proj", config.kv_width, biased),
        )

    def _head_norms(self, place: str) -> HeadNorms | None:
        dims = self._config.head_dim
        if not self._config.query_key_norm:
            return None
        norms = [self._reader.take(f"{place}.{part}_norm.weight", dims) for part in "qk"]
        return HeadNorms(*(interleave_heads(norm, dims) for norm in norms))

    def _linear(self, columns: int, *projections: _Projection) -> Linear:
        """One product of weights one above the other, as the file holds them if these operators can."""
        bias = self._bias(projections)
        matrix = self._matrix(columns, projections)
        quantised = None if matrix is None else self._operators.quantised_linear(matrix, bias)
        if quantised is not None:
            return quantised
        weights = [self._reader.take(f"{part.name}.weight", part.rows, columns) for part in projections]
        ordered = [part.ordered(weight) for part, weight in zip(projections, weights, strict=True)]
        return self._operators.linear(torch.cat(ordered), bias)

    def _bias(self, projections: Sequence[_Projection]) -> Tensor | None:
        """Projections that make one product either all have a bias or none."""
        taken = [part for part in projections if part.biased]
        assert len(taken) in (0, len(projections)), projections
        biases = [part.ordered(self._reader.take(f"{part.name}.bias", part.rows)) for part in taken]
        return torch.cat(biases) if biases else None

    def _matrix(self, columns: int, projections: Sequence[_Projection]) -> QuantisedMatrix | None:
        """Weights one above the other in blocks; None where the file has none or the operators want none."""
        if self._operators.dtype != "blocks":
            return None
        matrices: list[QuantisedMatrix] = []
        for part in projections:
            matrix = self._reader.matrix(f"{part.name}.weight", part.rows, columns)
            if matrix is None:
                return None
            matrices.append(part.ordered_matrix(matrix))
        return concat(matrices)


def interleave_heads(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from halves (x0 x1 .. y0 y1 ..) to pairs (x0 y0 x1 y1 ..)."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
