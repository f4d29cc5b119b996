"""The tables of one call on a card: rows of new tokens, each after tokens in its pages, copied in one piece.

A decode step is rows of one new token, a prefill chunk rows of several, a fused step both, decode first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import PAGE_SIZE
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Numbers: each part of the packed tables begins at a multiple, so that kernels may load 64 bytes at once."""

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Tables:
    """On the host; all int32."""

    tokens: Ints
    """[tokens]."""
    positions: Ints
    """[tokens]."""
    slots: Ints
    """[tokens]: page times PAGE_SIZE plus the place in it, where keys and values of the token go."""
    query_starts: Ints
    """[rows + 1]: where the tokens of each row begin."""
    page_starts: Ints
    """[rows + 1]: where the pages of each row begin in `pages`."""
    last_page: Ints
    """[rows]: tokens in the last page of each row, 1 to PAGE_SIZE."""
    contexts: Ints
    """[rows]: tokens that the last new token of a row sees, itself included."""
    pages: Ints
    """[sum of the rows' pages]."""

    def parts(self) -> tuple[Ints, ...]:
        """In the order in which they are packed: what grows with the context comes last."""
        return (
            *(self.tokens, self.positions, self.slots, self.query_starts),
            *(self.page_starts, self.last_page, self.contexts, self.pages),
        )

    @property
    def rows(self) -> int:
        return len(self.contexts)

    @property
    def most_new_tokens(self) -> int:
        """Of any row."""
        return int(np.diff(self.query_starts).max())


@dataclass(frozen=True)
class Batch:
    """Tables on the device, with those on the host that planning needs. Parts are as in `Tables`."""

    host: Tables
    pinned: tuple[Tensor, ...]
    """The parts on the host, in memory that copies to the device do not have to wait for."""
    packed: Tensor
    """int32: all parts on the device."""
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    page_starts: Tensor
    last_page: Tensor
    contexts: Tensor
    pages: Tensor


def tables_of(tokens: Ints, new: Sequence[int], reused: Sequence[int], page_table: Ints) -> Tables:
    """Tables of rows of `new` tokens (at least 1) after `reused` ones; page_table int32[rows, width]."""
    new_tokens, before = np.asarray(new, dtype=np.int32), np.asarray(reused, dtype=np.int32)
    query_starts = _starts(new_tokens)
    positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(before - query_starts[:-1], new_tokens)
    owners = np.repeat(np.arange(len(new_tokens)), new_tokens)
    contexts = before + new_tokens
    counts = (contexts - 1) // PAGE_SIZE + 1
    used = np.arange(page_table.shape[1]) < counts[:, None]
    return Tables(
        tokens=tokens,
        positions=positions,
        slots=page_table[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        query_starts=query_starts,
        page_starts=_starts(counts),
        last_page=(contexts - 1) % PAGE_SIZE + 1,
        contexts=contexts,
        pages=page_table[used],
    )


def decode_tables(tokens: Ints, positions: Ints, page_table: Ints, rows: int) -> Tables:
    """Tables of a step; rows past its own, up to `rows`, are made up on page 0."""
    added = rows - len(tokens)
    return tables_of(
        np.pad(tokens, (0, added)),
        [1] * rows,
        np.pad(positions, (0, added)).tolist(),
        np.pad(page_table, ((0, added), (0, 0))),
    )


def joined_table(first: Ints, second: Ints) -> Ints:
    """Two page tables one above the other, the narrower padded with page 0."""
    width = max(first.shape[1], second.shape[1])
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in (first, second)])


def packed_words(tokens: int, rows: int, pages: int) -> int:
    """int32 numbers of packed tables at most so large."""
    counts = (tokens, tokens, tokens, rows + 1, rows + 1, rows, rows, pages)
    return sum(_aligned(count) for count in counts)


def upload(tables: Tables, device: torch.device, into: Tensor | None = None) -> Batch:
    """Copy tables to the device in one piece, without waiting for it.

    `into` int32: where they shall lie, for a graph that reads them there; its size bounds `pages` alone.
    """
    parts = tables.parts()
    starts = np.cumsum([0, *(_aligned(len(part)) for part in parts)]).tolist()
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = torch.empty(starts[-1], dtype=torch.int32, device=device) if into is None else into
    assert starts[-1] <= packed.numel(), (starts[-1], packed.numel())
    words = host.numpy()
    for part, start in zip(parts, starts, strict=False):
        words[start : start + len(part)] = part
    packed[: starts[-1]].copy_(host, non_blocking=True)
    spans = [slice(start, start + len(part)) for part, start in zip(parts, starts, strict=False)]
    return Batch(tables, tuple(host[span] for span in spans), packed, *(packed[span] for span in spans))


def upload_arrays(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Copy arrays of any types to the device in one piece, without waiting for it."""
    starts = np.cumsum([0, *(_aligned(array.nbytes) for array in arrays)]).tolist()
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_torch_type(array)).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """Where the host finds a tensor once the work before has ended on the device; does not wait for it."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def used_on_this_stream(*tensors: Tensor) -> None:
    """Tell the allocator of tensors that another lane's stream allocated, so that what reads them here has
    ended before their memory is somebody else's."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream())


def _starts(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _torch_type(array: NDArray[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
