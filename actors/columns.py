"""Column bytes of a batch from the requests in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from muxk.actors.messages import SamplingParams
from muxk.kernel.work import SamplingColumns


def sampling_columns(rows: Sequence[SamplingParams]) -> SamplingColumns:
    """One value a row in each column."""
    return SamplingColumns(
        temperature=np.array([row.temperature for row in rows], dtype="<f4").tobytes(),
        top_p=np.array([row.top_p for row in rows], dtype="<f4").tobytes(),
        top_k=np.array([row.top_k for row in rows], dtype="<i4").tobytes(),
        seed=np.array([row.seed for row in rows], dtype="<u8").tobytes(),
        choice=np.array([row.choice for row in rows], dtype="<u4").tobytes(),
        greedy=all(row.temperature == 0 for row in rows),
    )


def page_table(rows: Sequence[Sequence[int]]) -> tuple[bytes, int]:
    """int32[rows, widest] padded with page 0, and the width."""
    width = max((len(pages) for pages in rows), default=0)
    table = np.zeros((len(rows), width), dtype="<i4")
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    return table.tobytes(), width
