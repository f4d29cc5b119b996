"""Decode attention over paged KV, one token a row, without copying the pages together.

Both products are weighted sums of rows of the pool, which is what an embedding bag computes: scores of a
page are the sum over `d` of `q[d]` times row `d` of its (transposed) keys; the output is the sum over
tokens of probability times value row. So the pool is read in place, by FBGEMM's vectorised kernel.
Measured at 8 rows of 208 tokens against gathering pages and batched products: 0.44 against 0.96 ms a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import PAGE_SIZE
from muxk.models.ops import Heads, KvLayer, Slots
from numpy.typing import NDArray
from torch import Tensor

WASTED_PAGES = 48
"""Pages of padding a group of rows may read: about what one more group costs in calls."""


class DecodeAttention:
    """The attention of one decode step. Rows of similar context form a group, padded to its longest."""

    def __init__(
        self,
        page_table: NDArray[np.int32],
        positions: NDArray[np.int32],
        heads: Heads,
        window: int | None = None,
    ) -> None:
        """page_table int32[rows, pages]; positions int32[rows], ascending. Pages before a window are read."""
        table = page_table.astype(np.int64)
        rows = np.arange(len(positions))
        pages = torch.from_numpy(table[rows, positions // PAGE_SIZE])
        self.slots = Slots(pages, torch.from_numpy((positions % PAGE_SIZE).astype(np.int64)))
        self._shape = _Shape(heads.queries, heads.kv, heads.dim)
        self._groups = [
            _group(table[first:last], positions[first:last], first, self._shape, window)
            for first, last in group_rows(positions // PAGE_SIZE + 1)
        ]

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, kv: KvLayer) -> Tensor:
        key_rows, value_rows = kv.keys.view(-1, PAGE_SIZE), kv.values.view(-1, self._shape.head_dim)
        parts = [
            _attend(group, queries[group.first : group.last], key_rows, value_rows, self._shape)
            for group in self._groups
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class _Shape:
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class _Group:
    """Rows [first, last) of the step, all read as `pages` pages."""

    first: int
    last: int
    pages: int
    key_rows: Tensor
    """int32[rows * kv_heads * pages * group * head_dim]: rows of the keys, one bag a score page."""
    key_offsets: Tensor
    value_rows: Tensor
    """int32[rows * heads * pages * PAGE_SIZE]: rows of the value pool, one bag for each query head."""
    value_offsets: Tensor
    mask: Tensor
    """float32[rows, 1, 1, pages * PAGE_SIZE]: 0, or -inf outside what the row sees."""


def group_rows(pages: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Cut rows, ascending in pages, into ranges that read at most WASTED_PAGES of padding each."""
    ranges: list[tuple[int, int]] = []
    last = len(pages)
    while last > 0:
        waste = np.cumsum((pages[last - 1] - pages[:last])[::-1])
        taken = int(np.searchsorted(waste, WASTED_PAGES, side="right"))
        ranges.append((last - taken, last))
        last -= taken
    return ranges[::-1]


def _group(
    table: NDArray[np.int64], positions: NDArray[np.int32], first: int, shape: _Shape, window: int | None
) -> _Group:
    pages = int(positions[-1]) // PAGE_SIZE + 1
    rows, tokens = len(table), pages * PAGE_SIZE
    # Page and KV head of each block: [rows, kv_heads, pages].
    blocks = table[:, None, :pages] * shape.kv_heads + np.arange(shape.kv_heads)[:, None]
    key_rows = blocks[..., None, None] * shape.head_dim + np.arange(shape.head_dim)
    key_shape = (rows, shape.kv_heads, pages, shape.group, shape.head_dim)
    value_rows = (blocks[..., None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(rows, -1, 1, tokens)
    value_shape = (rows, shape.kv_heads, shape.group, tokens)
    unseen = np.arange(tokens) > positions[:, None]
    if window is not None:
        unseen |= np.arange(tokens) <= positions[:, None] - window
    mask = np.where(unseen, np.float32(-np.inf), np.float32(0.0))
    return _Group(
        first=first,
        last=first + rows,
        pages=pages,
        key_rows=_flat(np.broadcast_to(key_rows, key_shape)),
        key_offsets=_offsets(key_shape),
        value_rows=_flat(np.broadcast_to(value_rows, value_shape)),
        value_offsets=_offsets(value_shape),
        mask=torch.from_numpy(mask.reshape(rows, 1, 1, tokens)),
    )


def _flat(indices: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(indices.astype(np.int32).reshape(-1))


def _offsets(shape: tuple[int, ...]) -> Tensor:
    """Where each bag begins, for bags of the last dimension."""
    return torch.arange(0, int(np.prod(shape)), shape[-1], dtype=torch.int32)


def _attend(group: _Group, queries: Tensor, key_rows: Tensor, value_rows: Tensor, shape: _Shape) -> Tensor:
    """queries [rows, heads, dim] -> [rows, heads * dim]."""
    rows = group.last - group.first
    grouped = queries.reshape(rows, shape.kv_heads, 1, shape.group, shape.head_dim)
    weights = grouped.expand(-1, -1, group.pages, -1, -1).reshape(-1)
    scores = _bags(key_rows, group.key_rows, group.key_offsets, weights)
    scores = scores.view(rows, shape.kv_heads, group.pages, shape.group, PAGE_SIZE).transpose(2, 3)
    scores = scores.reshape(rows, shape.kv_heads, shape.group, group.pages * PAGE_SIZE)
    masked = torch.add(group.mask, scores, alpha=shape.head_dim**-0.5)
    probabilities = torch.softmax(masked, dim=-1).view(-1)
    return _bags(value_rows, group.value_rows, group.value_offsets, probabilities).view(rows, -1)


def _bags(table: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of table rows in each bag."""
    return torch._embedding_bag(table, rows, offsets, False, 0, False, weights)[0]
