"""The operators of a decoder from a model's dimensions: what each computes and moves on one of `tp` GPUs.

Dimensions are data: `profiles/models/*.yaml`, or any Hugging Face `config.json`. Weights, activations and KV
have two bytes a number. A layer is qkv, attention, o, gate/up and down with their norms; under tensor
parallelism (Megatron's split) each GPU has a share of the heads and of the MLP's columns, and the GPUs sum
after o and after down.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

NUMBER_BYTES = 2
TP_SIZES = (1, 2, 4, 8)
CONFIG_BYTES_MAX = 1 << 20
DIMENSION_MAX = 1 << 24
"""Of one dimension: far over any model, and products of four of it fit a float."""
MODELS_FOLDER = Path(__file__).parent / "models"


class ShapeError(ValueError):
    """A model that can not be read or is not modelled; the text is for the user."""


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mixture of experts in place of the MLP of every layer."""

    count: int
    active: int
    """Experts that one token goes through."""
    intermediate: int


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dimensions of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of the dense MLP; unused when there are experts."""
    vocabulary: int
    tied_embeddings: bool = False
    experts: Experts | None = None
    context_max: int = 131_072
    source: str = ""

    def kv_heads_of_one(self, tp: int) -> int:
        """KV heads on one GPU; with fewer heads than GPUs each keeps one."""
        return max(1, self.kv_heads // tp)

    def kv_bytes_per_token(self, tp: int) -> int:
        """Bytes of a token's KV on one GPU, over all layers."""
        return self.layers * 2 * self.kv_heads_of_one(tp) * self.head_dim * NUMBER_BYTES

    def weight_bytes(self, tp: int) -> int:
        """Bytes of the weights on one GPU. Embedding and head are split over the vocabulary."""
        layer = sum(gemm.columns * gemm.inner for gemm in layer_gemms(self, tp))
        layer += 2 * self.hidden
        if self.experts is not None:
            layer += self.experts.count * (
                self.hidden + sum(g.columns * g.inner for g in expert_gemms(self, tp))
            )
        tables = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2) // tp
        return NUMBER_BYTES * (self.layers * layer + tables)


class Gemm(NamedTuple):
    """A product with weights of `inner` rows and `columns` columns."""

    name: str
    columns: int
    inner: int


def layer_gemms(shape: ModelShape, tp: int) -> tuple[Gemm, ...]:
    """The dense products of one layer on one GPU."""
    width = shape.heads // tp * shape.head_dim
    kv_width = shape.kv_heads_of_one(tp) * shape.head_dim
    attention = (Gemm("qkv", width + 2 * kv_width, shape.hidden), Gemm("o", shape.hidden, width))
    if shape.experts is not None:
        return attention
    inner = shape.intermediate // tp
    return (*attention, Gemm("gate_up", 2 * inner, shape.hidden), Gemm("down", shape.hidden, inner))


def expert_gemms(shape: ModelShape, tp: int) -> tuple[Gemm, ...]:
    """The products of one expert on one GPU."""
    assert shape.experts is not None
    inner = shape.experts.intermediate // tp
    return (Gemm("expert_gate_up", 2 * inner, shape.hidden), Gemm("expert_down", shape.hidden, inner))


