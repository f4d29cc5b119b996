"""A prefill chunk: which part of which row a range of a batch's new tokens holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from muxk.kernel.work import PrefillWork, int32_array
from muxk.models.config import ModelConfig
from numpy.typing import NDArray

CHUNK_BYTES = 512 << 20
"""Scratch memory that the activations of one prefill chunk may take."""
CHUNK_TOKENS_LEAST = 256
"""A chunk may have so many tokens however wide the model is."""


@dataclass(frozen=True)
class Chunk:
    """The parts of rows that a chunk computes, one part after the other; a part belongs to one row."""

    span: range
    """The tokens of the batch that it is."""
    tokens: NDArray[np.int32]
    """int32[tokens]: of all parts."""
    rows: tuple[int, ...]
    """The row of the work that each part belongs to, ascending."""
    new_tokens: tuple[int, ...]
    """Tokens of each part, at least 1."""
    reused_tokens: tuple[int, ...]
    """Tokens of the row before the part, whose KV is in the row's pages."""
    table: NDArray[np.int32]
    """int32[parts, pages_per_row]."""
    ended: tuple[int, ...]
    """Parts that hold the last token of their row."""

    @property
    def last_tokens(self) -> NDArray[np.int64]:
        """int64[len(ended)]: where the last tokens of the rows that end lie among the chunk's tokens."""
        lasts: NDArray[np.int64] = np.cumsum(self.new_tokens, dtype=np.int64) - 1
        return lasts[list(self.ended)]


def chunk_of(work: PrefillWork, tokens: range) -> Chunk:
    """Cut the range `tokens` of a batch's new tokens into parts of rows."""
    total = sum(work.new_tokens)
    assert tokens.step == 1, tokens
    assert 0 <= tokens.start < tokens.stop <= total, (tokens, total)
    rows: list[int] = []
    new_tokens: list[int] = []
    reused_tokens: list[int] = []
    ended: list[int] = []
    end = 0
    for row, (new, reused) in enumerate(zip(work.new_tokens, work.reused_tokens, strict=True)):
        start, end = end, end + new
        first, last = max(start, tokens.start), min(end, tokens.stop)
        if first >= last:
            continue
        if last == end:
            ended.append(len(rows))
        rows.append(row)
        new_tokens.append(last - first)
        reused_tokens.append(reused + first - start)
    table = int32_array(work.page_table).reshape(work.rows, work.pages_per_row)
    return Chunk(
        span=tokens,
        tokens=int32_array(work.tokens)[tokens.start : tokens.stop],
        rows=tuple(rows),
        new_tokens=tuple(new_tokens),
        reused_tokens=tuple(reused_tokens),
        table=table[rows],
        ended=tuple(ended),
    )


def whole_chunk(
    tokens: NDArray[np.int32],
    table: NDArray[np.int32],
    new_tokens: tuple[int, ...],
    reused_tokens: tuple[int, ...],
) -> Chunk:
    """All tokens of a batch as one chunk."""
    rows = tuple(range(len(new_tokens)))
    return Chunk(range(len(tokens)), tokens, rows, new_tokens, reused_tokens, table, ended=rows)


def largest_chunk(config: ModelConfig) -> int:
    """Most tokens of a chunk: what CHUNK_BYTES hold, or CHUNK_TOKENS_LEAST."""
    return max(CHUNK_BYTES // activation_bytes(config), CHUNK_TOKENS_LEAST)


def activation_bytes(config: ModelConfig) -> int:
    """Bytes that a token of a chunk takes in a layer, gate and up aside, which come in blocks.

    The hidden state, its norm and the output product, the qkv product with a rotated copy, what was
    attended, twice in a fused step, and the rotation.
    """
    qkv = config.query_width + 2 * config.kv_width
    return 4 * (3 * config.hidden + 2 * qkv + 2 * config.query_width + config.head_dim)
