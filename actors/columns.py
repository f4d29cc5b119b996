"""Column bytes of a batch from the requests in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from muxk.actors.messages import Request, SamplingParams
from muxk.kernel.work import RowExtras, SamplingColumns, int32_bytes

SAMPLING_DTYPE = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("top_k", "<i4"),
        ("seed", "<u8"),
        ("choice", "<u4"),
        ("min_p", "<f4"),
    ]
)
"""One row of the sampling columns."""


def sampling_columns(rows: Sequence[SamplingParams], extras: Sequence[RowExtras] = ()) -> SamplingColumns:
    """One value a row in each column."""
    min_p = any(row.min_p for row in rows)
    return SamplingColumns(
        temperature=np.array([row.temperature for row in rows], dtype="<f4").tobytes(),
        top_p=np.array([row.top_p for row in rows], dtype="<f4").tobytes(),
        top_k=np.array([row.top_k for row in rows], dtype="<i4").tobytes(),
        seed=np.array([row.seed for row in rows], dtype="<u8").tobytes(),
        choice=np.array([row.choice for row in rows], dtype="<u4").tobytes(),
        greedy=all(row.temperature == 0 for row in rows) and not extras,
        min_p=np.array([row.min_p for row in rows], dtype="<f4").tobytes() if min_p else b"",
        extras=tuple(extras),
    )


def plain_sampling(columns: npt.NDArray[np.void]) -> SamplingColumns:
    """Of rows of SAMPLING_DTYPE, without what depends on the tokens so far."""
    return SamplingColumns(
        temperature=columns["temperature"].tobytes(),
        top_p=columns["top_p"].tobytes(),
        top_k=columns["top_k"].tobytes(),
        seed=columns["seed"].tobytes(),
        choice=columns["choice"].tobytes(),
        greedy=not columns["temperature"].any(),
        min_p=columns["min_p"].tobytes() if columns["min_p"].any() else b"",
    )


class ExtrasMaker:
    """Makes a request's `RowExtras`, step by step; the parts that never change are made once."""

    __slots__ = ("_banned", "_bias_ids", "_bias_values", "_penalises", "_prompt", "params")

    def __init__(self, request: Request, end_ids: frozenset[int]) -> None:
        params = request.params
        ends = [] if params.ignore_eos else sorted(end_ids)
        self.params = params
        self._penalises = params.penalises
        self._prompt = request.prompt if params.penalises else b""
        self._bias_ids = int32_bytes([token for token, _ in params.logit_bias])
        self._bias_values = np.array([value for _, value in params.logit_bias], dtype="<f4").tobytes()
        self._banned = int32_bytes([*ends, *params.stop_token_ids]) if params.min_tokens else b""

    @property
    def needed(self) -> bool:
        """False when the row never has an entry."""
        return bool(self._penalises or self._bias_ids or self._banned or self.params.logprobs is not None)

    def make(self, row: int, generated: bytes, count: int) -> RowExtras | None:
        """For a row whose next token is the one after `count` generated ones; None when nothing is asked.

        `generated` int32: those of them that the host knows.
        """
        params = self.params
        banned = self._banned if count < params.min_tokens else b""
        if not (self._penalises or self._bias_ids or banned or params.logprobs is not None):
            return None
        return RowExtras(
            row=row,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            prompt=self._prompt,
            generated=generated if self._penalises else b"",
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            banned=banned,
            logprobs=params.logprobs,
        )


def page_table(rows: Sequence[Sequence[int]]) -> tuple[bytes, int]:
    """int32[rows, widest] padded with page 0, and the width."""
    width = max((len(pages) for pages in rows), default=0)
    table = np.zeros((len(rows), width), dtype="<i4")
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    return table.tobytes(), width
