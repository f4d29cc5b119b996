"""Which decode graphs are captured at start: one a lane and bucket of rows, within a budget of bytes.

A graph keeps the SMs of the stream that it was captured on, so every split needs its own. All are captured
before serving, since a capture waits for the whole device; what has none runs kernel by kernel. Large
buckets come first, for a graph serves every smaller batch too, with padding; then each bucket halves what
padding is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from muxk.kernel.cuda_runner import CudaRunner
from muxk.kernel.devices.cuda_items import CudaLane
from muxk.kernel.devices.cuda_streams import CudaStreams, first_line

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Rows of a decode step; a larger batch has no graph: its kernels take longer than their launches."""

FAILURES_MAX = 3
"""Buckets that may fail: one may be too large for a workspace, three are the card's or the kernels' fault."""

Progress = Callable[[str, float], None]
"""(what is being done, share done from 0 to 1)."""


def refining(buckets: Sequence[int]) -> tuple[int, ...]:
    """The largest, the smallest, then the middle of each gap that is left, widest gaps first."""
    ordered = sorted(buckets)
    chosen = [len(ordered) - 1, 0] if len(ordered) > 1 else list(range(len(ordered)))
    while len(chosen) < len(ordered):
        borders = sorted(chosen)
        gaps = [(low, high) for low, high in itertools.pairwise(borders) if high - low > 1]
        chosen += [(low + high) // 2 for low, high in gaps]
    return tuple(ordered[place] for place in chosen)


@dataclass
class Graphs:
    """What was captured, what it took, and why there is not more."""

    budget_bytes: int
    bytes: int = 0
    rows: dict[str, list[int]] = field(default_factory=dict)
    """Buckets by the name of the lane."""
    left_out: int = 0
    why: str | None = None
    """Of those left out."""

    def describe(self) -> Mapping[str, object]:
        return {
            "captured": {name: sorted(rows) for name, rows in self.rows.items()},
            "bytes": self.bytes,
            "budget_bytes": self.budget_bytes,
            "left_out": self.left_out,
            "why": self.why,
        }


def capture_graphs(
    runner: CudaRunner,
    lanes: Sequence[CudaLane],
    streams: CudaStreams,
    budget_bytes: int,
    progress: Progress,
    buckets: Sequence[int],
) -> Graphs:
    """Capture until the next graph might pass the budget, taken to be as large as the largest so far.

    What can not be captured runs kernel by kernel, and `why` tells of the last that failed. A bucket that
    failed on one lane is not tried on the others; after FAILURES_MAX of them nothing more is.
    """
    graphs = Graphs(budget_bytes)
    plan = [(rows, lane) for rows in refining(buckets) for lane in lanes]
    largest = 0
    failed: list[int] = []
    for place, (rows, lane) in enumerate(plan):
        if graphs.bytes + largest > budget_bytes or budget_bytes <= 0:
            graphs.why = f"the next one may pass the budget of {budget_bytes:,} bytes"
            graphs.left_out += len(plan) - place
            break
        if rows in failed or len(failed) == FAILURES_MAX:
            graphs.left_out += 1
            continue
        progress(f"capturing decode graphs: {rows} rows, {lane.name}", place / len(plan))
        free = streams.memory().free
        why = _capture(runner, lane, rows)
        if why is not None:
            graphs.why = why
            graphs.left_out += 1
            failed.append(rows)
            continue
        taken = max(0, free - streams.memory().free)
        largest = max(largest, taken)
        graphs.bytes += taken
        graphs.rows.setdefault(lane.name, []).append(rows)
    return graphs


def _capture(runner: CudaRunner, lane: CudaLane, rows: int) -> str | None:
    """Why it failed; None when it did not."""
    try:
        with lane.stream.current():
            runner.capture(lane.state, rows)
    except Exception as error:  # no graph is slower, not wrong
        return f"the capture of {rows} rows on {lane.name} failed: {first_line(error)}"
    return None
