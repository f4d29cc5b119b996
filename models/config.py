"""What a model looks like: sizes and switches, from a Hugging Face `config.json` or GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muxk.models.errors import ModelError
from muxk.models.fields import positive_int, positive_number
from muxk.models.rope_scaling import (
    RopeScaling,
    context_tokens,
    rope_fields,
    scaling_from_gguf,
    scaling_from_json,
)
from muxk.models.windows import (
    FindWindows,
    Windows,
    effective_windows,
    no_windows,
    windows_by_layer,
    windows_of_all_layers,
)


@dataclass(frozen=True)
class Architecture:
    """A family of decoders that `llama.py` runs, and how it differs from plain llama."""

    name: str
    """Its `model_type` in a `config.json`, and `general.architecture` in a GGUF file."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    optional_biases: frozenset[str] = frozenset()
    """Fields of a `config.json` that may add biases: to attention's four projections, to the MLP's three."""
    query_key_norm: bool = False
    """An RMS norm on each head of queries and keys."""
    permuted_in_gguf: bool = False
    """Whether GGUF files hold queries and keys with the two halves of each head interleaved."""
    windows: FindWindows = no_windows
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What transformers takes for fields that a `config.json` lacks, where it is not derived."""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", optional_biases=frozenset({"attention_bias", "mlp_bias"}), permuted_in_gguf=True),
    Architecture(
        "mistral",
        permuted_in_gguf=True,
        windows=windows_of_all_layers,
        defaults={"num_key_value_heads": 8},
    ),
    Architecture("qwen2", qkv_bias=True, windows=windows_by_layer, defaults={"num_key_value_heads": 32}),
    Architecture(
        "qwen3",
        optional_biases=frozenset({"attention_bias"}),
        query_key_norm=True,
        windows=windows_by_layer,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
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
    rope_scaling: RopeScaling | None = None
    windows: Windows = ()
    """Tokens that each layer sees; see `window`."""
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on attention's output projection."""
    mlp_bias: bool = False
    """Biases on gate, up and down."""
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

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in a layer, itself included; None where it sees all before it."""
        return self.windows[layer] if self.windows else None


def find_architecture(name: str, place: str) -> Architecture:
    """The registry row of a name; ModelError with the supported names otherwise."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    supported = ", ".join(architecture.name for architecture in ARCHITECTURES)
    experts = "; mixtures of experts are not supported yet" if "moe" in name.lower() else ""
    raise ModelError(f"{place}: architecture {name!r} is not supported; supported: {supported}{experts}")


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
    _refuse_unsupported(values, architecture, place)
    heads = positive_int(values, "num_attention_heads", place)
    hidden = positive_int(values, "hidden_size", place)
    layers = positive_int(values, "num_hidden_layers", place)
    sizes = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    sizes |= {key: size for key, size in architecture.defaults.items() if key not in values}
    sizes |= {key: values[key] for key in sizes if values.get(key) is not None}
    rope = rope_fields(values, place)
    attention_bias = bool(values.get("attention_bias"))
    config = ModelConfig(
        architecture=architecture.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=positive_int(sizes, "num_key_value_heads", place),
        head_dim=positive_int(sizes, "head_dim", place),
        intermediate=positive_int(values, "intermediate_size", place),
        vocabulary=positive_int(values, "vocab_size", place),
        rope_theta=positive_number(rope, "rope_theta", place),
        rms_epsilon=positive_number({"rms_norm_eps": 1e-6, **values}, "rms_norm_eps", place),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        max_context_tokens=positive_int(values, "max_position_embeddings", place),
        rope_scaling=scaling_from_json(rope, place),
        windows=architecture.windows(values, layers, place),
        qkv_bias=architecture.qkv_bias or attention_bias,
        output_bias=attention_bias and "attention_bias" in architecture.optional_biases,
        mlp_bias=bool(values.get("mlp_bias")),
        query_key_norm=architecture.query_key_norm,
        permuted_in_gguf=architecture.permuted_in_gguf,
    )
    return _checked(config, place)


