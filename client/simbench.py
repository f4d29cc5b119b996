"""How fast `muxk sim` is, and that its memory does not grow: `python -m muxk.client.simbench`.

Speed: the Mooncake conversation trace, sampled to one request a second, on one simulated H200 with Qwen3-8B,
policy muxwise. Timed is the simulation with its set-up: the server measures the device, prompts are made of
what the trace says, sent and served, answers are read. The trace was read and sampled before. Times are CPU
times of this process, so that what else the machine does counts little.
`--requests N` sends that many requests of at most 8 output tokens instead, and prints the memory on the way.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from statistics import median

from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.policy_files import open_with_text
from muxk.client.memory import rss_bytes
from muxk.client.sim_run import Progress, Run, S, SimPlan, simulate
from muxk.client.traffic import Span, TrafficRequest, Workload
from muxk.client.workload_names import Traffic, find_workload

POLICY, DEVICE, MODEL = "muxwise", "sim:h200", "qwen3-8b"
TRACE = Path("traces") / "mooncake_conversation_trace.jsonl"
RATE = 1.0
REQUESTS = 120
"""Of a run for speed: two minutes of virtual time."""
RUNS = 3
TINY_EVERY_NS = 5_000_000
TINY_PROMPT_TOKENS = 60
TINY_OUTPUT_TOKENS = 8
TINY_KV_TOKENS = 1 << 16
"""A pool that is full of what it keeps of earlier prompts early in the run, as any pool is at some time."""
REPORTS = 20
"""Lines of a run for memory."""
GROWTH_MAX = 0.03
"""Of the memory at half of the run, until its end; more is a failure."""
MIB = 1 << 20


class Tiny:
    """Short requests that have nothing in common; as many as are taken."""

    name = "tiny"

    def requests(self) -> Iterator[TrafficRequest]:
        for number in count(1):
            prompt = (Span(number, 0, 1 + number % TINY_PROMPT_TOKENS),)
            output = 1 + number % TINY_OUTPUT_TOKENS
            yield TrafficRequest(number * TINY_EVERY_NS, prompt, output, number, 0, -number)


class Read:
    """The first requests of a workload, read once."""

    def __init__(self, workload: Workload, requests: int) -> None:
        self.name = workload.name
        self._requests = tuple(islice(workload.requests(), requests))

    def requests(self) -> Iterator[TrafficRequest]:
        return iter(self._requests)


@dataclass
class MemoryLog:
    """Prints the resident memory now and then; `seen` holds (requests ended, bytes)."""

    requests: int
    seen: list[tuple[int, int]] = field(default_factory=list)

    def look(self, share: float | None, now_s: float, ended: int) -> None:
        if ended * REPORTS < self.requests * (len(self.seen) + 1):
            return
        self.seen.append((ended, rss_bytes(os.getpid())))
        cpu_s = time.process_time()
        print(f"{ended:>9,} requests: {self.seen[-1][1] / MIB:6.1f} MiB, {cpu_s:,.0f} s of CPU", flush=True)

    @property
    def growth(self) -> float:
        """From half of the run to its end, as a share of what it was at half."""
        if len(self.seen) < 2:
            return 0.0
        half = self.seen[len(self.seen) // 2 - 1][1]
        return self.seen[-1][1] / half - 1 if half else 0.0


def _trace() -> Workload | None:
    """MUXK_DATA names the folder that holds traces/; by default it is beside the project's."""
    root = Path(__file__).resolve().parent.parent
    path = Path(os.environ.get("MUXK_DATA") or root.parent / "shared" / "data") / TRACE
    return find_workload(str(path), Traffic(RATE)) if path.is_file() else None


def _plan(workload: Workload, requests: int, kv_tokens: int | None = None) -> SimPlan:
    gpu = open_gpu_backend(DEVICE, MODEL, kv_tokens)
    return SimPlan(open_with_text(POLICY, {}), gpu, workload, requests, None)


def _timed(plan: SimPlan, progress: Progress = lambda share, now_s, ended: None) -> tuple[Run, float]:
    """A run, and the seconds of CPU that it took."""
    began_s = time.process_time()
    run = simulate(plan, progress)
    return run, time.process_time() - began_s


def measure_speed(workload: Workload, requests: int, runs: int) -> None:
    """Print how many times faster than real time it was, and what a decode step cost."""
    workload = Read(workload, requests)
    ratios, steps_us = [], []
    for _ in range(runs):
        run, cpu_s = _timed(_plan(workload, requests))
        ratios.append((run.duration_ns + run.calibration_ns) / S / cpu_s)
        steps_us.append(cpu_s / max(1, run.counts["decode steps"]) * 1e6)
    print(
        f"{workload.name}, {requests} requests, {RATE:g} a second, {POLICY} on {DEVICE}, {MODEL}, one core:"
    )
    spread = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    print(f"{median(ratios):.1f} times real time (median of {spread})")
    print(f"{median(steps_us):.0f} us of CPU for each decode step, prompts and set-up included")


def measure_memory(requests: int) -> bool:
    """Print the memory during a run of many small requests; False when it grew."""
    log = MemoryLog(requests)
    run, cpu_s = _timed(_plan(Tiny(), requests, TINY_KV_TOKENS), log.look)
    print(
        f"{run.measures.totals.completed:,} requests completed, {cpu_s / requests * 1e6:.0f} us of CPU each"
    )
    print(f"memory from half of the run to its end: {log.growth:+.1%} (at most {GROWTH_MAX:.0%})")
    return log.growth <= GROWTH_MAX


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m muxk.client.simbench", description=__doc__)
    parser.add_argument("--requests", type=int, metavar="N", help="a run for memory, of so many requests")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs for speed, of which the median counts")
    options = parser.parse_args()
    if (options.requests is not None and options.requests < 1) or options.runs < 1:
        parser.error("--requests and --runs must be 1 or more")
    if options.requests is not None:
        sys.exit(0 if measure_memory(options.requests) else 1)
    workload = _trace()
    if workload is None:
        print(f"no {TRACE} (MUXK_DATA names the folder that holds it): a synthetic conversation instead")
        workload = find_workload("conversation", Traffic(RATE))
    measure_speed(workload, REQUESTS, options.runs)


if __name__ == "__main__":
    main()
