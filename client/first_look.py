"""What a first look (`muxk compare --quick`) leaves out where answers are long, and where it searches then.

A run lasts as long as its longest answer, of up to 27,000 tokens in 60 requests of openthoughts, whatever
else is simulated. So there are fewer requests. And so few say nothing of a rate at which all of them come
before the first has been answered: no queue is seen to grow then, and a search would end at some rate that
means nothing, after twice the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from muxk.client.goodput import Search
from muxk.client.traffic import Workload

OUTPUT_MAX = 50_000
"""Tokens that the requests of a run ask for together: twice what 60 of any workload but openthoughts do."""
LOWEST = 16.0
"""A search ends at the highest rate over this: few requests that come slowly are long to simulate."""


@dataclass(frozen=True)
class Cut:
    """What is left of the runs of a workload."""

    requests: int
    output_tokens: int
    """That they ask for together."""

    @property
    def answer_tokens(self) -> int:
        """Of one answer, on average."""
        return round(self.output_tokens / self.requests)


def cut_of(workload: Workload, requests: int) -> Cut | None:
    """As many requests as it takes to ask for OUTPUT_MAX tokens; None when `requests` do not ask for more."""
    asked = 0
    for count, request in enumerate(islice(workload.requests(), requests), start=1):
        asked += request.output_tokens
        if asked >= OUTPUT_MAX:
            return Cut(count, asked) if count < requests else None
    return None


def search_of(highest: float, rates: Sequence[float], tolerance: float) -> Search:
    """Downwards from the highest rate, or from the first at which figures are taken if that is lower.

    Args:
    highest: requests a second that come in the time that an answer takes.
    """
    lowest = highest / LOWEST
    start = max(lowest, min(highest, rates[0])) if rates else highest
    return Search(start, lowest, highest, tolerance, checks=())


def in_words(workload: str, cut: Cut, asked: int) -> str:
    """What whoever reads the figures of the workload must know."""
    return (
        f"{workload}: an answer has {cut.answer_tokens:,} tokens on average, so runs have {cut.requests} "
        f"requests in place of {asked}, and no rate was tried at which those come in less time than the "
        "first policy takes for an answer. More may be carried: --requests N looks further, for longer."
    )
