"""Every family says what transformers says, from a folder as transformers saves it to tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import write_gguf
from model_driver import Driver, RandomWeights, tiny_config
from muxk.models.config import ModelConfig
from muxk.models.load import load_runner
from muxk.models.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, YarnScaling
from transformers_reference import reference_model, reference_output

PROMPTS = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (70, 4, 33)]
STEPS = 8
FAMILIES: dict[str, ModelConfig] = {
    "llama 3.1": tiny_config(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 40), rope_theta=1e4),
    "llama with a linear scaling and one KV head": tiny_config(rope_scaling=LinearScaling(4.0), kv_heads=1),
    "llama with all biases": tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True),
    "mistral with a window, heads wider than hidden": tiny_config("mistral", windows=(24,) * 3, head_dim=16),
    "qwen2, tied": tiny_config("qwen2", tied_embeddings=True),
    "qwen2 with YaRN and windows": tiny_config(
        "qwen2", rope_scaling=YarnScaling(4.0, 64, 1.1386), windows=(None, 20, 20)
    ),
    "qwen3": tiny_config("qwen3", kv_heads=6),
    "qwen3 with biases and windows, tied": tiny_config(
        "qwen3", qkv_bias=True, output_bias=True, windows=(20, None, 20), tied_embeddings=True
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sharded_folder_generates_the_tokens_of_transformers_alone_and_in_a_batch(
    name: str, tmp_path: Path
) -> None:
    reference = reference_model(RandomWeights(FAMILIES[name]))
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    wanted = [reference_output(reference, prompt, STEPS) for prompt in PROMPTS]
    driver = Driver(load_runner(str(tmp_path), 64, "float32"))
    assert driver.generate(PROMPTS, STEPS) == wanted
    assert driver.generate(PROMPTS[:1], STEPS) == wanted[:1]


GGUF_FAMILIES: dict[str, ModelConfig] = {
    "llama 3.1": tiny_config(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 40)),
    "llama with biases and a linear scaling": tiny_config(
        qkv_bias=True, output_bias=True, mlp_bias=True, rope_scaling=LinearScaling(4.0)
    ),
    "mistral": tiny_config("mistral", kv_heads=1, head_dim=16),
    "qwen2 with YaRN": tiny_config("qwen2", rope_scaling=YarnScaling(4.0, 128, 0.1 * math.log(4.0) + 1)),
    "qwen3": tiny_config("qwen3", tied_embeddings=True),
}


def as_converted(config: ModelConfig) -> ModelConfig:
    """llama.cpp's converter writes a divisor for each frequency instead of Llama 3.1's parameters."""
    scaling = config.rope_scaling
    if not isinstance(scaling, Llama3Scaling):
        return config
    divisors = []
    for index in range(config.head_dim // 2):
        wavelength = 2 * math.pi * config.rope_theta ** (2 * index / config.head_dim)
        turns = scaling.original_context_tokens / wavelength
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return replace(config, rope_scaling=FrequencyFactors(tuple(divisors)))


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_gguf_file_as_converters_write_it_generates_the_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    weights = RandomWeights(GGUF_FAMILIES[name])
    reference = reference_model(weights)
    weights.config = as_converted(weights.config)
    driver = Driver(load_runner(str(write_gguf(tmp_path / "tiny.gguf", weights)), 64, "float32"))
    wanted = [reference_output(reference, prompt, STEPS) for prompt in PROMPTS]
    assert driver.generate(PROMPTS, STEPS) == wanted
