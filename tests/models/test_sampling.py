"""Sampled tokens follow the wanted distribution, and depend on nothing but their own row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_driver import columns
from muxk.models.philox import philox4x32, uniforms
from muxk.models.sampling import Sampling, kept_weights, sample, sampling_of
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

VOCABULARY = 977


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


def philox_reference(
    counter: tuple[int, ...],
    key: tuple[int, ...],
    bits: int,
    multipliers: tuple[int, int],
    steps: tuple[int, int],
) -> tuple[int, ...]:
    """Ten rounds in plain integers, for words of any size."""
    mask = (1 << bits) - 1
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = a * multipliers[0], c * multipliers[1]
        a, b = (right >> bits) ^ b ^ low, right & mask
        c, d = (left >> bits) ^ d ^ high, left & mask
        low, high = (low + steps[0]) & mask, (high + steps[1]) & mask
    return a, b, c, d


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    """The known answers of Random123, by the authors of the paper."""
    found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in found) == wanted


def test_the_rounds_are_those_of_numpys_philox_with_64_bit_words() -> None:
    """numpy has the 64-bit variant: the same plain rounds give its words and ours."""
    counter, key = (5, 6, 7, 8), (9, 10)
    generator = np.random.Philox(counter=list(counter), key=list(key))
    # numpy counts up before its first block.
    wide = philox_reference(
        (6, 6, 7, 8),
        key,
        64,
        (0xD2E7470EE14C6C93, 0xCA5A826395121157),
        (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
    )
    assert tuple(int(word) for word in generator.random_raw(4)) == wide
    narrow = philox_reference(counter, key, 32, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85))
    found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in found) == narrow


def test_random_numbers_are_uniform_over_seeds_positions_and_choices() -> None:
    count = 20_000
    for varied in range(3):
        parts = [np.full(count, 3), np.full(count, 4), np.full(count, 5)]
        parts[varied] = np.arange(count)
        numbers = uniforms(parts[0].astype(np.uint64), parts[1], parts[2].astype(np.uint32))
        counts = np.bincount((numbers * 100).astype(int), minlength=100)
        assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 160


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 100_000),
    choice=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.0, 3.0, width=32),
    top_k=st.integers(0, 1200),
    top_p=st.floats(0.0, 1.0, width=32),
    min_p=st.floats(0.0, 1.0, width=32),
    place=st.integers(0, 6),
)
def test_a_row_gets_the_same_token_alone_and_in_any_batch(
    seed: int,
    position: int,
    choice: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    place: int,
) -> None:
    logits = random_logits(7)
    generator = np.random.default_rng(seed)
    values = {
        "temperature": generator.uniform(0, 2, 7),
        "top_p": generator.uniform(0, 1, 7),
        "top_k": generator.integers(0, 99, 7),
        "min_p": generator.uniform(0, 0.3, 7),
        "seed": generator.integers(0, 2**62, 7).astype(np.uint64),
        "choice": generator.integers(0, 9, 7),
    }
    mine = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    mine |= {"seed": seed, "choice": choice}
    positions = generator.integers(0, 1000, 7)
    for name, value in mine.items():
        values[name][place] = value
    positions[place] = position
    batch = sample(logits, sampling_of(columns(7, **values)), positions)
    alone = columns(1, **{name: [value] for name, value in mine.items()})
    found = sample(logits[place : place + 1], sampling_of(alone), np.array([position]))
    assert found[0] == batch[place]


@pytest.mark.parametrize("temperature", [0.25, 1.0, 1.75])
@pytest.mark.parametrize("top_k", [0, 1, 5, 400, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.7, 1.0])
def test_kept_tokens_and_probabilities_equal_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Their processors in vLLM's order, which has min-p first."""
    logits = random_logits(5, seed=top_k)
    scores = TemperatureLogitsWarper(temperature)(None, logits).double()
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    wanted = torch.softmax(scores, dim=-1).numpy()
    weights = kept_weights(logits, same_for_all(5, temperature, top_p, top_k, min_p=min_p))
    assert ((weights > 0) == (wanted > 0)).all()
    np.testing.assert_allclose(weights / weights.sum(axis=1, keepdims=True), wanted, rtol=1e-5)


def same_for_all(
    rows: int, temperature: float, top_p: float = 1.0, top_k: int = 0, seed: int = 0, min_p: float = 0.0
) -> Sampling:
    return sampling_of(
        columns(
            rows,
            temperature=[temperature] * rows,
            top_p=[top_p] * rows,
            top_k=[top_k] * rows,
            seed=[seed] * rows,
            min_p=[min_p] * rows if min_p else (),
        )
    )


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(4)
    tokens = sample(logits, same_for_all(4, temperature), np.arange(4))
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()


def test_a_small_temperature_is_sampled_without_overflow() -> None:
    logits = random_logits(4) * 100
    tokens = sample(logits, same_for_all(4, 2e-5), np.arange(4))
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()


def test_the_choices_and_the_positions_of_one_request_differ() -> None:
    logits = torch.zeros(200, VOCABULARY)
    choices = sampling_of(columns(200, temperature=[1.0] * 200, choice=range(200)))
    assert len(set(sample(logits, choices, np.zeros(200, dtype=np.int64)).tolist())) > 100
    assert len(set(sample(logits, same_for_all(200, 1.0), np.arange(200)).tolist())) > 100
