"""How much of its prompt a request could find in a KV pool that never forgets, in whole pages.

Counted on token ids, page by page, as the pool does: whatever made the ids, equal prefixes are found and
others are not. A page is known by a 64-bit hash over all tokens up to its end; two different prefixes are
taken for one with a chance of about (pages)^2 / 2^65.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from muxk.client.traffic import GOLDEN, TrafficRequest, answer_ids, token_ids
from muxk.kernel.work import PAGE_SIZE


class PrefixReuse:
    """An endless prefix cache: memory grows with the distinct pages."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._known: set[int] = set()

    def add(self, request: TrafficRequest) -> int:
        """Tokens at the front of the prompt that earlier requests left. From now on this one's are known."""
        prompt = token_ids(request.prompt, self._vocabulary_size)
        keys = _prefix_keys(np.concatenate((prompt, answer_ids(request, self._vocabulary_size))))
        found = 0
        # At least one token has to be computed, or there is nothing to sample from.
        for key in keys[: (len(prompt) - 1) // PAGE_SIZE]:
            if key not in self._known:
                break
            found += 1
        # The last token that was sampled has no keys and values.
        self._known.update(keys[found : (len(prompt) + request.output_tokens - 1) // PAGE_SIZE])
        return found * PAGE_SIZE


def _prefix_keys(ids: npt.NDArray[np.int32]) -> list[int]:
    """One for each full page: a hash over all tokens up to its end."""
    pages = len(ids) // PAGE_SIZE
    positions = np.arange(pages * PAGE_SIZE, dtype=np.uint64)
    state = (ids[: pages * PAGE_SIZE].astype(np.uint64) << np.uint64(32)) + positions
    state = (state + np.uint64(1)) * np.uint64(GOLDEN)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(29)
    keys: list[int] = np.cumsum(state)[PAGE_SIZE - 1 :: PAGE_SIZE].tolist()
    return keys
