"""From logits to tokens: temperature, then top-k, then top-p, as transformers' logits warpers order them.

A row's token depends on its own logits, parameters, seed and position only, never on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import SamplingColumns
from muxk.models.philox import uniforms
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
    """True when every row is greedy."""
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seed: NDArray[np.uint64]
    choice: NDArray[np.uint32]

    def of(self, rows: NDArray[np.int64]) -> Sampling:
        """The parameters of some rows, in that order."""
        return Sampling(
            greedy=self.greedy,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            seed=self.seed[rows],
            choice=self.choice[rows],
        )


def sampling_of(columns: SamplingColumns) -> Sampling:
    """The arrays behind column bytes."""
    return Sampling(
        greedy=columns.greedy,
        temperature=np.frombuffer(columns.temperature, dtype="<f4"),
        top_p=np.frombuffer(columns.top_p, dtype="<f4"),
        top_k=np.frombuffer(columns.top_k, dtype="<i4"),
        seed=np.frombuffer(columns.seed, dtype="<u8"),
        choice=np.frombuffer(columns.choice, dtype="<u4"),
    )


def sample(logits: Tensor, sampling: Sampling, positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """One token a row: int32[rows] from float32[rows, vocabulary].

    `positions` int64[rows] are those of the sampled tokens; they count the random numbers.
    """
    # numpy's argmax is 10 times as fast as torch's on a row of 49k.
    tokens: NDArray[np.int32] = logits.numpy().argmax(axis=1).astype(np.int32)
    if sampling.greedy:
        return tokens
    rows = np.flatnonzero(sampling.temperature >= GREEDY_BELOW)
    if len(rows):
        chosen = logits[torch.from_numpy(rows)]
        tokens[rows] = draw(chosen, sampling.of(rows), positions[rows])
    return tokens


def draw(logits: Tensor, sampling: Sampling, positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Draw one token a row by inverting the cumulative distribution in the order of token ids."""
    weights = kept_weights(logits, sampling)
    cumulative = np.cumsum(weights, axis=1)
    points = uniforms(sampling.seed, positions, sampling.choice) * cumulative[:, -1]
    found = np.sum(cumulative <= points[:, None], axis=1)
    # A point that rounding puts on the total belongs to the last token with any weight.
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    tokens: NDArray[np.int32] = np.minimum(found, last).astype(np.int32)
    return tokens


def kept_weights(logits: Tensor, sampling: Sampling) -> NDArray[np.float64]:
    """Unnormalised probabilities float64[rows, vocabulary], 0 for what top-k and top-p remove.

    Top-k keeps every logit that ties with the k-th. Top-p keeps the smallest set of largest logits whose
    probability reaches it, and every logit that ties with the smallest of them.
    """
    scaled = logits.double() / torch.from_numpy(sampling.temperature.astype(np.float64))[:, None]
    largest = scaled.amax(dim=1, keepdim=True)
    weights = torch.exp(scaled - largest)
    weights.masked_fill_(scaled < _top_k_threshold(scaled, sampling.top_k), 0.0)
    weights.masked_fill_(weights < _top_p_threshold(weights, sampling.top_p), 0.0)
    kept: NDArray[np.float64] = weights.numpy()
    return kept


def _top_k_threshold(scaled: Tensor, top_k: NDArray[np.int32]) -> Tensor:
    """The k-th largest logit of each row, or -inf where top-k is off: float64[rows, 1]."""
    vocabulary = scaled.shape[1]
    counts = np.clip(top_k, 0, vocabulary)
    if not counts.any():
        return torch.full((scaled.shape[0], 1), -torch.inf, dtype=scaled.dtype)
    largest = torch.topk(scaled, int(counts.max()), dim=1).values
    places = torch.from_numpy(np.maximum(counts - 1, 0).astype(np.int64))[:, None]
    off = torch.from_numpy(counts == 0)[:, None]
    return largest.gather(1, places).masked_fill(off, -torch.inf)


def _top_p_threshold(weights: Tensor, top_p: NDArray[np.float32]) -> Tensor:
    """The smallest weight that top-p keeps in each row, or 0 where it is off: float64[rows, 1]."""
    threshold = torch.zeros(weights.shape[0], 1, dtype=weights.dtype)
    rows = torch.from_numpy(np.flatnonzero(top_p < 1.0))
    if len(rows) == 0:
        return threshold
    wanted = torch.from_numpy(top_p.astype(np.float64))[rows, None] * weights[rows].sum(dim=1, keepdim=True)
    threshold[rows] = _smallest_kept(weights[rows], wanted)
    return threshold


def _smallest_kept(weights: Tensor, wanted: Tensor) -> Tensor:
    """The weight at which the sum of the largest reaches `wanted`; looks at ever more candidates."""
    vocabulary = weights.shape[1]
    candidates = min(FIRST_CANDIDATES, vocabulary)
    while True:
        largest = torch.topk(weights, candidates, dim=1).values
        before = largest.cumsum(dim=1) - largest
        kept = (before < wanted).sum(dim=1, keepdim=True).clamp_(min=1)
        if candidates == vocabulary or bool((kept < candidates).all()):
            return largest.gather(1, kept - 1)
        candidates = min(candidates * 8, vocabulary)
