"""Models with sliding windows say what transformers says, in chunks, fused steps and decode steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_driver import Driver, RandomWeights, take, tiny_config, tiny_runner
from muxk.kernel.work import int32_array
from muxk.models.cpu_ops import CpuOperators
from muxk.models.runner import ModelRunner
from transformers_reference import reference_model

PROMPTS = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (21, 60, 5, 90)]
STEPS = 6
MODELS = {
    "mistral": tiny_config("mistral", windows=(20, 20, 20)),
    "qwen2": tiny_config("qwen2", windows=(None, 17, 17)),
}


@pytest.fixture(scope="module", params=MODELS)
def weights(request: pytest.FixtureRequest) -> RandomWeights:
    return RandomWeights(MODELS[request.param])


@pytest.fixture(scope="module")
def runner(weights: RandomWeights, float32_operators: CpuOperators) -> ModelRunner:
    return tiny_runner(weights, pages=300, operators=float32_operators)


@pytest.fixture(scope="module")
def reference(weights: RandomWeights) -> Any:
    return reference_model(weights)


def confirmed(reference: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What transformers says after each token of our output so far."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output[:-1]])).logits[0]
    found: list[int] = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return found


@pytest.mark.parametrize("chunk", [None, 1, 16, 50])
def test_a_batch_says_what_transformers_says_in_chunks_of_any_size(
    runner: ModelRunner, reference: Any, chunk: int | None
) -> None:
    outputs = Driver(runner).generate(PROMPTS, STEPS, cuts=(2,), chunk=chunk)
    assert outputs == [confirmed(reference, *pair) for pair in zip(PROMPTS, outputs, strict=True)]


def test_a_window_is_not_the_whole_context(runner: ModelRunner, weights: RandomWeights) -> None:
    config = weights.config
    plain = tiny_runner(RandomWeights(tiny_config(config.architecture)), pages=100)
    assert Driver(plain).generate(PROMPTS[3:], STEPS) != Driver(runner).generate(PROMPTS[3:], STEPS)


def test_fused_steps_keep_to_the_windows(runner: ModelRunner, reference: Any) -> None:
    driver = Driver(runner)
    decoding = [driver.request(prompt, 20) for prompt in PROMPTS[:3]]
    driver.prefill(decoding)
    work = driver.prefill_work([driver.request(PROMPTS[3], 1)])
    for tokens in (range(40), range(40, 41), range(41, 90)):
        decoded, prefilled = runner.fused(driver.decode_work(decoding), work, tokens)
        take(decoding, decoded.tokens)
    for request in decoding:
        assert request.output == confirmed(reference, request.prompt, request.output)
    first = int32_array(prefilled.tokens).tolist()
    assert first == confirmed(reference, PROMPTS[3], first)
