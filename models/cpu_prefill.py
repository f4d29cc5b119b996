"""Prefill attention over paged KV: rows of new tokens, each after reused tokens, with bounded scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import PAGE_SIZE
from muxk.models.ops import KvLayer, Slots
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

QUERY_BLOCK = 256
"""Queries of one masked attention call, which bounds the mask to QUERY_BLOCK rows."""


@dataclass(frozen=True)
class _Row:
    first: int
    """Its first token in the call."""
    new: int
    reused: int
    pages: Tensor
    """int64: the pages of its reused and new tokens."""


class PrefillAttention:
    """The attention of one prefill call. Rows without reused tokens never read the pool."""

    def __init__(
        self,
        page_table: NDArray[np.int32],
        new_tokens: Sequence[int],
        reused_tokens: Sequence[int],
        window: int | None = None,
    ) -> None:
        """page_table int32[rows, pages]; the counts are one for each row."""
        self._window = window
        table = page_table.astype(np.int64)
        firsts = np.concatenate([[0], np.cumsum(new_tokens)])
        self._rows = [
            _Row(int(firsts[row]), new, reused, _used_pages(table[row], new + reused))
            for row, (new, reused) in enumerate(zip(new_tokens, reused_tokens, strict=True))
        ]
        positions = row_positions(new_tokens, reused_tokens)
        owners = np.repeat(np.arange(len(table)), new_tokens)
        pages = torch.from_numpy(table[owners, positions // PAGE_SIZE])
        self.slots = Slots(pages, torch.from_numpy(positions % PAGE_SIZE))

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, kv: KvLayer) -> Tensor:
        tokens, heads, dim = queries.shape
        out = queries.new_empty(tokens, heads * dim)
        for row in self._rows:
            span = slice(row.first, row.first + row.new)
            if row.reused == 0 and (self._window is None or row.new <= self._window):
                _attend_alone(queries[span], keys[span], values[span], out[span])
            else:
                _attend_after(queries[span], row, kv, out[span], self._window)
        return out


def row_positions(new_tokens: Sequence[int], reused_tokens: Sequence[int]) -> NDArray[np.int64]:
    """Positions of the new tokens of all rows, one row after the other."""
    return np.concatenate(
        [
            np.arange(reused, reused + new, dtype=np.int64)
            for new, reused in zip(new_tokens, reused_tokens, strict=True)
        ]
    )


def _used_pages(table_row: NDArray[np.int64], tokens: int) -> Tensor:
    return torch.from_numpy(table_row[: -(-tokens // PAGE_SIZE)].copy())


def _attend_alone(queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Plain causal attention of one row."""
    kv_heads = keys.shape[1]
    grouped = _grouped_queries(queries, kv_heads)
    shape = (grouped.shape[0], -1, -1, -1)
    _store(
        functional.scaled_dot_product_attention(
            grouped,
            keys.transpose(0, 1).expand(shape),
            values.transpose(0, 1).expand(shape),
            is_causal=True,
        ),
        out,
    )


def _attend_after(queries: Tensor, row: _Row, kv: KvLayer, out: Tensor, window: int | None) -> None:
    """Attention of one row to its reused pages and its own new tokens, a block of queries at a time."""
    keys, values = _gather(kv, row.pages)
    grouped = _grouped_queries(queries, keys.shape[0])
    groups = grouped.shape[0]
    block = min(QUERY_BLOCK, row.new)
    mask = _right_aligned_mask(block, row.reused + row.new, window)
    for start in range(0, row.new, block):
        size = min(block, row.new - start)
        seen = row.reused + start + size
        attended = functional.scaled_dot_product_attention(
            grouped[:, :, start : start + size],
            keys[:, :seen].expand(groups, -1, -1, -1),
            values[:, :seen].expand(groups, -1, -1, -1),
            attn_mask=mask[block - size :, mask.shape[1] - seen :],
        )
        _store(attended, out[start : start + size])


def _right_aligned_mask(block: int, keys: int, window: int | None) -> Tensor:
    """float32[block, keys]: causal in its last `block` columns, open before or as far as the window goes.

    The mask of any block of queries is its lower right corner.
    """
    mask = torch.zeros(block, keys)
    mask[:, keys - block :].masked_fill_(torch.ones(block, block, dtype=torch.bool).triu_(1), -torch.inf)
    if window is not None:
        before = torch.ones(block, keys, dtype=torch.bool).tril_(keys - block - window)
        mask.masked_fill_(before, -torch.inf)
    return mask


def _grouped_queries(queries: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, dim] -> [group, kv_heads, tokens, dim]: the heads that share keys become a batch."""
    tokens, heads, dim = queries.shape
    return queries.view(tokens, kv_heads, heads // kv_heads, dim).permute(2, 1, 0, 3)


def _store(attended: Tensor, out: Tensor) -> None:
    """[group, kv_heads, tokens, dim] into [tokens, heads * dim]."""
    groups, kv_heads, tokens, dim = attended.shape
    out.view(tokens, kv_heads, groups, dim).copy_(attended.permute(2, 1, 0, 3))


def _gather(kv: KvLayer, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a row's pages as [kv_heads, tokens, dim]."""
    keys = kv.keys.index_select(0, pages).permute(1, 0, 3, 2)
    values = kv.values.index_select(0, pages).transpose(0, 1)
    heads, dim = keys.shape[0], keys.shape[3]
    return keys.reshape(heads, -1, dim), values.reshape(heads, -1, dim)
