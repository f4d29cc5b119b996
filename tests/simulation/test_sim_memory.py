"""A long simulation keeps no more than a short one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import count

import pytest
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.policy_files import open_with_text
from muxk.client import measures, spoken
from muxk.client.sim_run import SimPlan, simulate
from muxk.client.traffic import Span, TrafficRequest

WARM_UP = 1100
"""By then the journal (4,096 records) and the requests that can still be asked about (1,024) are full."""
LATER = 600
SAMPLES = 4
"""Fifty requests apart, of the lowest of which each end is taken."""


class Tiny:
    """Requests of a few tokens that have nothing in common."""

    name = "tiny"

    def requests(self) -> Iterator[TrafficRequest]:
        for number in count(1):
            prompt = (Span(number, 0, 20 + number % 40),)
            yield TrafficRequest(number * 5_000_000, prompt, 1 + number % 8, number, 0, -number)


def test_memory_does_not_grow_with_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bounds where a run's own are larger than it is long; blocks of the interpreter are counted."""
    monkeypatch.setattr(spoken, "SPOKEN_ANSWERS_MAX", 100)
    monkeypatch.setattr(measures, "FLUSH_REQUESTS", 32)
    marks = [WARM_UP + 50 * step for step in range(SAMPLES)]
    marks += [mark + LATER for mark in marks]
    blocks: list[int] = []

    def look(share: float | None, now_s: float, ended: int) -> None:
        if len(blocks) < len(marks) and ended >= marks[len(blocks)]:
            gc.collect()
            blocks.append(sys.getallocatedblocks())

    gpu = open_gpu_backend("sim:h200", "qwen3-8b", kv_tokens=4096)
    run = simulate(SimPlan(open_with_text("muxwise", {}), gpu, Tiny(), marks[-1] + 1, None), look)
    assert run.measures.totals.completed == marks[-1] + 1
    assert len(blocks) == 2 * SAMPLES
    before, after = min(blocks[:SAMPLES]), min(blocks[SAMPLES:])
    assert after - before < LATER / 2, f"{after - before} blocks more after {LATER} requests: {blocks}"
