"""What executors ask the arbiter to run, and what a lane of a device runs.

Token ids, page indices and sampling columns travel as little-endian column bytes (`int32`, `float32`,
`uint64`), so that a batch of any size is one copy and no tensor ever crosses an actor.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np

PAGE_SIZE = 16
"""Tokens in one KV page."""


class Phase(StrEnum):
    """Which lane of a split runs an item."""

    DECODE = "decode"
    PREFILL = "prefill"


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
    """True when every row is greedy: the whole batch is one argmax."""


class PrefillWork(msgspec.Struct, frozen=True, tag=True):
    """A batch of prompts, run layer by layer; sampling one token a row after the last layer.

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

    @property
    def rows(self) -> int:
        return len(self.requests)


class DecodeWork(msgspec.Struct, frozen=True, tag=True):
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

    @property
    def rows(self) -> int:
        return len(self.requests)


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


class Item(msgspec.Struct, frozen=True):
    """A work item: layers [first_layer, last_layer) of a work, as it is launched on a lane."""

    item_id: int
    work: Work
    first_layer: int
    last_layer: int
    is_last: bool
    """True when this item ends the work, so that it samples and frees what is parked."""


class Split(msgspec.Struct, frozen=True, order=True):
    """How many units each phase may use.

    Disjoint lanes when `decode_units + prefill_units` is at most the device's units. Both equal to the
    device's units: one lane over the whole device, shared in time. A phase with 0 units launches nothing.
    """

    decode_units: int
    prefill_units: int


def attention_pairs(new_tokens: tuple[int, ...], reused_tokens: tuple[int, ...]) -> int:
    """Query-key pairs a causal prefill computes per head: sum of n * (n + 1) / 2 + n * r."""
    pairs = 0
    for new, reused in zip(new_tokens, reused_tokens, strict=True):
        pairs += new * (new + 1) // 2 + new * reused
    return pairs


def int32_bytes(values: object) -> bytes:
    """Column bytes of a sequence of integers that fit int32."""
    return np.asarray(values, dtype="<i4").tobytes()


def int32_array(column: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The read-only int32 array behind column bytes."""
    return np.frombuffer(column, dtype="<i4")
