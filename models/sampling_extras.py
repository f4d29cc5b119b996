"""What some rows change in their logits before anything else: bias, penalties and banned tokens.

In the order of vLLM's sampler (`v1/sample/sampler.py`): bias, repetition, frequency, presence. transformers
puts its sequence bias before its repetition penalty as well.
"""

from __future__ import annotations

import msgspec
import numpy as np
from muxk.kernel.work import DecodeWork, RowExtras, int32_array, int32_bytes
from numpy.typing import NDArray

LARGEST = np.finfo(np.float32).max
SMALLEST = np.finfo(np.float32).tiny


def change_logits(row: NDArray[np.float32], extras: RowExtras) -> None:
    """Change the logits float32[vocabulary] of one row, in place; what is not banned stays finite."""
    if extras.bias_ids:
        row[int32_array(extras.bias_ids)] += np.frombuffer(extras.bias_values, dtype="<f4")
    if extras.repetition_penalty != 1.0:
        _penalise_repetition(row, int32_array(extras.prompt + extras.generated), extras.repetition_penalty)
    if extras.presence_penalty or extras.frequency_penalty:
        ids, counts = np.unique(int32_array(extras.generated), return_counts=True)
        row[ids] -= counts.astype(np.float32) * np.float32(extras.frequency_penalty)
        row[ids] -= np.float32(extras.presence_penalty)
    # Last, so that nothing lifts them again.
    row[int32_array(extras.banned)] = -np.inf


def extras_with_carried(work: DecodeWork, fed: NDArray[np.int32]) -> tuple[RowExtras, ...]:
    """The extras of a step; carried tokens, which the host did not know, count as generated.

    `fed` int32[rows]: the tokens that the step feeds, carried ones filled in.
    """
    extras = work.sampling.extras
    if not extras or not work.carried_rows:
        return extras
    carried = set(int32_array(work.carried_rows).tolist())
    return tuple(_with_token(extra, fed[extra.row]) if extra.row in carried else extra for extra in extras)


def _with_token(extras: RowExtras, token: np.int32) -> RowExtras:
    return msgspec.structs.replace(extras, generated=extras.generated + int32_bytes([token]))


def _penalise_repetition(row: NDArray[np.float32], seen: NDArray[np.int32], penalty: float) -> None:
    """CTRL (Keskar et al., 2019), section 4.1, with the sign cared for as transformers does."""
    logits = row[seen]
    factor = np.float32(np.clip(penalty, SMALLEST, LARGEST))
    with np.errstate(over="ignore"):
        changed = np.where(logits < 0, logits * factor, logits / factor)
    # A token that was seen twice is written twice, with the same value.
    row[seen] = np.clip(changed, -LARGEST, LARGEST)
