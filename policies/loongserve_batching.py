"""LoongServe's batching: which prompts are computed together, on how many devices each.

Requests sorted by length, longest first, and a row of devices are cut into the same number of pieces. Of all
ways to cut, the one is taken that makes the sum of T_k(batch) * sum(1 / length) smallest: the time of a batch
weighs more for short prompts, as what people feel is time per token (LoongServe, Wu et al., SOSP 2024). The
dynamic programme looks at n^2 * m^2 / 4 batches for n requests and m devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from muxk.kernel.placing import PlaceView

REQUESTS_MAX = 32
"""Of one programme: with 8 devices it looks at 16,000 batches then."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the programme sees it."""

    request_id: int
    tokens: int
    pages: int
    """Of its prompt and longest answer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are computed together by so many devices."""

    prompts: tuple[Prompt, ...]
    width: int


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """T_k(batch) = A_k + B_k * sum(l) + C_k * sum(l^2), from the estimates for one device.

    k devices take a k-th of the time of one, times the measured factor of that width.
    """

    view: PlaceView

    def time_ns(self, width: int, tokens: int, pairs: int) -> float:
        """Of all layers of a batch in ns; infinite on no device. The estimates are known."""
        if width < 1:
            return math.inf
        view = self.view
        alone_ns = view.layers * view.estimates.prefill_layer_ns(view.units, tokens, pairs)
        factors = view.width_factors
        factor = factors[min(width, len(factors)) - 1] if factors else 1.0
        return alone_ns / width * factor

    def of(self, width: int, prompts: Sequence[Prompt]) -> float:
        """Of prompts that are computed together."""
        return self.time_ns(width, sum(one.tokens for one in prompts), sum(map(pairs_of, prompts)))


def pairs_of(prompt: Prompt) -> int:
    """Query-key pairs of causal attention over the whole prompt."""
    return prompt.tokens * (prompt.tokens + 1) // 2


def weight_of(prompts: Sequence[Prompt]) -> float:
    """What a ns of waiting is to them, in time per token: the sum of 1 / length."""
    return sum(1 / max(1, one.tokens) for one in prompts)


def batches(
    prompts: Sequence[Prompt], devices: int, width: int, pages: int, times: PrefillTimes
) -> tuple[Batch, ...] | None:
    """The cheapest way to compute all prompts on at most so many devices, or None when they do not fit.

    Args:
        prompts: at most REQUESTS_MAX.
        width: devices of one batch, at most.
        pages: of the KV pool of one device; a batch fits when the pools of its devices hold it.
    """
    assert len(prompts) <= REQUESTS_MAX, "what the programme takes"
    ordered = sorted(prompts, key=lambda one: (-one.tokens, one.request_id))
    cost = _Cost(ordered, pages, times)
    count = len(ordered)
    least = [[math.inf] * (devices + 1) for _ in range(count + 1)]
    cuts: dict[tuple[int, int], tuple[int, int]] = {}
    least[0] = [0.0] * (devices + 1)
    for end in range(1, count + 1):
        for used in range(1, devices + 1):
            for start in range(end):
                for before in range(max(0, used - width), used):
                    if math.isinf(least[start][before]):
                        continue
                    total = least[start][before] + cost.of(start, end, used - before)
                    if total < least[end][used]:
                        least[end][used] = total
                        cuts[end, used] = start, before
    best = min(range(devices + 1), key=lambda used: least[count][used])
    return None if math.isinf(least[count][best]) else _pieces(ordered, best, cuts)


def _pieces(
    ordered: Sequence[Prompt], devices: int, cuts: dict[tuple[int, int], tuple[int, int]]
) -> tuple[Batch, ...]:
    """From the last piece to the first, turned round."""
    found: list[Batch] = []
    end, used = len(ordered), devices
    while end:
        start, before = cuts[end, used]
        found.append(Batch(tuple(ordered[start:end]), used - before))
        end, used = start, before
    return tuple(reversed(found))


class _Cost:
    """T_k * sum(1 / length) of the prompts from one index to another."""

    def __init__(self, ordered: Sequence[Prompt], pages: int, times: PrefillTimes) -> None:
        self._tokens = [0, *accumulate(one.tokens for one in ordered)]
        self._pairs = [0, *accumulate(map(pairs_of, ordered))]
        self._pages = [0, *accumulate(one.pages for one in ordered)]
        self._weights = [0.0, *accumulate(1 / max(1, one.tokens) for one in ordered)]
        self._pages_of_one = pages
        self._times = times

    def of(self, start: int, end: int, width: int) -> float:
        """Infinite when the pools of so many devices do not hold them."""
        if self._pages[end] - self._pages[start] > width * self._pages_of_one:
            return math.inf
        tokens = self._tokens[end] - self._tokens[start]
        pairs = self._pairs[end] - self._pairs[start]
        return self._times.time_ns(width, tokens, pairs) * (self._weights[end] - self._weights[start])
