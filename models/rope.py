"""Rotary embedding: the angles of every position, with the scalings that checkpoints ask for."""

from __future__ import annotations

import math

import torch
from muxk.models.config import ModelConfig
from muxk.models.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, YarnScaling
from torch import Tensor


def rope_table(config: ModelConfig) -> Tensor:
    """exp(i * position * frequency) for every position and pair: complex64[positions, 1, head_dim / 2].

    RoFormer, section 3.4.2. Angles are computed in float32 as transformers does. With YaRN the numbers are
    longer than 1 by its attention factor.
    """
    frequencies = rope_frequencies(config)
    scaling = config.rope_scaling
    magnitude = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    positions = torch.arange(config.max_context_tokens, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return torch.polar(torch.full_like(angles, magnitude), angles).unsqueeze(1)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians that each pair of a head turns from one position to the next: float32[head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    wavelengths = config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor):
            return 1.0 / wavelengths / factor
        case FrequencyFactors(divisors):
            return 1.0 / wavelengths / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / wavelengths, scaling)
        case YarnScaling() as scaling:
            return _yarn(wavelengths, scaling, config)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """`apply_scaling` of Llama 3.1's reference code, in the order of transformers' operations."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    original = scaling.original_context_tokens
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(wavelengths: Tensor, scaling: YarnScaling, config: ModelConfig) -> Tensor:
    """YaRN, section 3.2, equations 17 to 19; `wavelengths` are theta^(2j/d)."""
    low = _turning_dimension(scaling.beta_fast, scaling, config)
    high = _turning_dimension(scaling.beta_slow, scaling, config)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # As transformers does, where the ramp would have no width.
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - torch.clamp(ramp, 0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _turning_dimension(turns: float, scaling: YarnScaling, config: ModelConfig) -> float:
    """The dimension that turns so often in the original context."""
    ratio = scaling.original_context_tokens / (turns * 2 * math.pi)
    return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))
