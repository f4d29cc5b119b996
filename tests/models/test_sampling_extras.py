"""Drawn tokens follow transformers' logits processors; penalties, bias and bans touch their own row only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from model_driver import columns
from muxk.kernel.work import RowExtras, int32_bytes
from muxk.models.errors import ModelError
from muxk.models.sampling import sample, sampling_of
from muxk.models.sampling_extras import change_logits
from numpy.typing import NDArray
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY = 24
DRAWS = 20_000
LOGITS = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 1.5
PROMPT, GENERATED = [3, 8, 8, 15, 21], [4, 4, 4, 9, 15, 20]


def reference_probabilities(
    logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float, repetition: float
) -> NDArray[np.float64]:
    """What transformers' processors leave, in vLLM's order."""
    ids: Any = torch.tensor([PROMPT + GENERATED])
    scores: Any = logits.clone()
    if repetition != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(repetition)(ids, scores)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    probabilities: NDArray[np.float64] = torch.softmax(scores.double(), dim=-1)[0].numpy()
    return probabilities


def drawn(
    temperature: float, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0, **penalties: Any
) -> NDArray[np.int64]:
    """How often each token was drawn, by one seed at DRAWS positions."""
    extras = RowExtras(row=0, prompt=int32_bytes(PROMPT), generated=int32_bytes(GENERATED), **penalties)
    logits = torch.from_numpy(changed(extras)).repeat(DRAWS, 1)
    values = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p, "seed": 99}
    sampling = columns(DRAWS, **{name: np.full(DRAWS, value) for name, value in values.items()})
    return np.bincount(sample(logits, sampling_of(sampling), np.arange(DRAWS)), minlength=VOCABULARY)


def changed(extras: RowExtras, logits: torch.Tensor = LOGITS) -> NDArray[np.float32]:
    row: NDArray[np.float32] = logits[0].numpy().copy()
    change_logits(row, extras)
    return row


def chi_square_excess(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """By how many standard deviations the statistic of Pearson's test exceeds its mean.

    Tokens expected less than 5 times are counted as one.
    """
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * DRAWS
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(counts[~rare], counts[rare].sum())
    kept = expected > 0
    statistic = ((found[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = max(int(kept.sum()) - 1, 1)
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p", "repetition"),
    [
        (1.0, 0.0, 0, 1.0, 1.0),
        (0.3, 0.0, 0, 1.0, 1.0),
        (1.8, 0.0, 0, 1.0, 1.0),
        (0.8, 0.0, 5, 1.0, 1.0),
        (0.8, 0.0, 0, 0.7, 1.0),
        (1.5, 0.0, 0, 0.95, 1.0),
        (1.0, 0.15, 0, 1.0, 1.0),
        (1.7, 0.1, 12, 0.9, 1.0),
        (1.0, 0.0, 0, 1.0, 1.3),
        (0.6, 0.0, 0, 1.0, 0.7),
        (1.2, 0.05, 9, 0.9, 1.8),
    ],
)
def test_drawn_tokens_follow_the_probabilities_of_transformers(
    temperature: float, min_p: float, top_k: int, top_p: float, repetition: float
) -> None:
    penalties = {"repetition_penalty": repetition} if repetition != 1.0 else {}
    counts = drawn(temperature, min_p, top_k, top_p, **penalties)
    wanted = reference_probabilities(LOGITS, temperature, min_p, top_k, top_p, repetition)
    assert chi_square_excess(counts, wanted) < 4


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.6), (-1.0, -0.3), (0.8, 0.4)])
def test_drawn_tokens_follow_the_formula_of_openai(presence: float, frequency: float) -> None:
    logits = LOGITS.clone()
    for token in GENERATED:
        logits[0, token] -= frequency
    for token in set(GENERATED):
        logits[0, token] -= presence
    counts = drawn(0.9, presence_penalty=presence, frequency_penalty=frequency)
    assert chi_square_excess(counts, reference_probabilities(logits, 0.9, 0.0, 0, 1.0, 1.0)) < 4


def test_this_many_draws_tell_a_wrong_distribution() -> None:
    """Otherwise the tests above show nothing."""
    plain = drawn(1.0)
    assert chi_square_excess(plain, reference_probabilities(LOGITS, 1.1, 0.0, 0, 1.0, 1.0)) > 10
    assert chi_square_excess(plain, reference_probabilities(LOGITS, 1.0, 0.0, 0, 1.0, 1.1)) > 10


def test_everything_at_once_is_bias_then_repetition_then_counts_then_bans() -> None:
    extras = RowExtras(
        row=0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        prompt=int32_bytes(PROMPT),
        generated=int32_bytes(GENERATED),
        bias_ids=int32_bytes([4, 0, 22]),
        bias_values=np.array([-2.0, 3.0, 100.0], dtype="<f4").tobytes(),
        banned=int32_bytes([22, 9]),
    )
    biased = LOGITS.clone()
    biased[0, [4, 0, 22]] += torch.tensor([-2.0, 3.0, 100.0])
    ids: Any = torch.tensor([PROMPT + GENERATED])
    wanted: Any = RepetitionPenaltyLogitsProcessor(1.5)(ids, biased)[0]
    for token in GENERATED:
        wanted[token] -= 0.25
    for token in set(GENERATED):
        wanted[token] -= 0.5
    wanted[[22, 9]] = -math.inf
    np.testing.assert_allclose(changed(extras), wanted.numpy(), rtol=1e-6)


def test_presence_and_frequency_leave_tokens_of_the_prompt_alone() -> None:
    extras = RowExtras(
        row=0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        prompt=int32_bytes(PROMPT),
        generated=int32_bytes(GENERATED),
    )
    untouched = [token for token in range(VOCABULARY) if token not in GENERATED]
    assert (changed(extras)[untouched] == LOGITS[0].numpy()[untouched]).all()


def test_before_any_token_is_generated_only_the_prompt_is_penalised() -> None:
    extras = RowExtras(row=0, presence_penalty=1.0, repetition_penalty=2.0, prompt=int32_bytes(PROMPT))
    row = changed(extras)
    touched = np.flatnonzero(row != LOGITS[0].numpy())
    assert touched.tolist() == sorted(set(PROMPT))


def test_a_greedy_row_takes_the_largest_changed_logit() -> None:
    logits = LOGITS.repeat(3, 1)
    best, second = LOGITS[0].argsort(descending=True)[:2].tolist()
    extras = (
        RowExtras(row=1, banned=int32_bytes([best])),
        RowExtras(row=2, bias_ids=int32_bytes([7]), bias_values=np.array([50.0], dtype="<f4").tobytes()),
    )
    tokens = sample(logits, sampling_of(columns(3, extras)), np.arange(3))
    assert tokens.tolist() == [best, second, 7]


def test_a_banned_token_is_never_drawn_however_likely() -> None:
    best = int(LOGITS[0].argmax())
    assert drawn(2.0)[best] > 0
    assert drawn(2.0, banned=int32_bytes([best]))[best] == 0


def test_sampling_with_extras_is_sampling_of_the_changed_logits() -> None:
    extras = [
        RowExtras(row=row, presence_penalty=row / 4, repetition_penalty=1.5, generated=int32_bytes(GENERATED))
        for row in range(50)
    ]
    values: dict[str, Any] = {"temperature": [1.3] * 50, "seed": range(50), "top_p": [0.9] * 50}
    found = sample(LOGITS.repeat(50, 1), sampling_of(columns(50, tuple(extras), **values)), np.arange(50))
    logits = torch.from_numpy(np.stack([changed(extra) for extra in extras]))
    assert (found == sample(logits, sampling_of(columns(50, **values)), np.arange(50))).all()


def test_extras_follow_their_row_when_rows_are_reordered_and_touch_no_other() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    order = np.array([4, 0, 5, 2, 1, 3])
    extras = (
        RowExtras(row=2, repetition_penalty=9.0, prompt=int32_bytes(range(VOCABULARY))),
        RowExtras(row=4, banned=int32_bytes(range(1, VOCABULARY))),
    )
    sampling = columns(6, extras, temperature=[1.0] * 6, seed=range(6))
    found = logits[order].clone()
    tokens = sample(found, sampling_of(sampling).of(order), order)
    assert tokens[0] == 0
    for place, row in enumerate(order):
        assert torch.equal(found[place], logits[row]) == (row not in (2, 4)), row
    plain = sample(
        logits.clone(), sampling_of(columns(6, temperature=[1.0] * 6, seed=range(6))), np.arange(6)
    )
    for place, row in enumerate(order):
        if row not in (2, 4):
            assert tokens[place] == plain[row]


@pytest.mark.parametrize("penalty", [1e-45, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 2.0])
def test_an_absurd_penalty_gives_a_token_and_fails_no_neighbour(penalty: float, temperature: float) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[:, 8] = 0.0
    extras = RowExtras(row=0, repetition_penalty=penalty, prompt=int32_bytes(range(VOCABULARY)))
    sampling = columns(2, (extras,), temperature=[temperature] * 2, top_p=[0.9] * 2, seed=[1, 1])
    tokens = sample(logits, sampling_of(sampling), np.arange(2))
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    plain = columns(1, temperature=[temperature], top_p=[0.9], seed=[1])
    assert tokens[1] == sample(logits[1:], sampling_of(plain), np.array([1]))[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_the_step_and_give_no_token(value: float) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[1, 5] = value
    for sampling in (columns(2), columns(2, temperature=[0.0, 1.0])):
        with pytest.raises(ModelError, match="logits are not finite"):
            sample(logits, sampling_of(sampling), np.arange(2))
