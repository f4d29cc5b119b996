"""Sampling on a device gives the tokens and the reports of sampling on the host, whatever rows ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_driver import columns
from muxk.kernel.work import RowExtras, RowLogprobs, SamplingColumns, int32_array, int32_bytes
from muxk.models.cuda_sampling import kept_weights_on_device, sample_on_device
from muxk.models.errors import ModelError
from muxk.models.sampling import kept_weights, sample_reported, sampling_of
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 700
NONE: frozenset[int] = frozenset()


def logits_of(rows: int, seed: int) -> Tensor:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    # Ties, of the largest too.
    logits[:, 300:310] = logits[:, :1]
    logits[:, 500] = logits.max(dim=1).values
    return logits


def mixed(seed: int, rows: int) -> tuple[SamplingColumns, np.ndarray]:
    """Greedy rows and drawn ones; every filter on for some and off for others; seeds of 64 bits."""
    chance = np.random.default_rng(seed)
    extras = tuple(extras_of(chance, row) for row in range(rows) if row % 3)
    sampling = columns(
        rows,
        extras,
        temperature=chance.choice([0.0, 0.3, 1.0, 2.5], rows),
        top_p=chance.choice([1.0, 0.9, 0.2, 1e-6], rows),
        top_k=chance.choice([0, 1, 40, 5000], rows),
        min_p=chance.choice([0.0, 0.05, 1.0], rows),
        seed=chance.integers(0, 2**64, rows, dtype=np.uint64),
        choice=chance.integers(0, 9, rows),
    )
    return sampling, chance.integers(1, 100_000, rows)


def extras_of(chance: np.random.Generator, row: int) -> RowExtras:
    bias = chance.choice(VOCABULARY, 20, replace=False)
    return RowExtras(
        row=row,
        presence_penalty=float(chance.choice([0.0, 0.7, -0.5])),
        frequency_penalty=float(chance.choice([0.0, 0.3])),
        repetition_penalty=float(chance.choice([1.0, 1.4, 0.8, 1e-40])),
        prompt=int32_bytes(chance.integers(0, VOCABULARY, 30)),
        generated=int32_bytes(chance.integers(0, 40, 25)),
        bias_ids=int32_bytes(bias),
        bias_values=chance.normal(size=20).astype("<f4").tobytes(),
        banned=int32_bytes(chance.choice(VOCABULARY, 5, replace=False)),
        logprobs=[None, 0, 7][row % 3] if row % 2 else 3,
    )


def on_device(
    logits: Tensor, sampling: SamplingColumns, positions: np.ndarray, fed: Tensor, carried: frozenset[int]
) -> tuple[list[int], tuple[RowLogprobs, ...]]:
    tokens, reports = sample_on_device(logits, sampling_of(sampling), positions, fed, carried).read()
    return int32_array(tokens).tolist(), reports


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_differ_in_everything_get_the_tokens_and_reports_of_the_host(seed: int) -> None:
    sampling, positions = mixed(seed, rows=13)
    logits = logits_of(13, seed)
    changed = logits.clone()
    wanted, reports = sample_reported(changed, sampling_of(sampling), positions)
    found = on_device(logits, sampling, positions, torch.zeros(13, dtype=torch.int32), NONE)
    assert found == (wanted.tolist(), reports)
    assert torch.equal(logits, changed), "bias, penalties and bans, to the last bit"


def test_ids_that_only_the_tokenizer_knows_change_no_other_row() -> None:
    """Behind the last logit of a row comes the first of the next; behind the last row, other memory."""
    past = int32_bytes([3, VOCABULARY, VOCABULARY + 5])
    values = np.array([9.0, 50.0, 50.0], dtype="<f4").tobytes()
    extras = tuple(RowExtras(row, bias_ids=past, bias_values=values, banned=past[4:]) for row in (0, 1))
    logits = logits_of(2, seed=1)
    changed = logits.clone()
    changed[:, 3] += 9.0
    on_device(logits, columns(2, extras), np.arange(2), torch.zeros(2, dtype=torch.int32), NONE)
    assert torch.equal(logits, changed)


def test_a_batch_of_greedy_rows_takes_the_first_of_the_largest() -> None:
    logits = logits_of(4, seed=1)
    positions = np.arange(4, dtype=np.int64)
    wanted, _ = sample_reported(logits.clone(), sampling_of(columns(4)), positions)
    found, reports = on_device(logits, columns(4), positions, torch.zeros(4, dtype=torch.int32), NONE)
    assert (found, reports) == (wanted.tolist(), ())


def test_a_carried_token_counts_as_generated_before_the_host_knows_it() -> None:
    """As if the host had known: once more for a token that was generated, first for one that was not."""
    fed = [17, 3, 600]
    known = [[1, 3, 3], [1, 3, 3], []]
    base = {"presence_penalty": 1.5, "frequency_penalty": 0.75, "repetition_penalty": 1.3}
    positions = np.array([10, 11, 12])

    def extras(generated: list[list[int]]) -> tuple[RowExtras, ...]:
        return tuple(
            RowExtras(row=row, generated=int32_bytes(generated[row]), prompt=int32_bytes([9]), **base)
            for row in range(3)
        )

    logits = logits_of(3, seed=4)
    largest = logits.max(dim=1).values
    # Each is the largest until it is penalised once more.
    logits[0, 17], logits[2, 600] = largest[0] + 0.5, largest[2] + 0.5
    logits[1, 3] = 1.3 * (largest[1] + 3.4)
    told = columns(3, extras([[*known[row], fed[row]] for row in range(3)]))
    wanted, _ = sample_reported(logits.clone(), sampling_of(told), positions)
    carried = on_device(
        logits.clone(),
        columns(3, extras(known)),
        positions,
        torch.tensor(fed, dtype=torch.int32),
        frozenset({0, 1, 2}),
    )
    assert carried[0] == wanted.tolist()
    forgotten = on_device(
        logits.clone(), columns(3, extras(known)), positions, torch.tensor(fed, dtype=torch.int32), NONE
    )
    assert forgotten[0] != wanted.tolist(), "the case must tell the two apart"


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.7}]
)
def test_what_filters_keep_are_the_weights_of_the_host(filters: dict[str, float]) -> None:
    logits = logits_of(5, seed=3)
    sampling = sampling_of(
        columns(5, temperature=[0.7] * 5, **{name: np.full(5, value) for name, value in filters.items()})
    )
    found = kept_weights_on_device(logits, sampling, torch.full((5,), 0.7))
    assert np.array_equal(found.numpy(), kept_weights(logits, sampling))


def test_logits_that_are_not_finite_fail_the_item_when_it_is_read() -> None:
    for wrong in (torch.nan, torch.inf):
        logits = logits_of(3, seed=2)
        logits[1, 77] = wrong
        pending = sample_on_device(
            logits, sampling_of(columns(3)), np.arange(3), torch.zeros(3, dtype=torch.int32), NONE
        )
        with pytest.raises(ModelError, match="not finite"):
            pending.read()
