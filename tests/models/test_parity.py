"""Our decoders compute what transformers computes, from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from model_driver import Driver, RandomWeights, tiny_config, tiny_runner
from muxk.models.cpu_ops import CpuOperators
from muxk.models.resolve import EMBEDDED_ALIAS
from muxk.models.runner import ModelRunner, logits_for
from muxk.models.tokenizer import load_tokenizer
from muxk.models.weights import Weights
from transformers_reference import reference_model, reference_output

PROMPTS = (
    "Once upon a time there was a small fox who",
    "The three most important inventions of the last century are",
    "def fibonacci(n):\n    ",
    "Q: What is the capital of France?\nA:",
)
STEPS = 24


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_a_tiny_random_model_equal_those_of_transformers(
    float32_operators: CpuOperators, architecture: str, tied: bool
) -> None:
    weights = RandomWeights(tiny_config(architecture, tied_embeddings=tied))
    tokens = np.random.default_rng(1).integers(0, 101, 70).tolist()
    found = logits_for(tiny_runner(weights, operators=float32_operators), tokens)
    with torch.inference_mode():
        wanted = reference_model(weights)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


def test_decode_steps_of_a_ragged_batch_equal_a_prefill_of_the_whole_text(
    float32_operators: CpuOperators,
) -> None:
    runner = tiny_runner(RandomWeights(tiny_config()), pages=200, operators=float32_operators)
    generator = np.random.default_rng(2)
    prompts = [generator.integers(0, 101, size).tolist() for size in (3, 16, 17, 250, 31, 1)]
    outputs = Driver(runner).generate(prompts, steps=20)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = logits_for(runner, prompt + output[:-1])[len(prompt) - 1 :]
        assert logits.argmax(dim=-1).tolist() == output


@pytest.fixture(scope="module")
def reference(embedded_weights: Weights) -> Any:
    return reference_model(embedded_weights)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(EMBEDDED_ALIAS)
    chat = tokenizer.chat([("user", "Name three colours.")])
    return [tokenizer.encode(prompt) for prompt in PROMPTS] + [chat]


@pytest.fixture(scope="module")
def confirmed(reference: Any) -> Callable[[list[int], list[int]], list[int]]:
    """What transformers continues a prompt with, token by token, after the tokens of our output so far.

    One forward pass for each different output. Equal to our output if and only if its own greedy one is.
    """

    @cache
    def run(prompt: tuple[int, ...], output: tuple[int, ...]) -> list[int]:
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0]
        return list(logits[len(prompt) - 1 :].argmax(dim=-1).tolist())

    return lambda prompt, output: run(tuple(prompt), tuple(output))


Confirmed = Callable[[list[int], list[int]], list[int]]
Runners = Callable[[str], ModelRunner]


@pytest.mark.model
@pytest.mark.parametrize("cuts", [(), (7,), (1, 15, 29)])
def test_a_batch_generates_the_tokens_of_transformers_wherever_its_prefill_is_cut(
    embedded_runner: Runners, prompts: list[list[int]], confirmed: Confirmed, cuts: tuple[int, ...]
) -> None:
    outputs = Driver(embedded_runner("float32")).generate(prompts, STEPS, cuts)
    assert outputs == [confirmed(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.mark.model
def test_a_single_request_generates_what_generate_of_transformers_does(
    embedded_runner: Runners, prompts: list[list[int]], reference: Any
) -> None:
    outputs = Driver(embedded_runner("float32")).generate(prompts[:1], STEPS)
    assert outputs[0] == reference_output(reference, prompts[0], STEPS)


@pytest.mark.model
@pytest.mark.parametrize("reused", [1, 16, 20])
def test_a_prompt_whose_beginning_is_in_the_pool_generates_the_tokens_of_transformers(
    embedded_runner: Runners, prompts: list[list[int]], confirmed: Confirmed, reused: int
) -> None:
    driver = Driver(embedded_runner("float32"))
    chat = prompts[-1]
    first = driver.request(chat, STEPS)
    driver.prefill([first])
    again = driver.request(chat, STEPS)
    again.pages[: -(-reused // 16)] = first.pages[: -(-reused // 16)]
    other = driver.request(prompts[0], STEPS)
    driver.prefill([again, other], reused=[reused, 0], cuts=(11,))
    for _ in range(STEPS - 1):
        driver.decode([again, other])
    assert again.output == confirmed(chat, again.output)
    assert other.output == confirmed(prompts[0], other.output)


@pytest.fixture(scope="module")
def prose() -> list[int]:
    tokens = load_tokenizer(EMBEDDED_ALIAS).encode(plain_text())[:2000]
    assert len(tokens) == 2000
    return tokens


@pytest.fixture(scope="module")
def float32_logprobs(reference: Any, prose: list[int]) -> torch.Tensor:
    """transformers' for each token that could follow each of the prose."""
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([prose])).logits[0], dim=-1)


@pytest.mark.model
@pytest.mark.slow
def test_the_weights_of_the_default_dtype_change_next_to_nothing(
    embedded_runner: Runners, operators_name: str, prose: list[int], float32_logprobs: torch.Tensor
) -> None:
    """Packed fp16 with torch's operators, with ours the integers and scales of the file itself."""
    default = embedded_runner("auto")
    assert default.decoder.operators.dtype == {"torch": "fp16", "native": "blocks"}[operators_name]
    found = torch.log_softmax(logits_for(default, prose), dim=-1)
    divergence = (float32_logprobs.exp() * (float32_logprobs - found)).sum(dim=-1).mean()
    same = (float32_logprobs.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()
    assert divergence < (1e-6 if operators_name == "native" else 1e-4)
    assert same >= 0.995


def plain_text() -> str:
    """English prose that every Python has: the Zen of Python and docstrings of its library."""
    import argparse
    import asyncio
    import collections
    import decimal
    import difflib
    import fractions
    import heapq
    import statistics

    modules = (heapq, statistics, decimal, difflib, fractions, collections, argparse, asyncio)
    return "\n".join(str(module.__doc__) for module in modules) * 2