def head_gemm(shape: ModelShape, tp: int) -> Gemm:
    """The head, run once over the rows that are sampled."""
    return Gemm("head", -(-shape.vocabulary // tp), shape.hidden)


def gemm_flops(gemm: Gemm, tokens: int) -> int:
    return 2 * tokens * gemm.columns * gemm.inner


def gemm_bytes(gemm: Gemm, tokens: int) -> int:
    """Weights once, activations in and out."""
    return NUMBER_BYTES * (gemm.columns * gemm.inner + tokens * (gemm.columns + gemm.inner))


def attention_flops(shape: ModelShape, tp: int, pairs: int) -> int:
    """Of one layer: two products of `head_dim` a query-key pair and head."""
    return 4 * shape.head_dim * (shape.heads // tp) * pairs


def attention_bytes(shape: ModelShape, tp: int, context_tokens: int, new_tokens: int) -> int:
    """Of one layer: the context's KV read once, queries in and outputs out."""
    kv = 2 * shape.kv_heads_of_one(tp) * context_tokens
    return NUMBER_BYTES * shape.head_dim * (kv + 2 * shape.heads // tp * new_tokens)


def elementwise_bytes(shape: ModelShape, tp: int) -> Mapping[str, int]:
    """Bytes a token moves in each elementwise kernel of one layer."""
    heads = shape.heads // tp + shape.kv_heads_of_one(tp)
    width = shape.intermediate if shape.experts is None else shape.experts.active * shape.experts.intermediate
    return {
        "norm": NUMBER_BYTES * 2 * shape.hidden,
        "add": NUMBER_BYTES * 3 * shape.hidden,
        "rope": NUMBER_BYTES * 2 * heads * shape.head_dim,
        "activation": NUMBER_BYTES * 3 * width // tp,
    }


def active_experts(experts: Experts, tokens: int) -> float:
    """Expected number of experts that some token goes to, when the choice is uniform."""
    return experts.count * (1.0 - (1.0 - experts.active / experts.count) ** tokens)


def check_tp(shape: ModelShape, tp: int) -> None:
    """Raises ShapeError when the model can not be split over `tp` GPUs."""
    if tp not in TP_SIZES:
        raise ShapeError(f"tp={tp}: use 1, 2, 4 or 8")
    width = shape.intermediate if shape.experts is None else shape.experts.intermediate
    if shape.heads % tp or width % tp:
        raise ShapeError(f"{shape.name}: {shape.heads} heads and MLP width {width} do not divide by tp={tp}")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise ShapeError(f"{shape.name}: {shape.kv_heads} KV heads do not divide over tp={tp}")


def known_models() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in MODELS_FOLDER.glob("*.yaml")))


def load_shape(model: str) -> ModelShape:
    """A name of `known_models`, a `config.json`, or a folder that has one. Raises ShapeError."""
    name = model.lower()
    if name in known_models():
        text = (MODELS_FOLDER / f"{name}.yaml").read_text("utf-8")
        return _checked(msgspec.convert(yaml.safe_load(text), ModelShape))
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        what = "there is no file" if path.suffix == ".json" or len(path.parts) > 1 else "no model"
        raise ShapeError(f"{what} {model!r}: use one of {', '.join(known_models())}, or a config.json")
    name = path.parent.name or path.stem
    config = _read_config(path)
    try:
        return shape_of_config(config, name)
    except ShapeError as error:  # of several files named config.json the path tells which
        raise ShapeError(f"{path}: {str(error).removeprefix(f'{name}: ')}") from error


def _read_config(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise ShapeError(f"{path}: over {CONFIG_BYTES_MAX} bytes, not a config.json")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ShapeError(f"{path}: a config.json is an object")
    return config


NOT_MODELLED: Mapping[str, str] = {
    "kv_lora_rank": "latent attention (MLA)",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "first_k_dense_replace": "layers of different kinds",
    "ssm_cfg": "state-space layers",
}


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Dimensions from a parsed `config.json`. Raises ShapeError with the key that is wrong or missing."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    _refuse_unmodelled(config, name)
    hidden, heads = _integer(config, name, "hidden_size"), _integer(config, name, "num_attention_heads")
    experts = _experts(config, name)
    return _checked(
        ModelShape(
            name=name,
            layers=_integer(config, name, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_integer(config, name, "num_key_value_heads", heads),
            head_dim=_integer(config, name, "head_dim", hidden // heads),
            intermediate=_integer(config, name, "intermediate_size", None if experts is None else 1),
            vocabulary=_integer(config, name, "vocab_size"),
            tied_embeddings=config.get("tie_word_embeddings") is True,
            experts=experts,
            context_max=_integer(config, name, "max_position_embeddings", 131_072),
            source="config.json",
        )
    )


def _refuse_unmodelled(config: Mapping[str, Any], name: str) -> None:
    for key, what in NOT_MODELLED.items():
        if config.get(key):
            raise ShapeError(f"{name}: {what} ({key}) is not modelled")
    kinds = config.get("layer_types")
    others = isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds)
    if others or (config.get("sliding_window") and config.get("use_sliding_window", True)):
        raise ShapeError(f"{name}: attention other than over the full context is not modelled")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ShapeError(f"{name}: layers of different kinds are not modelled")


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    if not config.get(key):
        return None
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    count = _integer(config, name, key)
    return Experts(count, _integer(config, name, "num_experts_per_tok"), _integer(config, name, width))


def _integer(config: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ShapeError(f"{name}: {key} is None or missing, not a number from 1 to {DIMENSION_MAX}")
    if type(value) is not int or not 1 <= value <= DIMENSION_MAX:
        raise ShapeError(f"{name}: {key} is {value!r}, not a number from 1 to {DIMENSION_MAX}")
    return value


def _checked(shape: ModelShape) -> ModelShape:
    if shape.heads % shape.kv_heads:
        raise ShapeError(f"{shape.name}: {shape.heads} heads do not divide by {shape.kv_heads} KV heads")
    if shape.experts is not None and shape.experts.active > shape.experts.count:
        raise ShapeError(
            f"{shape.name}: a token goes to {shape.experts.active} of {shape.experts.count} experts"
        )
    return shape
