"""Recorded traffic as a workload: `open_trace(path, replay)`.

A file is read twice, a row at a time: once to check every row and to learn what a replay needs (`Survey`),
then for each run of `requests()`. Memory does not grow with the file.

*Rate.* A file with times is replayed as recorded, or at another rate. A lower one takes a sample of whole
sessions: all rows that share text beyond what every row shares, or the session column; so what one request
left in the cache is still there for the next. The sample's times are then stretched by the rest, so that the
mean rate is what was asked for. A higher one takes all rows and runs their times faster. A file without times
needs a rate: Poisson or gamma arrivals.

*Bins.* Mooncake's times sit in bins of about three seconds. As they stand they are bursts that nobody sent:
the requests of a bin are spread over it at random, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
from muxk.client.arrivals import Arrivals, check_rate, not_negative, positive
from muxk.client.histogram import Histogram
from muxk.client.trace_rows import BLOCK_TOKENS, TraceError, TraceFormat, TraceRow, detect, read_rows
from muxk.client.traffic import Span, TrafficRequest, WorkloadError, chance, mix

BINNED_FROM = 1.5
"""Rows to a distinct time, from which times are taken for bins."""
RESOLUTION_NS = 1_000_000
"""Of times that are not in bins, in a file of whole milliseconds."""
BIN_ROWS_MAX = 1 << 16
STEPS_KEPT = 1 << 16

BLOCK_STREAMS = 1 << 63
"""Streams from here on are blocks of trace files, the same for every seed."""

SAMPLE, TEXT, ANSWER, BLOCK, JITTER = range(5)


@dataclass(frozen=True)
class Replay:
    """How to replay a trace."""

    rate: float | None = None
    """Requests a second; None as recorded."""
    burstiness: float = 1.0
    """Of files without times: see `Arrivals`."""
    seed: int = 0
    requests_max: int | None = None
    request_class: str = ""

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_rate(self.rate)
        positive("burstiness", self.burstiness, "1 is a Poisson process")
        not_negative("seed", self.seed)
        if self.requests_max is not None and self.requests_max < 1:
            raise WorkloadError(f"at most {self.requests_max} requests; it must be 1 or more")


@dataclass(frozen=True)
class Survey:
    """What one reading of a file says."""

    rows: int
    input_tokens: int
    output_tokens: int
    first_ns: int
    last_ns: int
    common_blocks: int
    """Leading blocks that all rows have."""
    bin_ns: int
    """Width of the bins that times sit in."""

    @property
    def seconds(self) -> float:
        """From the first row to the end of the last bin."""
        return (self.last_ns - self.first_ns + self.bin_ns) / 1e9


def open_trace(path: Path, replay: Replay = Replay()) -> TraceWorkload:
    """Check the whole file. Raises TraceError for a bad one, WorkloadError when it lacks a rate."""
    return TraceWorkload(path, detect(path), survey(path), replay)


def survey(path: Path) -> Survey:
    """Read and check every row."""
    rows = input_tokens = output_tokens = first_ns = last_ns = 0
    common: tuple[int, ...] = ()
    in_blocks = False
    widths = Histogram()
    steps: list[int] = []
    for row in read_rows(path):
        at_ns = row.time_ns or 0
        if not rows:
            first_ns, common, in_blocks = at_ns, row.blocks, bool(row.blocks)
        elif at_ns != last_ns:
            steps.append(at_ns - last_ns)
        if len(steps) == STEPS_KEPT:
            widths.add(steps)
            steps.clear()
        common = _common(common, row.blocks)
        last_ns = at_ns
        rows, input_tokens, output_tokens = (
            rows + 1,
            input_tokens + row.input_tokens,
            output_tokens + row.output_tokens,
        )
    if not rows:
        raise TraceError(f"{path}: no request in it")
    widths.add(steps)
    binned = in_blocks and widths.count and rows >= BINNED_FROM * (widths.count + 1)
    bin_ns = round(widths.quantile(0.5)) if binned else RESOLUTION_NS
    return Survey(rows, input_tokens, output_tokens, first_ns, last_ns, len(common), bin_ns)


class TraceWorkload:
    """A trace file and how to replay it."""

    def __init__(self, path: Path, known: TraceFormat, surveyed: Survey, replay: Replay) -> None:
        self._path = path
        self._replay = replay
        self.format = known
        self.survey = surveyed
        if replay.rate is None and not self.timed:
            raise WorkloadError(
                f"{path} has lengths and no times of arrival: say at which rate they come (--rate)"
            )
        if self.timed and surveyed.rows == 1 and replay.rate is not None:
            raise WorkloadError(f"{path} has one request, which has no rate that could be changed")

    @property
    def name(self) -> str:
        return self._path.stem

    @property
    def timed(self) -> bool:
        """Whether the file says when requests came."""
        return self.format.name != "length pairs"

    @property
    def recorded_rate(self) -> float:
        """Requests a second as recorded; 0 for a file without times."""
        return self.survey.rows / self.survey.seconds if self.timed else 0.0

    @cached_property
    def sample_share(self) -> float:
        """The share of sessions that a replay takes."""
        rate = self._replay.rate
        return 1.0 if rate is None or not self.timed else min(1.0, rate / self.recorded_rate)

    @cached_property
    def stretch(self) -> float:
        """What the times of the sampled rows are multiplied by to come at the rate that was asked for."""
        rate = self._replay.rate
        if rate is None or not self.timed:
            return 1.0
        kept = sum(1 for _ in self._sampled())
        if not kept:
            raise WorkloadError(
                f"at {rate:g} requests a second no session of {self._path} is in the sample; "
                f"it has {self.recorded_rate:.3g} a second"
            )
        return kept / (rate * self.survey.seconds)

    def requests(self) -> Iterator[TrafficRequest]:
        """In order of arrival, from 0; ends with the file or at `requests_max`."""
        made = self._timed_requests() if self.timed else self._arriving_requests()
        return islice(made, self._replay.requests_max)

    def _timed_requests(self) -> Iterator[TrafficRequest]:
        stretch = self.stretch
        for number, row, at_ns in self._spread():
            yield self._request(number, row, round((at_ns - self.survey.first_ns) * stretch))

    def _arriving_requests(self) -> Iterator[TrafficRequest]:
        replay = self._replay
        assert replay.rate is not None
        times_ns = Arrivals(replay.rate, replay.burstiness, replay.seed).times_ns()
        for number, (row, at_ns) in enumerate(zip(read_rows(self._path), times_ns, strict=False)):
            yield self._request(number, row, at_ns)

    def _sampled(self) -> Iterator[tuple[int, TraceRow]]:
        """Rows of the sessions in the sample, with their place in the file."""
        share = self.sample_share
        for number, row in enumerate(read_rows(self._path)):
            if share == 1.0 or chance(self._replay.seed, SAMPLE, self._session(number, row)) < share:
                yield number, row

    def _spread(self) -> Iterator[tuple[int, TraceRow, int]]:
        """Place, row, and the time that it gets inside its bin."""
        if self.format.name != "mooncake":
            yield from ((number, row, row.time_ns or 0) for number, row in self._sampled())
            return
        random = np.random.default_rng((self._replay.seed, JITTER))
        waiting: list[tuple[int, TraceRow]] = []
        for number, row in self._sampled():
            if waiting and row.time_ns != waiting[0][1].time_ns:
                yield from self._in_bin(waiting, row.time_ns, random)
                waiting = []
            waiting.append((number, row))
            if len(waiting) > BIN_ROWS_MAX:
                raise TraceError(f"{self._path}: more than {BIN_ROWS_MAX:,} requests at one time")
        yield from self._in_bin(waiting, None, random)

    def _in_bin(
        self, rows: list[tuple[int, TraceRow]], next_ns: int | None, random: np.random.Generator
    ) -> Iterator[tuple[int, TraceRow, int]]:
        start_ns = rows[0][1].time_ns or 0
        width_ns = self.survey.bin_ns if next_ns is None else min(self.survey.bin_ns, next_ns - start_ns)
        offsets = np.sort(random.random(len(rows)) * width_ns).astype(np.int64).tolist()
        for (number, row), offset in zip(rows, offsets, strict=True):
            yield number, row, start_ns + offset

    def _session(self, number: int, row: TraceRow) -> int:
        """Rows with the same text beyond what all rows share have one number."""
        if row.session:
            return mix(TEXT, *row.session.encode())
        if row.blocks:
            return mix(BLOCK, row.blocks[min(self.survey.common_blocks, len(row.blocks) - 1)])
        return mix(ANSWER, number)

    def _request(self, number: int, row: TraceRow, at_ns: int) -> TrafficRequest:
        seed = self._replay.seed
        if row.blocks:
            prompt = tuple(_block_spans(row))
        else:
            prompt = (Span(mix(seed, TEXT, number), 0, row.input_tokens),)
        return TrafficRequest(
            at_ns,
            prompt,
            row.output_tokens,
            self._session(number, row),
            0,
            mix(seed, ANSWER, number),
            self._replay.request_class,
        )


def _block_spans(row: TraceRow) -> Iterator[Span]:
    for index, block in enumerate(row.blocks):
        yield Span(BLOCK_STREAMS + block, 0, min(BLOCK_TOKENS, row.input_tokens - index * BLOCK_TOKENS))


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return left[:index]
    return left[: min(len(left), len(right))]
