"""Log-probabilities on the device, read by the host later; the numbers of `sampling_logprobs.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import PrefillWork, RowLogprobs, int32_array
from muxk.models.chunks import Chunk
from muxk.models.cuda_batch import to_host, upload_arrays
from muxk.models.sampling_logprobs import HEAD_ROWS, Asked
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class PendingLogprobs:
    """Reports on rows of logits, on their way to the host."""

    asked: Sequence[Asked]
    places: NDArray[np.int64] | None
    """int64[len(asked)]: the row of the sampled tokens that each is about; None: `asked` knows its token."""
    numbers: Tensor
    """float32[len(asked), 1 + most]: the token's log-probability, then those of the most likely."""
    ids: Tensor
    """int64[len(asked), 1 + most]: the token's rank, then the most likely tokens."""

    def read(self, sampled: NDArray[np.int32] | None = None) -> tuple[RowLogprobs, ...]:
        """Once the device is done; `sampled` int32[rows] where the reports are about sampled tokens."""
        numbers, ids = self.numbers.tolist(), self.ids.tolist()
        reports = []
        for at, asked in enumerate(self.asked):
            token = asked.token
            if self.places is not None and sampled is not None:
                token = int(sampled[self.places[at]])
            top = slice(1, 1 + asked.top)
            reports.append(
                RowLogprobs(
                    row=asked.row,
                    position=asked.position,
                    token=token,
                    logprob=numbers[at][0],
                    rank=ids[at][0],
                    top_ids=tuple(ids[at][top]),
                    top_logprobs=tuple(numbers[at][top]),
                )
            )
        return tuple(reports)


def logprobs_on_device(
    logits: Tensor, tokens: Tensor, asked: Sequence[Asked], places: NDArray[np.int64] | None = None
) -> PendingLogprobs:
    """Reports on tokens int[rows] of logits float32[rows, vocabulary]; ties rank by token id."""
    chosen = tokens.long()[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    logit = logits.gather(1, chosen)
    earlier = torch.arange(logits.shape[1], device=logits.device) < chosen
    ranks = 1 + ((logits > logit) | ((logits == logit) & earlier)).sum(dim=1, keepdim=True)
    most = min(max(one.top for one in asked), logits.shape[1])
    # Stable, so that equal logits stay in the order of their ids.
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :most] if most else chosen[:, :0]
    numbers = torch.cat([logprobs.gather(1, chosen), logprobs.gather(1, order)], dim=1)
    return PendingLogprobs(asked, places, to_host(numbers), to_host(torch.cat([ranks, order], dim=1)))


def prompt_logprobs_on_device(
    work: PrefillWork, chunk: Chunk, hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[PendingLogprobs, ...]:
    """`sampling_logprobs.prompt_logprobs`: reports on the prompt tokens that the chunk's states foretell."""
    reports: list[PendingLogprobs] = []
    tokens = int32_array(work.tokens)
    for row, top in sorted(work.prompt_logprobs):
        if row not in chunk.rows:
            continue
        part = chunk.rows.index(row)
        first = sum(chunk.new_tokens[:part])
        count = chunk.new_tokens[part] - (part in chunk.ended)
        following = tokens[chunk.span.start + first + 1 :][:count]
        position = chunk.reused_tokens[part] + 1
        asked = [Asked(row, position + at, int(token), top) for at, token in enumerate(following)]
        for start in range(0, count, HEAD_ROWS):
            block = asked[start : start + HEAD_ROWS]
            logits = head(hidden[first + start : first + start + len(block)])
            (chosen,) = upload_arrays([following[start : start + HEAD_ROWS]], hidden.device)
            reports.append(logprobs_on_device(logits, chosen, block))
    return tuple(reports)
