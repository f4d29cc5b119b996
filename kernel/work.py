"""What executors ask the arbiter to run, and what a lane of a device runs.

Token ids, page indices and sampling columns travel as little-endian column bytes (`int32`, `float32`,
`uint64`), so that a batch of any size is one copy and no tensor ever crosses an actor.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np

PAGE_SIZE = 16
"""Tokens in one KV page."""


class Phase(StrEnum):
    """Which lane of a split runs an item."""

    DECODE = "decode"
    PREFILL = "prefill"


DECODE, PREFILL = Phase.DECODE, Phase.PREFILL
"""For what runs at each step: in Python 3.11 it takes as long to find a member in its class as ten names."""


class PrefillShape(NamedTuple):
    """A prefill batch, as what runs beside it feels it: sums over its rows."""

    new_tokens: int
    reused_tokens: int


class RowExtras(msgspec.Struct, frozen=True):
    """What only some rows ask of the sampler; a row that asks none of it has no entry."""

    row: int
    presence_penalty: float = 0.0
    """Taken off the logit of every token that was generated."""
    frequency_penalty: float = 0.0
    """Taken off once for each time the token was generated."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or generated."""
    prompt: bytes = b""
    """int32: the prompt's tokens; empty when no penalty is set."""
    generated: bytes = b""
    """int32: generated tokens that the host knows of, empty when no penalty is set. A carried token (see
    `DecodeWork.carried_rows`) comes on top."""
    bias_ids: bytes = b""
    """int32: tokens whose logits get `bias_values` added."""
    bias_values: bytes = b""
    """float32, one for each of `bias_ids`."""
    banned: bytes = b""
    """int32: tokens that must not be sampled (ends of a sequence before `min_tokens`)."""
    logprobs: int | None = None
    """How many of the most likely tokens to report beside the sampled one; None: no report."""

    @property
    def changes_logits(self) -> bool:
        """False when the row is only reported on."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.bias_ids or self.banned)


class SamplingColumns(msgspec.Struct, frozen=True):
    """Sampling parameters of a batch, one value a row in each column."""

    temperature: bytes
    """float32[rows]; 0 is greedy."""
    top_p: bytes
    """float32[rows]; 1 is off."""
    top_k: bytes
    """int32[rows]; 0 is off."""
    seed: bytes
    """uint64[rows]."""
    choice: bytes
    """uint32[rows]; index of the choice among the `n` of a request."""
    greedy: bool
    """True when every row is greedy and `extras` is empty: the whole batch is one argmax."""
    min_p: bytes = b""
    """float32[rows], 0 is off; empty when it is off for all."""
    extras: tuple[RowExtras, ...] = ()
    """Ascending in rows."""


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position of a row, of the model's own logits.

    Before temperature, penalties, bias and filters, as vLLM's `raw_logprobs` are.
    """

    row: int
    position: int
    """Of the token that they are about, counted from the first token of the prompt."""
    token: int
    logprob: float
    rank: int
    """1 for the most likely token; ties rank by token id."""
    top_ids: tuple[int, ...]
    """The most likely tokens, most likely first, ties by token id."""
    top_logprobs: tuple[float, ...]


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """What an item hands to the host."""

    tokens: bytes = b""
    """int32: sampled tokens. Of a decode step one a row; of a prefill one for each row that its chunk ends,
    in order of rows, with the chunk's last layer, else empty."""
    logprobs: tuple[RowLogprobs, ...] = ()
    """Of sampled tokens, for rows that ask for them. Rows are those of the work."""
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    """Of prompt tokens that a prefill chunk saw, ascending in row and position."""


class PrefillWork(msgspec.Struct, frozen=True, tag=True):
    """A batch of prompts, run in chunks of its tokens, each layer by layer; samples one token a row.

    A chunk is a range of `tokens`, which may begin and end inside a row: the KV of what came before it in its
    row is in the row's pages. A row is sampled with the last layer of the chunk that holds its last token.

    Row r has `new_tokens[r]` tokens to compute (at least 1) after `reused_tokens[r]` whose KV is in its
    pages already. The sampled token of row r has position `reused_tokens[r] + new_tokens[r]`.
    """

    batch_id: int
    requests: tuple[int, ...]
    tokens: bytes
    """int32[sum(new_tokens)]: the rows' new tokens, one row after the other."""
    new_tokens: tuple[int, ...]
    reused_tokens: tuple[int, ...]
    page_table: bytes
    """int32[rows, pages_per_row], padded with page 0, which holds nothing."""
    pages_per_row: int
    sampling: SamplingColumns
    prompt_logprobs: tuple[tuple[int, int], ...] = ()
    """(row, how many most likely tokens) of rows that want their prompt's log-probabilities. Such a row
    reuses no tokens, unless it is recomputed."""

    @property
    def rows(self) -> int:
        return len(self.requests)


