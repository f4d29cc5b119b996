"""What a model looks like: sizes and switches, from a Hugging Face `config.json` or GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muxk.models.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """A family of decoders that `llama.py` runs, and how it differs from plain llama."""

    name: str
    """Its `model_type` in a `config.json`, and `general.architecture` in a GGUF file."""
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    query_key_norm: bool
    """An RMS norm on each head of queries and keys."""
    permuted_in_gguf: bool
    """Whether GGUF files hold queries and keys with the two halves of each head interleaved."""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", qkv_bias=False, query_key_norm=False, permuted_in_gguf=True),
    Architecture("mistral", qkv_bias=False, query_key_norm=False, permuted_in_gguf=True),
    Architecture("qwen2", qkv_bias=True, query_key_norm=False, permuted_in_gguf=False),
    Architecture("qwen3", qkv_bias=False, query_key_norm=True, permuted_in_gguf=False),
)
"""A new one is a row here and a parity test against transformers on a tiny random configuration."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer of the llama family."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope_theta: float
    rms_epsilon: float
    tied_embeddings: bool
    """The output projection is the embedding table."""
    max_context_tokens: int
    qkv_bias: bool = False
    query_key_norm: bool = False
    permuted_in_gguf: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def find_architecture(name: str, place: str) -> Architecture:
    """The registry row of a name; ModelError with the supported names otherwise."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    supported = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise ModelError(f"{place}: architecture {name!r} is not supported; supported: {supported}")


def config_from_folder(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint folder, from its `config.json`."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: not found; a checkpoint folder needs it beside the weights") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: wanted a JSON object")
    return config_from_json(values, str(path))


def config_from_json(values: Mapping[str, Any], place: str) -> ModelConfig:
    """The configuration in the fields of a Hugging Face `config.json`; errors name `place`."""
    architecture = find_architecture(str(values.get("model_type")), place)
    _refuse_unsupported(values, place)
    heads = _positive(values, "num_attention_heads", place)
    hidden = _positive(values, "hidden_size", place)
    config = ModelConfig(
        architecture=architecture.name,
        layers=_positive(values, "num_hidden_layers", place),
        hidden=hidden,
        heads=heads,
        kv_heads=_positive({"num_key_value_heads": heads, **_present(values)}, "num_key_value_heads", place),
        head_dim=int(values.get("head_dim") or hidden // heads),
        intermediate=_positive(values, "intermediate_size", place),
        vocabulary=_positive(values, "vocab_size", place),
        rope_theta=_rope_theta(values),
        rms_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        max_context_tokens=_positive(values, "max_position_embeddings", place),
        qkv_bias=architecture.qkv_bias,
        query_key_norm=architecture.query_key_norm,
        permuted_in_gguf=architecture.permuted_in_gguf,
    )
    return _checked(config, place)


def config_from_gguf(values: Mapping[str, Any], has_head: bool, place: str) -> ModelConfig:
    """The configuration in GGUF metadata; `has_head` tells whether the file has an `output.weight`."""
    architecture = find_architecture(str(values.get("general.architecture")), place)
    prefix = architecture.name
    if str(values.get(f"{prefix}.rope.scaling.type", "none")) != "none":
        raise ModelError(f"{place}: rope scaling is not supported yet")
    heads = _positive(values, f"{prefix}.attention.head_count", place)
    hidden = _positive(values, f"{prefix}.embedding_length", place)
    config = ModelConfig(
        architecture=prefix,
        layers=_positive(values, f"{prefix}.block_count", place),
        hidden=hidden,
        heads=heads,
        kv_heads=int(values.get(f"{prefix}.attention.head_count_kv", heads)),
        head_dim=int(values.get(f"{prefix}.attention.key_length", hidden // heads)),
        intermediate=_positive(values, f"{prefix}.feed_forward_length", place),
        vocabulary=_gguf_vocabulary(values, prefix, place),
        rope_theta=float(values.get(f"{prefix}.rope.freq_base", 10000.0)),
        rms_epsilon=float(values.get(f"{prefix}.attention.layer_norm_rms_epsilon", 1e-6)),
        tied_embeddings=not has_head,
        max_context_tokens=_positive(values, f"{prefix}.context_length", place),
        qkv_bias=architecture.qkv_bias,
        query_key_norm=architecture.query_key_norm,
        permuted_in_gguf=architecture.permuted_in_gguf,
    )
    return _checked(config, place)


def _gguf_vocabulary(values: Mapping[str, Any], prefix: str, place: str) -> int:
    tokens = values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        return len(tokens)
    return _positive(values, f"{prefix}.vocab_size", place)


def _checked(config: ModelConfig, place: str) -> ModelConfig:
    """The configuration, if its sizes fit together."""
    if config.kv_heads < 1 or config.heads % config.kv_heads:
        raise ModelError(f"{place}: {config.heads} heads do not divide into {config.kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"{place}: head size {config.head_dim} is odd; rotary embedding needs pairs")
    return config


def _refuse_unsupported(values: Mapping[str, Any], place: str) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{place}: hidden_act {values['hidden_act']!r} is not supported; supported: silu")
    for field in ("mlp_bias", "attention_bias"):
        if values.get(field):
            raise ModelError(f"{place}: {field} is not supported")
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        raise ModelError(f"{place}: sliding_window is not supported")
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ModelError(f"{place}: rope scaling {kind!r} is not supported yet")


def _rope_theta(values: Mapping[str, Any]) -> float:
    """Newer files keep it in `rope_parameters`, older ones beside the other fields."""
    parameters = values.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", values.get("rope_theta", 10000.0)))


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _positive(values: Mapping[str, Any], key: str, place: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{place}: field {key!r} is {value!r}, wanted a positive integer")
    return value
