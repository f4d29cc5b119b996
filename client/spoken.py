"""What a model said, kept for the prompts of later turns of the same conversations; bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

SPOKEN_TOKENS_MAX = 1 << 22
"""Tokens of answers that are kept; the oldest are forgotten."""
SPOKEN_ANSWERS_MAX = 8192


class SpokenAnswers(Mapping[int, npt.NDArray[np.int32]]):
    """By answer stream."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()
        self._tokens = 0

    def keep(self, stream: int, said: list[int]) -> None:
        before = self._kept.pop(stream, None)
        self._tokens += len(said) - (0 if before is None else len(before))
        self._kept[stream] = np.array(said, np.int32)
        while self._tokens > SPOKEN_TOKENS_MAX or len(self._kept) > SPOKEN_ANSWERS_MAX:
            _, oldest = self._kept.popitem(last=False)
            self._tokens -= len(oldest)

    def __getitem__(self, stream: int) -> npt.NDArray[np.int32]:
        return self._kept[stream]

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