class DecodeWork(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One decode step of a batch: row r feeds `tokens[r]` at `positions[r]`, samples `positions[r] + 1`."""

    step_id: int
    version: int
    """Counts the submissions of one step: a newer one replaces an older that was not launched."""
    requests: tuple[int, ...]
    tokens: bytes
    """int32[rows]: the last token of each row, whose KV this step writes."""
    positions: bytes
    """int32[rows]: the position of that token; its context is positions + 1 tokens."""
    page_table: bytes
    """int32[rows, pages_per_row], padded with page 0."""
    pages_per_row: int
    context_tokens: int
    """Sum over the rows of positions + 1."""
    sampling: SamplingColumns
    after_step: int = 0
    """The step whose sampled tokens `carried_from` points to; the device keeps them for one step."""
    carried_rows: bytes = b""
    """int32: rows of this step whose token the host did not know when it submitted; ascending. What
    `tokens` holds for them is ignored."""
    carried_from: bytes = b""
    """int32: for each of `carried_rows`, the row of step `after_step` that sampled its token."""

    @property
    def rows(self) -> int:
        return len(self.requests)


class RowPages(msgspec.Struct, frozen=True, gc=False):
    """Pages of the rows of a decode step, as in `DecodeWork`."""

    table: bytes
    per_row: int


class ProbeWork(msgspec.Struct, frozen=True, tag=True):
    """A measurement: a decode step, or prefill layers, of made-up tokens that touch page 0 only."""

    probe_id: int
    phase: Phase
    units: int
    rows: int
    new_tokens: int
    """Prefill: new tokens of each row. Decode: 1."""
    context_tokens: int
    """Reused tokens of each row (prefill), or context of each row (decode)."""


Work = PrefillWork | DecodeWork | ProbeWork


class Item(msgspec.Struct, frozen=True, gc=False):
    """A work item: layers [first_layer, last_layer) of a work, as it is launched on a lane.

    Of a prefill it is layers of one chunk of tokens. With `decode` it is a fused step: one pass through all
    layers over the rows of a decode step and a prefill chunk together.
    """

    item_id: int
    work: Work
    first_layer: int
    last_layer: int
    is_last: bool
    """True when this item ends the work, so that it samples and frees what is parked."""
    first_token: int = 0
    last_token: int = 0
    """Prefill: the chunk is `[first_token, last_token)` of the work's tokens."""
    decode: DecodeWork | None = None
    """The decode step of a fused item, whose `work` is a PrefillWork."""


class Split(msgspec.Struct, frozen=True, order=True):
    """How many units each phase may use.

    Disjoint lanes when `decode_units + prefill_units` is at most the device's units. Both equal to the
    device's units: one lane over the whole device, shared in time. A phase with 0 units launches nothing.
    """

    decode_units: int
    prefill_units: int


class ChunkRow(msgspec.Struct, frozen=True):
    """The part of a row that a prefill chunk computes."""

    row: int
    first: int
    """Place of its first token in the work's tokens."""
    new_tokens: int
    reused_tokens: int
    """Tokens of the row whose KV is in its pages by then: those that were reused, and earlier chunks'."""
    ends: bool
    """The chunk holds the row's last token, so that the row is sampled."""


def chunk_rows(work: PrefillWork, tokens: range) -> tuple[ChunkRow, ...]:
    """The rows that a chunk meets, in order; `tokens` is a range of the work's tokens and not empty."""
    rows = []
    begin = 0
    for row, (new, reused) in enumerate(zip(work.new_tokens, work.reused_tokens, strict=True)):
        end = begin + new
        first, last = max(begin, tokens.start), min(end, tokens.stop)
        if first < last:
            rows.append(ChunkRow(row, first, last - first, reused + first - begin, last == end))
        begin = end
    return tuple(rows)


def attention_pairs(new_tokens: tuple[int, ...], reused_tokens: tuple[int, ...]) -> int:
    """Query-key pairs a causal prefill computes per head: sum of n * (n + 1) / 2 + n * r."""
    pairs = 0
    for new, reused in zip(new_tokens, reused_tokens, strict=True):
        pairs += new * (new + 1) // 2 + new * reused
    return pairs


def int32_bytes(values: object) -> bytes:
    """Column bytes of a sequence of integers that fit int32. Raises struct.error for a list that does not."""
    if isinstance(values, list):  # much quicker than by way of an array
        small = len(values) < len(_SMALL)
        return _SMALL[len(values)].pack(*values) if small else struct.pack(f"<{len(values)}i", *values)
    return np.asarray(values, dtype="<i4").tobytes()


def int32_array(column: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The read-only int32 array behind column bytes."""
    return np.frombuffer(column, dtype="<i4")


def int32_values(column: bytes) -> Sequence[int]:
    """The integers of column bytes; much quicker than an array for the few of a small batch."""
    if len(column) < 4 * len(_SMALL):
        return _SMALL[len(column) // 4].unpack(column)
    values: list[int] = np.frombuffer(column, dtype="<i4").tolist()
    return values


_SMALL = tuple(struct.Struct(f"<{count}i") for count in range(65))
"""int32 columns of up to 64 rows."""
