"""Decode steps of the same greedy rows, one behind the other, in the KV pool of a simulated GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from muxk.kernel.work import DecodeWork, RowPages, int32_array, int32_values

if TYPE_CHECKING:
    from muxk.kernel.token_pool import TokenPool


class RowSteps(Protocol):
    """Rows whose last step is launched."""

    def step(self) -> Sequence[int]:
        """Write the tokens of the step before, sample the next ones."""


class StepsOfFew:
    """Row by row."""

    def __init__(self, pool: TokenPool, pages: RowPages, work: DecodeWork, tokens: bytes) -> None:
        self._pool = pool
        self._table = memoryview(pages.table).cast("i")
        self._width = pages.per_row
        self._positions = list(int32_values(work.positions))
        self._tokens: Sequence[int] = int32_values(tokens)

    def step(self) -> Sequence[int]:
        self._positions = [position + 1 for position in self._positions]
        self._tokens = self._pool.decode_rows(self._table, self._width, self._positions, self._tokens)
        return self._tokens


class StepsOfMany:
    """As arrays."""

    def __init__(self, pool: TokenPool, pages: RowPages, work: DecodeWork, tokens: bytes) -> None:
        self._pool = pool
        self._table = int32_array(pages.table).reshape(work.rows, pages.per_row)
        self._positions = int32_array(work.positions).astype(np.int64)
        self._tokens = int32_array(tokens)

    def step(self) -> Sequence[int]:
        self._positions = self._positions + 1
        self._tokens = self._pool.decode_arrays(self._table, self._positions, self._tokens)
        values: list[int] = self._tokens.tolist()
        return values
