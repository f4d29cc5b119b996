"""What a stream of served requests amounts to. Definitions:

- TTFT: from arrival to the first token. E2E: from arrival to the last one, of requests that completed.
- TBT: the gap between two successive tokens, pooled over all requests; TTFT is no gap. This is what is
  judged.
- TPOT: (last - first token) / (tokens - 1) of a request with two tokens or more. Hides stalls; reported, and
  part of the joint objective as DistServe defines it.
- A stall is a gap of more than `stall_factor` times the TBT SLO.
- *Strict*: at most 1 % of all gaps are over the TBT SLO (their P99 meets it; counted exactly), and the queue
  is stable: of all requests, at most 5 % by number and 5 % by prompt tokens wait, for a first token or in a
  stall, when no more come, by the mean over the last quarter of the arrivals (`measures_queue.py`).
- *Joint*: at least 90 % of all requests complete with TTFT and TPOT in their SLOs.

Memory does not grow with the number of requests or gaps. What one-directional streams can not know, when the
last arrival was, costs a heap of those requests whose first token came after the last arrival seen so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt
from muxk.client.arrivals import positive
from muxk.client.histogram import Histogram
from muxk.client.measures_queue import WaitingLoad

MS = 1_000_000
FLUSH_TOKENS = 1 << 16
"""Tokens that are kept before their gaps are counted."""
FLUSH_REQUESTS = 1024
"""Requests that are kept before, however few tokens they have."""


class Served(msgspec.Struct, frozen=True, gc=False):
    """One request, when it ended or when the run did. Times in ns."""

    arrival_ns: int
    prompt_tokens: int
    token_ns: Sequence[int]
    """When each token came, ascending; what there was of them."""
    completed: bool = True
    """It ended well; no for one that failed, or goes on when the run ends."""
    ttft_slo_ns: int | None = None
    """Its own TTFT SLO; None: the one of the objectives."""
    error: str = ""
    """What it was told when it failed."""


@dataclass(frozen=True)
class Objectives:
    """What a system has to meet. Shares in [0, 1]."""

    tbt_ms: float = 50.0
    ttft_ms: float = 1000.0
    ttft_ms_per_prompt_token: float = 1.0
    tpot_ms: float | None = None
    """None: as `tbt_ms`."""
    gaps_over_max: float = 0.01
    waiting_max: float = 0.05
    joint_share: float = 0.9
    stall_factor: float = 4.0

    def __post_init__(self) -> None:
        positive("TBT SLO", self.tbt_ms, "ms")
        positive("TTFT SLO", self.ttft_ms, "ms")
        if self.tpot_ms is not None:
            positive("TPOT SLO", self.tpot_ms, "ms")

    @property
    def tbt_ns(self) -> int:
        return round(self.tbt_ms * MS)

    @property
    def tpot_ns(self) -> int:
        return self.tbt_ns if self.tpot_ms is None else round(self.tpot_ms * MS)

    def ttft_ns(self, prompt_tokens: int) -> int:
        """The TTFT SLO of a prompt."""
        return round((self.ttft_ms + self.ttft_ms_per_prompt_token * prompt_tokens) * MS)


class Judgement(msgspec.Struct, frozen=True):
    """Whether a run met its objectives, and by how much."""

    strict: bool
    joint: bool
    gaps_over_share: float
    """Of all gaps: those over the TBT SLO."""
    waiting_share: float
    """Of all requests: those that wait for a token at the end of the arrivals, see `measures_queue.py`."""
    waiting_tokens_share: float
    """The same, by prompt tokens."""
    stable: bool
    good_share: float
    """Of all requests: those that met TTFT and TPOT."""


@dataclass
class Totals:
    """What all requests so far amount to."""

    ttft: Histogram = field(default_factory=Histogram)
    ttft_per_token: Histogram = field(default_factory=Histogram)
    """Over the tokens of the prompt: what long prompts and short ones have in common."""
    tbt: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)
    max_gaps: Histogram = field(default_factory=Histogram)
    """Of each request with two tokens or more: its largest gap."""
    requests: int = 0
    completed: int = 0
    good: int = 0
    """Completed, with TTFT and TPOT in their SLOs."""
    gaps_over: int = 0
    """Over the TBT SLO."""
    stalls: int = 0
    prompt_tokens: int = 0
    completed_prompt_tokens: int = 0
    output_tokens: int = 0


class Measures:
    """Takes requests in any order: `add`. Then `judge()` and `figures()`, at any time."""

    def __init__(self, objectives: Objectives = Objectives()) -> None:
        self.objectives = objectives
        self._totals = Totals()
        self._first_arrival_ns: int | None = None
        self._last_event_ns = 0
        self._waiting_requests, self._waiting_prompts = WaitingLoad(), WaitingLoad()
        self._waiting_flush: list[Served] = []
        self._waiting_tokens = 0

    def add(self, served: Served) -> None:
        """Count one request, once. Raises ValueError for token times that descend or precede the arrival."""
        _check(served)
        self._totals.requests += 1
        self._totals.prompt_tokens += served.prompt_tokens
        self._totals.output_tokens += len(served.token_ns)
        self._note_queue(served)
        self._waiting_flush.append(served)
        self._waiting_tokens += 1 + len(served.token_ns)
        if self._waiting_tokens >= FLUSH_TOKENS or len(self._waiting_flush) >= FLUSH_REQUESTS:
            self._flush()

    def _note_queue(self, served: Served) -> None:
        arrival_ns = served.arrival_ns
        if self._first_arrival_ns is None or arrival_ns < self._first_arrival_ns:
            self._first_arrival_ns = arrival_ns
        self._last_event_ns = max(self._last_event_ns, served.token_ns[-1] if served.token_ns else arrival_ns)
        first_ns = served.token_ns[0] if served.token_ns else None
        self._waiting_requests.add(arrival_ns, first_ns, 1)
        self._waiting_prompts.add(arrival_ns, first_ns, served.prompt_tokens)

    def _flush(self) -> None:
        batch = [served for served in self._waiting_flush if served.token_ns]
        self._waiting_flush = []
        self._waiting_tokens = 0
        if not batch:
            return
        lengths = np.array([len(served.token_ns) for served in batch], np.int64)
        times = np.fromiter(
            chain.from_iterable(served.token_ns for served in batch), np.int64, int(lengths.sum())
        )
        lasts = np.cumsum(lengths) - 1
        firsts = lasts - lengths + 1
        arrivals = np.array([served.arrival_ns for served in batch], np.int64)
        completed = np.array([served.completed for served in batch], np.bool_)
        ttft = times[firsts] - arrivals
        self._totals.ttft.add(ttft)
        self._totals.end_to_end.add((times[lasts] - arrivals)[completed])
        self._count_gaps(times, firsts, lengths)
        self._note_stalls(batch, times)
        several = lengths > 1
        tpot = np.zeros(len(batch), np.int64)
        tpot[several] = (times[lasts] - times[firsts])[several] // (lengths[several] - 1)
        self._totals.tpot.add(tpot[several & completed])
        prompts = [served.prompt_tokens for served in batch]
        self._totals.ttft_per_token.add(ttft // np.maximum(np.array(prompts, np.int64), 1))
        allowed = np.array([self._ttft_slo_ns(served) for served in batch], np.int64)
        self._totals.completed += int(completed.sum())
        self._totals.completed_prompt_tokens += int(np.array(prompts, np.int64)[completed].sum())
        self._totals.good += int((completed & (ttft <= allowed) & (tpot <= self.objectives.tpot_ns)).sum())

    def _ttft_slo_ns(self, served: Served) -> int:
        own_ns = served.ttft_slo_ns
        return self.objectives.ttft_ns(served.prompt_tokens) if own_ns is None else own_ns

    def _count_gaps(
        self, times: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> None:
        gaps = np.diff(times, prepend=times[0])
        within = np.ones(len(times), np.bool_)
        within[firsts] = False
        gaps[firsts] = 0
        pooled = gaps[within]
        self._totals.tbt.add(pooled)
        self._totals.gaps_over += int((pooled > self.objectives.tbt_ns).sum())
        self._totals.stalls += int((pooled > self.objectives.stall_factor * self.objectives.tbt_ns).sum())
        self._totals.max_gaps.add(np.maximum.reduceat(gaps, firsts)[lengths > 1])

    def _note_stalls(self, batch: Sequence[Served], times: npt.NDArray[np.int64]) -> None:
        """A request that stalls is in a queue again; one that goes on when the run ends may be for good."""
        owners = np.repeat(np.arange(len(batch)), [len(served.token_ns) for served in batch])
        longest = self.objectives.stall_factor * self.objectives.tbt_ns
        stalls = np.flatnonzero((np.diff(times) > longest) & (owners[1:] == owners[:-1]))
        for index in stalls.tolist():
            self._note_stall(batch[owners[index]], int(times[index]), int(times[index + 1]))
        for served in batch:
            if not served.completed and not served.error:
                self._note_stall(served, served.token_ns[-1], None)

    def _note_stall(self, served: Served, since_ns: int, until_ns: int | None) -> None:
        self._waiting_requests.stalled(since_ns, until_ns, 1)
        self._waiting_prompts.stalled(since_ns, until_ns, served.prompt_tokens)

    @property
    def totals(self) -> Totals:
        """Over all requests that were added."""
        self._flush()
        return self._totals

    @property
    def seconds(self) -> float:
        """From the first arrival to the last event."""
        return (self._last_event_ns - (self._first_arrival_ns or 0)) / 1e9

    def judge(self) -> Judgement:
        """A run without requests meets nothing."""
        limits, totals = self.objectives, self.totals
        over = totals.gaps_over / totals.tbt.count if totals.tbt.count else 0.0
        waiting_share, tokens_share = self._waiting_requests.share, self._waiting_prompts.share
        stable = max(waiting_share, tokens_share) <= limits.waiting_max
        good = totals.good / totals.requests if totals.requests else 0.0
        return Judgement(
            strict=totals.requests > 0 and stable and over <= limits.gaps_over_max,
            joint=totals.requests > 0 and good >= limits.joint_share,
            gaps_over_share=over,
            waiting_share=waiting_share,
            waiting_tokens_share=tokens_share,
            stable=stable,
            good_share=good,
        )

    def figures(self) -> dict[str, float]:
        """With the keys of `vllm bench serve`; `request_goodput` counts requests that met TTFT and TPOT."""
        totals = self.totals
        seconds = self.seconds or 1.0
        return {
            "duration": self.seconds,
            "completed": totals.completed,
            "failed": totals.requests - totals.completed,
            "total_input_tokens": totals.completed_prompt_tokens,
            "total_output_tokens": totals.output_tokens,
            "request_throughput": totals.completed / seconds,
            "request_goodput": totals.good / seconds,
            "output_throughput": totals.output_tokens / seconds,
            "total_token_throughput": (totals.completed_prompt_tokens + totals.output_tokens) / seconds,
            **_times("ttft", totals.ttft),
            "p99_ttft_per_prompt_token_ms": totals.ttft_per_token.quantile(0.99) / MS,
            **_times("tpot", totals.tpot),
            **_times("itl", totals.tbt),
            **_times("e2el", totals.end_to_end),
            **_times("max_gap", totals.max_gaps),
            "stalls": totals.stalls,
        }


def _times(name: str, times: Histogram) -> dict[str, float]:
    return {
        f"mean_{name}_ms": times.mean / MS,
        f"median_{name}_ms": times.quantile(0.5) / MS,
        f"std_{name}_ms": times.deviation / MS,
        f"p90_{name}_ms": times.quantile(0.9) / MS,
        f"p99_{name}_ms": times.quantile(0.99) / MS,
        f"max_{name}_ms": times.largest / MS,
    }


def _check(served: Served) -> None:
    before = served.arrival_ns
    for at_ns in served.token_ns:
        if at_ns < before:
            raise ValueError(
                f"a token at {at_ns} ns, after one (or the arrival) at {before} ns: times must ascend"
            )
        before = at_ns
    if served.prompt_tokens < 1:
        raise ValueError(f"a prompt of {served.prompt_tokens} tokens; it must have 1 or more")
