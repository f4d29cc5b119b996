"""How a model stretches its rotary embedding to contexts longer than those it was first trained on.

The two kinds that change with the length of a request, `dynamic` and `longrope`, are refused: keys that lie
in the pool could not be used again by a longer request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muxk.models.errors import ModelError
from muxk.models.fields import positive_int, positive_number, present


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor`: positions are interpolated."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions from kept to interpolated frequencies."""

    factor: float
    original_context_tokens: int
    attention_factor: float
    """Multiplies the rotated queries and keys."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """The ends of the ramp are whole dimensions."""


@dataclass(frozen=True)
class FrequencyFactors:
    """A divisor for each frequency, as the `rope_freqs.weight` of GGUF files gives them."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors
SUPPORTED = "default, linear, llama3, yarn"
_YARN_NEUTRAL: Mapping[str, float] = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}
"""Fields of GGUF files that change YaRN, and the values with which they do not."""


def rope_fields(values: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The rotary fields of a `config.json` in the spelling of transformers 5, whichever it is written in.

    Older files have `rope_scaling` with `type` or `rope_type`, and `rope_theta` beside the other fields.
    """
    fields = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(fields, dict) or any(isinstance(value, dict) for value in fields.values()):
        raise ModelError(f"{place}: rope parameters that differ between layers are not supported")
    newer = values.get("rope_parameters") or {}
    theta = fields.get("rope_theta") or newer.get("rope_theta") or values.get("rope_theta") or 10000.0
    partial = fields.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"{place}: partial_rotary_factor {partial!r} is not supported")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    original = values.get("original_max_position_embeddings")
    known = {"original_max_position_embeddings": original or values.get("max_position_embeddings")}
    if original:
        fields = {**fields, "original_max_position_embeddings": original}
    return {**known, **present(fields), "rope_theta": theta, "rope_type": kind}


def scaling_from_json(fields: Mapping[str, Any], place: str) -> RopeScaling | None:
    """The scaling in `rope_fields`. ModelError for a kind that is not supported or a bad number."""
    kind = fields["rope_type"]
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(positive_number(fields, "factor", place))
    if kind == "llama3":
        return _llama3(fields, place)
    if kind == "yarn":
        return _yarn(fields, place)
    raise ModelError(f"{place}: rope scaling {kind!r} is not supported; supported: {SUPPORTED}")


def scaling_from_gguf(values: Mapping[str, Any], prefix: str, place: str) -> RopeScaling | None:
    """The scaling in the metadata of a GGUF file; one by `rope_freqs.weight` is not in it."""
    old = values.get(f"{prefix}.rope.scale_linear")
    kind = str(values.get(f"{prefix}.rope.scaling.type", "none" if old in (None, 0.0, 1.0) else "linear"))
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{place}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    factor_key = f"{prefix}.rope.scaling.factor"
    factor = positive_number({factor_key: old, **present(values)}, factor_key, place)
    if kind == "linear":
        return LinearScaling(factor)
    for name, neutral in _YARN_NEUTRAL.items():
        if values.get(f"{prefix}.rope.scaling.{name}", neutral) != neutral:
            raise ModelError(f"{place}: field '{prefix}.rope.scaling.{name}' is not supported")
    original_key = f"{prefix}.rope.scaling.original_context_length"
    original = {original_key: values.get(f"{prefix}.context_length"), **present(values)}
    return YarnScaling(
        factor=factor,
        original_context_tokens=positive_int(original, original_key, place),
        attention_factor=_magnitude(factor, 1.0),
        beta_fast=float(values.get(f"{prefix}.rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(values.get(f"{prefix}.rope.scaling.yarn_beta_slow", 1.0)),
    )


def context_tokens(scaling: RopeScaling | None, stated: int) -> int:
    """The longest context, as vLLM derives it from `max_position_embeddings`."""
    if isinstance(scaling, LinearScaling):
        return int(stated * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(stated, int(scaling.original_context_tokens * scaling.factor))
    return stated


def _llama3(fields: Mapping[str, Any], place: str) -> Llama3Scaling:
    low = positive_number(fields, "low_freq_factor", place)
    high = positive_number(fields, "high_freq_factor", place)
    if high <= low:
        raise ModelError(f"{place}: high_freq_factor {high} is not above low_freq_factor {low}")
    return Llama3Scaling(
        factor=positive_number(fields, "factor", place),
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_context_tokens=positive_int(fields, "original_max_position_embeddings", place),
    )


def _yarn(fields: Mapping[str, Any], place: str) -> YarnScaling:
    factor = positive_number(fields, "factor", place)
    attention = fields.get("attention_factor")
    return YarnScaling(
        factor=factor,
        original_context_tokens=positive_int(fields, "original_max_position_embeddings", place),
        attention_factor=_attention_factor(fields, factor) if attention is None else float(attention),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        truncate=bool(fields.get("truncate", True)),
    )


def _attention_factor(fields: Mapping[str, Any], factor: float) -> float:
    """What transformers infers where a file does not state it."""
    numerator, denominator = fields.get("mscale"), fields.get("mscale_all_dim")
    if numerator and denominator:
        return _magnitude(factor, numerator) / _magnitude(factor, denominator)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    """YaRN, section 3.4, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
