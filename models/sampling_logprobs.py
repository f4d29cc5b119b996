"""Log-probabilities of sampled tokens and of prompt tokens, of the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import PrefillWork, RowLogprobs, int32_array
from muxk.models.chunks import Chunk
from numpy.typing import NDArray
from torch import Tensor

HEAD_ROWS = 64
"""Prompt tokens whose logits exist at once; bounds the scratch of prompts that want log-probabilities."""


@dataclass(frozen=True)
class Asked:
    """What is asked about one position."""

    row: int
    position: int
    token: int
    top: int
    """How many of the most likely tokens to report."""


def logprobs_of(logits: Tensor, asked: list[Asked]) -> list[RowLogprobs]:
    """One report for each row of logits float32[len(asked), vocabulary], which stay as they are."""
    rows = logits.numpy()
    logprobs = torch.log_softmax(logits, dim=-1).numpy()
    return [_report(rows[at], logprobs[at], asked[at]) for at in range(len(asked))]


def prompt_logprobs(
    work: PrefillWork, chunk: Chunk, hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[RowLogprobs, ...]:
    """Reports on the prompt tokens that the chunk's hidden states float32[tokens, hidden] foretell.

    The state at a position foretells the next one. That after the last of a prompt is sampled, not reported.
    """
    reports: list[RowLogprobs] = []
    tokens = int32_array(work.tokens)
    for row, top in sorted(work.prompt_logprobs):
        if row not in chunk.rows:
            continue
        part = chunk.rows.index(row)
        first = sum(chunk.new_tokens[:part])
        count = chunk.new_tokens[part] - (part in chunk.ended)
        following = tokens[chunk.span.start + first + 1 :][:count].tolist()
        position = chunk.reused_tokens[part] + 1
        asked = [Asked(row, position + at, token, top) for at, token in enumerate(following)]
        for start in range(0, count, HEAD_ROWS):
            block = asked[start : start + HEAD_ROWS]
            logits = head(hidden[first + start : first + start + len(block)])
            reports += logprobs_of(logits, block)
    return tuple(reports)


def _report(logits: NDArray[np.float32], logprobs: NDArray[np.float32], asked: Asked) -> RowLogprobs:
    """Ranks compare logits, not their rounded log-probabilities: a greedy token is always the first."""
    token, logit = asked.token, logits[asked.token]
    ties = np.count_nonzero(logits[:token] == logit)
    top = _most_likely(logits, asked.top)
    return RowLogprobs(
        row=asked.row,
        position=asked.position,
        token=token,
        logprob=float(logprobs[token]),
        rank=int(1 + np.count_nonzero(logits > logit) + ties),
        top_ids=tuple(top.tolist()),
        top_logprobs=tuple(logprobs[top].tolist()),
    )


def _most_likely(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the largest logits, largest first, ties by id: int64[count] or all there are."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    at = max(len(logits) - count, 0)
    candidates = np.flatnonzero(logits >= np.partition(logits, at)[at])
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]
