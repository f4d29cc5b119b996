"""Attention of the CPU in torch's operators: from the qkv product to the input of the output product."""

from __future__ import annotations

from typing import Protocol

import torch
from muxk.models.ops import HeadNorms, Heads, KvLayer, Slots
from torch import Tensor
from torch.nn import functional


class PagedAttention(Protocol):
    """Attention over keys and values that are in the pool already."""

    slots: Slots

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, kv: KvLayer) -> Tensor:
        """queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim] -> [tokens, heads * dim]."""


class TorchAttention:
    """Norms and rotates heads, appends keys and values, attends, and leaves padding rows zero."""

    def __init__(self, paged: PagedAttention, heads: Heads, rotation: Tensor) -> None:
        """rotation complex64[tokens, 1, dim / 2]."""
        self._paged = paged
        self._heads = heads
        self._rotation = rotation

    def __call__(self, qkv: Tensor, norms: HeadNorms | None, kv: KvLayer) -> Tensor:
        heads, tokens = self._heads, self._rotation.shape[0]
        parts = qkv[:tokens].view(tokens, heads.queries + 2 * heads.kv, heads.dim)
        queries, keys, values = torch.split(parts, [heads.queries, heads.kv, heads.kv], dim=1)
        if norms is not None:
            queries = functional.rms_norm(queries, (heads.dim,), norms.queries, heads.epsilon)
            keys = functional.rms_norm(keys, (heads.dim,), norms.keys, heads.epsilon)
        queries, keys = rotate(queries, self._rotation), rotate(keys, self._rotation)
        append(kv, self._paged.slots, keys, values)
        attended = self._paged(queries, keys, values, kv)
        added = qkv.shape[0] - tokens
        return functional.pad(attended, (0, 0, 0, added)) if added else attended


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate interleaved pairs of [tokens, heads, dim] by complex64[tokens, 1, dim / 2]."""
    tokens, count, dim = heads.shape
    pairs = torch.view_as_complex(heads.view(tokens, count, dim // 2, 2))
    return torch.view_as_real(pairs * table).view(tokens, count, dim)


def append(kv: KvLayer, slots: Slots, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [tokens, kv_heads, dim] into their pages."""
    kv.keys.permute(0, 3, 1, 2).index_put_((slots.pages, slots.offsets), keys)
    kv.values.transpose(1, 2).index_put_((slots.pages, slots.offsets), values)
