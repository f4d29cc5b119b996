"""What an item of a simulated GPU computes: sums over its rows."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from muxk.kernel.work import (
    DECODE,
    PAGE_SIZE,
    DecodeWork,
    Item,
    ProbeWork,
    attention_pairs,
    chunk_rows,
    int32_array,
)


class ItemLoad(msgspec.Struct, frozen=True, gc=False):
    """What an item computes, in sums over its rows."""

    layers: int
    decode_rows: int
    decode_context: int
    """Tokens of context of the decode rows."""
    chunk_rows: int
    chunk_tokens: int
    """New tokens of a prefill chunk."""
    chunk_pairs: int
    """Query-key pairs a head."""
    chunk_context: int
    """New and earlier tokens of the chunk's rows."""
    embedded: int
    """Tokens that enter the first layer."""
    sampled: int
    """Rows that leave the last layer through the head."""
    decode_context_most: int | None = None
    """Of `decode_context`, what is on the device that has most of it, where several work as one; None: each
    has an equal part."""


class Spread:
    """How the context of a running batch lies on the devices that work as one.

    Pages say it: it is counted when the rows change, and once in so many steps as a page has tokens.
    """

    def __init__(self, pages_of_one: int) -> None:
        self._pages_of_one = pages_of_one
        self._requests: tuple[int, ...] = ()
        self._step = 0
        self._share = 1.0

    def of(self, item: Item, load: ItemLoad) -> ItemLoad:
        """The load of an item, with what is on the device that has most of its decode step's context."""
        step = item.work if isinstance(item.work, DecodeWork) else item.decode
        if step is None:
            return load
        return msgspec.structs.replace(load, decode_context_most=self.most_context(step))

    def most_context(self, step: DecodeWork) -> int:
        """Tokens of a step's context on the device that has most of it."""
        if step.requests != self._requests or not 0 <= step.step_id - self._step < PAGE_SIZE:
            pages = int(int32_array(step.positions).max()) // PAGE_SIZE + 1
            table = int32_array(step.page_table).reshape(step.rows, step.pages_per_row)[:, :pages]
            by_device = np.bincount((table[table > 0] - 1) // self._pages_of_one)
            self._share = float(by_device.max() / by_device.sum())
            self._requests, self._step = step.requests, step.step_id
        return math.ceil(self._share * step.context_tokens)


def load_of(item: Item, layers: int) -> ItemLoad:
    """Sums over the rows of an item, of a model with so many layers."""
    work, step = item.work, item.decode
    count = item.last_layer - item.first_layer
    begins, ends = item.first_layer == 0, item.last_layer == layers
    if isinstance(work, DecodeWork):
        batch = len(work.requests)
        return ItemLoad(count, batch, work.context_tokens, 0, 0, 0, 0, batch * begins, batch * ends)
    if isinstance(work, ProbeWork):
        return _probe_load(work, count, layers)
    decode_rows, decode_context = (0, 0) if step is None else (step.rows, step.context_tokens)
    rows = chunk_rows(work, range(item.first_token, item.last_token))
    tokens = item.last_token - item.first_token
    new, reused = tuple(row.new_tokens for row in rows), tuple(row.reused_tokens for row in rows)
    sampled = decode_rows + sum(row.ends for row in rows)
    return ItemLoad(
        count,
        decode_rows,
        decode_context,
        len(rows),
        tokens,
        attention_pairs(new, reused),
        tokens + sum(reused),
        (decode_rows + tokens) * begins,
        sampled * ends,
    )


def _probe_load(work: ProbeWork, count: int, layers: int) -> ItemLoad:
    """A probe of all layers samples, one of fewer does not."""
    rows = work.rows
    sampled = rows * (count == layers)
    if work.phase is DECODE:
        return ItemLoad(count, rows, rows * work.context_tokens, 0, 0, 0, 0, rows, sampled)
    tokens = rows * work.new_tokens
    pairs = attention_pairs((work.new_tokens,) * rows, (work.context_tokens,) * rows)
    context = tokens + rows * work.context_tokens
    return ItemLoad(count, 0, 0, rows, tokens, pairs, context, tokens, sampled)
