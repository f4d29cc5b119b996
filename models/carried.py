"""The sampled tokens of the last decode steps, for steps that are launched before the host has seen them."""

from __future__ import annotations

import threading

import numpy as np
from muxk.kernel.work import DecodeWork, int32_array
from numpy.typing import NDArray

STEPS_KEPT = 2
"""A step that runs and the one before it; the contract is one, see `DecodeWork.after_step`."""


class CarriedTokensMissingError(RuntimeError):
    """A step wants tokens of a step that did not run here, or ran too long ago."""


class CarriedTokens:
    """Keeps the tokens of the last STEPS_KEPT decode steps. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, NDArray[np.int32]] = {}

    def keep(self, step_id: int, tokens: NDArray[np.int32]) -> None:
        """Remember the tokens int32[rows] of a step; the oldest is forgotten."""
        with self._lock:
            self._steps.pop(step_id, None)
            self._steps[step_id] = tokens
            while len(self._steps) > STEPS_KEPT:
                del self._steps[next(iter(self._steps))]

    def fed(self, work: DecodeWork) -> NDArray[np.int32]:
        """The tokens int32[rows] that a step feeds, carried ones filled in.

        CarriedTokensMissingError when the step that they come from is not there.
        """
        tokens = int32_array(work.tokens)
        if not work.carried_rows:
            return tokens
        with self._lock:
            sampled = self._steps.get(work.after_step)
            kept = list(self._steps)
        origins = int32_array(work.carried_from)
        if sampled is None:
            raise CarriedTokensMissingError(
                f"step {work.step_id} wants tokens of step {work.after_step}; kept are those of {kept}"
            )
        if origins.min() < 0 or origins.max() >= len(sampled):
            raise CarriedTokensMissingError(
                f"step {work.step_id} wants row {origins.max()} of step {work.after_step}, "
                f"which had {len(sampled)} rows"
            )
        filled = tokens.copy()
        filled[int32_array(work.carried_rows)] = sampled[origins]
        return filled

    def forget(self) -> None:
        """Forget every step."""
        with self._lock:
            self._steps.clear()
