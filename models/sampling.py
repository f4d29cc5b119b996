"""From logits to tokens.

The order is vLLM's (`v1/sample/sampler.py`): what a row changes in its raw logits (`sampling_extras.py`),
then temperature, min-p, top-k, top-p. transformers' `generate` differs in one place: its min-p comes last, so
that its top-p still counts the tokens that min-p removes. The fields are vLLM's, and so is what they mean.

A row's token depends on its own logits, parameters, seed and position only, never on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import RowExtras, RowLogprobs, SamplingColumns
from muxk.models.errors import ModelError
from muxk.models.philox import uniforms
from muxk.models.sampling_extras import change_logits
from muxk.models.sampling_logprobs import Asked, logprobs_of
from numpy.typing import NDArray
from torch import Tensor

GREEDY_BELOW = 1e-5
"""A temperature below it is greedy."""
FIRST_CANDIDATES = 256
"""How many of the largest logits top-p looks at before it looks at more."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, one value a row."""

    greedy: bool
    """True when every row is greedy and none has extras."""
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seed: NDArray[np.uint64]
    choice: NDArray[np.uint32]
    min_p: NDArray[np.float32] | None = None
    """None: off for all."""
    extras: tuple[tuple[int, RowExtras], ...] = ()
    """(row here, what it asks): the row that the extras name is that of the work."""

    def of(self, rows: NDArray[np.int64]) -> Sampling:
        """The parameters of some rows, in that order."""
        return Sampling(
            greedy=self.greedy,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            seed=self.seed[rows],
            choice=self.choice[rows],
            min_p=None if self.min_p is None else self.min_p[rows],
            extras=self._extras_of(rows) if self.extras else (),
        )

    def _extras_of(self, rows: NDArray[np.int64]) -> tuple[tuple[int, RowExtras], ...]:
        places = {row: place for place, row in enumerate(rows.tolist())}
        return tuple((places[row], extra) for row, extra in self.extras if row in places)


def sampling_of(columns: SamplingColumns, extras: tuple[RowExtras, ...] | None = None) -> Sampling:
    """The arrays behind column bytes; `extras` instead of the columns' own when given."""
    chosen = columns.extras if extras is None else extras
    return Sampling(
        greedy=columns.greedy,
        temperature=np.frombuffer(columns.temperature, dtype="<f4"),
        top_p=np.frombuffer(columns.top_p, dtype="<f4"),
        top_k=np.frombuffer(columns.top_k, dtype="<i4"),
        seed=np.frombuffer(columns.seed, dtype="<u8"),
        choice=np.frombuffer(columns.choice, dtype="<u4"),
        min_p=np.frombuffer(columns.min_p, dtype="<f4") if columns.min_p else None,
        extras=tuple((extra.row, extra) for extra in chosen),
    )


def sample_reported(
    logits: Tensor, sampling: Sampling, positions: NDArray[np.int64]
) -> tuple[NDArray[np.int32], tuple[RowLogprobs, ...]]:
    """`sample`, and log-probabilities for the rows that want them, in the order of the work's rows."""
    wanting = [(place, extra) for place, extra in sampling.extras if extra.logprobs is not None]
    if not wanting:
        return sample(logits, sampling, positions), ()
    # A copy: sampling may change these rows.
    raw = logits[[place for place, _ in wanting]]
    tokens = sample(logits, sampling, positions)
    asked = [
        Asked(extra.row, int(positions[place]), int(tokens[place]), extra.logprobs or 0)
        for place, extra in wanting
    ]
    return tokens, tuple(logprobs_of(raw, asked))


