"""The sampled tokens of the last decode steps, kept on the device for steps that are launched early."""

from __future__ import annotations

import numpy as np
import torch
from muxk.kernel.work import DecodeWork, int32_array
from muxk.models.carried import STEPS_KEPT, CarriedTokensMissingError
from muxk.models.cuda_batch import upload_arrays, used_on_this_stream
from torch import Tensor
from torch.nn import functional

PLACES = STEPS_KEPT + 1
"""One more than is kept: the place that a step writes was last read by the step before the one before it."""


class CarriedOnDevice:
    """Keeps the tokens of the last STEPS_KEPT steps. Steps must follow each other on the device."""

    def __init__(self, rows_max: int, device: torch.device) -> None:
        self._tokens = torch.zeros(PLACES, rows_max, dtype=torch.int32, device=device)
        self._steps: dict[int, tuple[int, int]] = {}
        """step id -> (place, rows), oldest first."""
        self._next = 0

    @property
    def bytes(self) -> int:
        return self._tokens.nbytes

    def keep(self, step_id: int, tokens: Tensor) -> None:
        """Remember the tokens int32[rows] of a step; the oldest is forgotten."""
        rows = tokens.shape[0]
        if rows > self._tokens.shape[1]:
            used_on_this_stream(self._tokens)
            self._tokens = functional.pad(self._tokens, (0, rows - self._tokens.shape[1]))
        self._steps.pop(step_id, None)
        self._tokens[self._next, :rows].copy_(tokens)
        self._steps[step_id] = (self._next, rows)
        self._next = (self._next + 1) % PLACES
        while len(self._steps) > STEPS_KEPT:
            del self._steps[next(iter(self._steps))]

    def check(self, work: DecodeWork) -> None:
        """CarriedTokensMissingError when the step that the tokens of some rows come from is not here."""
        if not work.carried_rows:
            return
        origins = int32_array(work.carried_from)
        if work.after_step not in self._steps:
            raise CarriedTokensMissingError(
                f"step {work.step_id} wants tokens of step {work.after_step}; kept are those of "
                f"{list(self._steps)}"
            )
        rows = self._steps[work.after_step][1]
        if origins.min() < 0 or origins.max() >= rows:
            raise CarriedTokensMissingError(
                f"step {work.step_id} wants row {origins.max()} of step {work.after_step}, "
                f"which had {rows} rows"
            )

    def fill(self, work: DecodeWork, tokens: Tensor) -> None:
        """Write carried tokens into the tokens int32[at least rows] that a step feeds; after `check`."""
        if not work.carried_rows:
            return
        place, _ = self._steps[work.after_step]
        columns = [int32_array(column).astype(np.int64) for column in (work.carried_rows, work.carried_from)]
        rows, origins = upload_arrays(columns, tokens.device)
        tokens.index_copy_(0, rows, self._tokens[place].index_select(0, origins))

    def forget(self) -> None:
        """Forget every step."""
        self._steps.clear()