def config_from_gguf(values: Mapping[str, Any], tensors: Container[str], place: str) -> ModelConfig:
    """The configuration in GGUF metadata; `tensors` are the names of the tensors in the file."""
    architecture = find_architecture(str(values.get("general.architecture")), place)
    prefix = architecture.name
    heads = positive_int(values, f"{prefix}.attention.head_count", place)
    hidden = positive_int(values, f"{prefix}.embedding_length", place)
    head_dim_key, kv_heads_key = f"{prefix}.attention.key_length", f"{prefix}.attention.head_count_kv"
    theta_key, epsilon_key = f"{prefix}.rope.freq_base", f"{prefix}.attention.layer_norm_rms_epsilon"
    defaults = {head_dim_key: hidden // heads, kv_heads_key: heads, theta_key: 10000.0, epsilon_key: 1e-6}
    sizes = {**defaults, **values}
    layers = positive_int(values, f"{prefix}.block_count", place)
    config = ModelConfig(
        architecture=prefix,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=positive_int(sizes, kv_heads_key, place),
        head_dim=positive_int(sizes, head_dim_key, place),
        intermediate=positive_int(values, f"{prefix}.feed_forward_length", place),
        vocabulary=_gguf_vocabulary(values, prefix, place),
        rope_theta=positive_number(sizes, theta_key, place),
        rms_epsilon=positive_number(sizes, epsilon_key, place),
        tied_embeddings="output.weight" not in tensors,
        max_context_tokens=positive_int(values, f"{prefix}.context_length", place),
        rope_scaling=scaling_from_gguf(values, prefix, place),
        windows=_gguf_windows(values, prefix, layers, place),
        qkv_bias=architecture.qkv_bias or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        query_key_norm=architecture.query_key_norm,
        permuted_in_gguf=architecture.permuted_in_gguf,
    )
    _refuse_unsupported_gguf(values, config, place)
    return _checked(config, place)


def _gguf_windows(values: Mapping[str, Any], prefix: str, layers: int, place: str) -> Windows:
    key = f"{prefix}.attention.sliding_window"
    return (positive_int(values, key, place),) * layers if values.get(key) else ()


def _gguf_vocabulary(values: Mapping[str, Any], prefix: str, place: str) -> int:
    tokens = values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        return len(tokens)
    return positive_int(values, f"{prefix}.vocab_size", place)


def _checked(config: ModelConfig, place: str) -> ModelConfig:
    """The configuration, if its sizes fit together, with the context that its scaling and windows give."""
    if config.heads % config.kv_heads:
        raise ModelError(f"{place}: {config.heads} heads do not divide into {config.kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"{place}: head size {config.head_dim} is odd; rotary embedding needs pairs")
    context = context_tokens(config.rope_scaling, config.max_context_tokens)
    windows = effective_windows(config.windows, context)
    return replace(config, max_context_tokens=context, windows=windows)


def _refuse_unsupported(values: Mapping[str, Any], architecture: Architecture, place: str) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{place}: hidden_act {values['hidden_act']!r} is not supported; supported: silu")
    known = architecture.optional_biases | ({"attention_bias"} if architecture.qkv_bias else set())
    for name in ("mlp_bias", "attention_bias"):
        if values.get(name) and name not in known:
            raise ModelError(f"{place}: {name} is not supported for {architecture.name}")


def _refuse_unsupported_gguf(values: Mapping[str, Any], config: ModelConfig, place: str) -> None:
    prefix, dims = config.architecture, config.head_dim
    if values.get(f"{prefix}.expert_count"):
        raise ModelError(f"{place}: a mixture of experts is not supported")
    for name in ("rope.dimension_count", "attention.value_length"):
        if values.get(f"{prefix}.{name}", dims) != dims:
            found = values[f"{prefix}.{name}"]
            raise ModelError(
                f"{place}: field '{prefix}.{name}' is {found!r}, supported: the head size {dims}"
            )