def sample(logits: Tensor, sampling: Sampling, positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """One token a row: int32[rows] from float32[rows, vocabulary], of which rows with extras are changed.

    `positions` int64[rows] are those of the sampled tokens; they count the random numbers. ModelError when
    logits of the model are not finite.
    """
    rows_of_logits = logits.numpy()
    for place, extra in sampling.extras:
        if extra.changes_logits:
            change_logits(rows_of_logits[place], extra)
    # numpy's argmax is 10 times as fast as torch's on a row of 49k.
    tokens: NDArray[np.int32] = rows_of_logits.argmax(axis=1).astype(np.int32)
    # numpy takes a NaN for the largest of a row.
    if not np.isfinite(np.take_along_axis(rows_of_logits, tokens[:, None], axis=1)).all():
        raise ModelError("the model's logits are not finite")
    if sampling.greedy:
        return tokens
    rows = np.flatnonzero(sampling.temperature >= GREEDY_BELOW)
    if len(rows):
        chosen = logits[torch.from_numpy(rows)]
        tokens[rows] = draw(chosen, sampling.of(rows), positions[rows])
    return tokens


def draw(logits: Tensor, sampling: Sampling, positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Draw one token a row by inverting the cumulative distribution in the order of token ids."""
    weights = torch.from_numpy(kept_weights(logits, sampling))
    cumulative = torch.cumsum(weights, dim=1, dtype=torch.float64).numpy()
    totals = cumulative[:, -1]
    points = uniforms(sampling.seed, positions, sampling.choice) * totals
    # Rounding may put a point on the total, where no token lies.
    points = np.minimum(points, np.nextafter(totals, 0.0))
    found = [np.searchsorted(row, point, side="right") for row, point in zip(cumulative, points, strict=True)]
    return np.array(found, dtype=np.int32)


def kept_weights(logits: Tensor, sampling: Sampling) -> NDArray[np.float32]:
    """Unnormalised probabilities float32[rows, vocabulary], 0 for what min-p, top-k and top-p remove.

    Min-p removes what is less likely than it times the most likely token. Top-k keeps every logit that ties
    with the k-th. Top-p keeps the smallest set of largest logits whose probability, among what is left by
    then, reaches it, and every logit that ties with the smallest of them.
    """
    # The largest is taken off before the division, which could overflow.
    largest = torch.from_numpy(logits.numpy().max(axis=1, keepdims=True))
    temperature = torch.from_numpy(sampling.temperature.copy())[:, None]
    scaled: NDArray[np.float32] = (logits - largest).div_(temperature).numpy()
    weights: NDArray[np.float32] = torch.exp(torch.from_numpy(scaled)).numpy()
    if sampling.min_p is not None:
        # The most likely token has weight 1.
        weights *= weights >= sampling.min_p[:, None]
    if (sampling.top_k > 0).any():
        weights *= scaled >= _top_k_threshold(scaled, sampling.top_k)
    for row in np.flatnonzero(sampling.top_p < 1.0):
        weights[row] *= weights[row] >= _top_p_threshold(weights[row], float(sampling.top_p[row]))
    return weights


def _top_k_threshold(scaled: NDArray[np.float32], top_k: NDArray[np.int32]) -> NDArray[np.float32]:
    """The k-th largest logit of each row, or -inf where top-k is off: float32[rows, 1]."""
    counts = np.clip(top_k, 0, scaled.shape[1]).astype(np.int64)
    largest = _largest(scaled, int(counts.max()))
    threshold = np.take_along_axis(largest, np.maximum(counts - 1, 0)[:, None], axis=1)
    return np.where(counts[:, None] == 0, np.float32(-np.inf), threshold)


def _top_p_threshold(weights: NDArray[np.float32], top_p: float) -> np.float32:
    """The weight of float32[vocabulary] at which the sum of the largest reaches top-p of all.

    Looks at ever more candidates, until there are enough. Those that min-p or top-k removed are left out
    first: numpy's partition is slow on an array of mostly equal values.
    """
    left = weights[weights > 0]
    wanted = top_p * left.sum(dtype=np.float64)
    candidates = FIRST_CANDIDATES
    while True:
        largest = _largest(left[None, :], candidates)[0]
        before = np.cumsum(largest, dtype=np.float64) - largest
        kept = max(int((before < wanted).sum()), 1)
        if candidates >= len(left) or kept < candidates:
            threshold: np.float32 = largest[kept - 1]
            return threshold
        candidates *= 8


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The `count` largest of each row, or all, in descending order. numpy partitions faster than torch."""
    kept = max(values.shape[1] - count, 0)
    return -np.sort(-np.partition(values, kept, axis=1)[:, kept:], axis=1)
