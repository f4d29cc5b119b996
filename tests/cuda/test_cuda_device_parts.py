"""Clocks of lanes, decode graphs and the card's memory, each by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from fake_streams import FakeLaneState, FakeRunner, FakeStreams
from muxk.kernel.devices.cuda_clock import LaneClock
from muxk.kernel.devices.cuda_graphs import BUCKETS, capture_graphs, refining
from muxk.kernel.devices.cuda_items import CudaLane
from muxk.kernel.devices.cuda_memory import GIB, DoesNotFitOnCard, MemoryNeeds, plan_memory
from muxk.kernel.work import Phase

MS = 1_000_000
S = 1_000_000_000


@dataclass
class At:
    """An event at a time of the card, which CUDA tells as a float of 24 bits in ms."""

    card_ns: int = 0

    def record(self, stream: Any) -> None:
        self.card_ns = stream.card.at(stream.runs_ns)

    def done(self) -> bool:
        return True

    def elapsed_ns(self, later: At) -> int:
        return later.card_ns - self.card_ns


@dataclass
class Card:
    """A clock with a rate and an offset of its own."""

    drift: float
    offset_ns: int = 123_456_789_000

    def at(self, host_ns: int) -> int:
        return self.offset_ns + round(host_ns * (1.0 + self.drift))

    def event(self) -> At:
        return At()


@dataclass
class Stream:
    card: Card
    runs_ns: int = 0
    """Host time at which what is recorded now will happen."""


def errors_of(card: Card, clock: LaneClock, rng: random.Random, items: int, idle_every: int) -> list[int]:
    """How far placed ends are off on a lane that is busy but for every so many items."""
    now_ns, errors = 5 * S, []
    stream = Stream(card)  # type: ignore[arg-type]
    for number in range(items):
        queued_ns = now_ns
        if number % idle_every:
            queued_ns -= rng.randrange(20 * MS)  # it was launched while the one before ran
        stream.runs_ns = now_ns
        clock.renew(stream, queued_ns)  # type: ignore[arg-type]
        end_ns = now_ns + rng.randrange(2 * MS, 30 * MS)
        seen_ns = end_ns + rng.randrange(15_000, 300_000)
        start = clock.place(At(card.at(now_ns)), queued_ns, seen_ns)  # type: ignore[arg-type]
        end = clock.place(At(card.at(end_ns)), queued_ns, seen_ns)  # type: ignore[arg-type]
        assert queued_ns <= start <= end <= seen_ns
        errors.append(abs(end - end_ns))
        now_ns = end_ns
    return errors


@pytest.mark.parametrize("drift", [0.0, 30e-6, -30e-6])
def test_times_stay_within_a_fraction_of_a_millisecond_while_the_clocks_drift_apart(drift: float) -> None:
    card = Card(drift)
    clock = LaneClock(card)  # type: ignore[arg-type]
    errors = errors_of(card, clock, random.Random(1), items=20_000, idle_every=50)
    assert sorted(errors)[len(errors) // 2] < 150_000
    assert max(errors) < 400_000


def test_a_card_whose_clock_jumps_is_placed_anew_within_the_bounds_of_each_event() -> None:
    card = Card(0.0)
    clock = LaneClock(card)  # type: ignore[arg-type]
    errors_of(card, clock, random.Random(1), 100, 10)
    card.offset_ns += 3 * S
    errors = errors_of(card, clock, random.Random(2), 300, 10)
    assert clock.corrections >= 1
    assert max(errors[100:]) < 400_000


# --- decode graphs ---


def test_large_buckets_come_first_and_every_bucket_once() -> None:
    order = refining(BUCKETS)
    assert order[:2] == (256, 1)
    assert sorted(order) == sorted(BUCKETS)
    assert refining((8,)) == (8,)
    assert refining(()) == ()


def quiet(what: str, done: float) -> None:
    """Nobody is told of progress."""


def lanes_of(streams: FakeStreams, names: tuple[str, ...]) -> list[CudaLane]:
    return [
        CudaLane(
            name,
            Phase.DECODE,
            range(8 - number),
            streams.stream(number),
            LaneClock(streams),
            FakeLaneState(Phase.DECODE, 8 - number),
        )
        for number, name in enumerate(names)
    ]


def test_graphs_are_captured_within_their_budget_and_cover_every_lane_before_they_get_finer() -> None:
    streams = FakeStreams()
    runner = FakeRunner(streams)
    lanes = lanes_of(streams, ("whole", "decode@4"))
    graphs = capture_graphs(runner, lanes, streams, 5 * runner.graph_bytes, quiet, BUCKETS)
    assert graphs.rows == {"whole": [256, 1, 32], "decode@4": [256, 1]}
    assert graphs.bytes == 5 * runner.graph_bytes
    assert graphs.left_out == 2 * len(BUCKETS) - 5
    assert graphs.why is not None
    assert "5,242,880 bytes" in graphs.why
    streams.close()


def test_without_a_budget_nothing_is_captured_and_with_enough_everything() -> None:
    streams = FakeStreams()
    runner = FakeRunner(streams)
    lanes = lanes_of(streams, ("whole",))
    assert capture_graphs(runner, lanes, streams, 0, quiet, BUCKETS).rows == {}
    graphs = capture_graphs(runner, lanes, streams, GIB, quiet, BUCKETS)
    assert graphs.describe() == {
        "captured": {"whole": list(BUCKETS)},
        "bytes": len(BUCKETS) * runner.graph_bytes,
        "budget_bytes": GIB,
        "left_out": 0,
        "why": None,
    }
    streams.close()


def test_a_capture_that_fails_leaves_the_rest_to_run_kernel_by_kernel() -> None:
    streams = FakeStreams()
    runner = FakeRunner(streams)
    runner.fails["graph", 1] = RuntimeError("operation not permitted when stream is capturing")
    lanes = lanes_of(streams, ("whole", "decode@4"))
    graphs = capture_graphs(runner, lanes, streams, GIB, quiet, BUCKETS)
    assert {name: sorted(rows) for name, rows in graphs.rows.items()} == {
        lane.name: list(BUCKETS[1:]) for lane in lanes
    }
    assert graphs.left_out == 2
    assert graphs.why is not None
    assert graphs.why.endswith("RuntimeError: operation not permitted when stream is capturing")
    streams.close()


def test_where_every_capture_fails_a_few_are_tried() -> None:
    streams = FakeStreams()
    runner, tried = FakeRunner(streams), []

    def capture(lane: object, rows: int) -> None:
        tried.append(rows)
        raise RuntimeError("no graphs here")

    runner.capture = capture  # type: ignore[method-assign]
    graphs = capture_graphs(runner, lanes_of(streams, ("whole", "decode@4")), streams, GIB, quiet, BUCKETS)
    assert tried == [256, 1, 32]
    assert graphs.left_out == 2 * len(BUCKETS)
    streams.close()


# --- memory ---

LLAMA_8B = MemoryNeeds("llama-3.1-8b", 16_060_522_496, 2_097_152, 3 * GIB, GIB)
H200 = 150_754_820_096


def test_all_that_is_left_beside_the_stated_parts_is_kv_pages() -> None:
    plan = plan_memory(H200 - GIB, H200, LLAMA_8B)
    parts = plan.weights + plan.lanes + plan.parked + plan.graphs + plan.reserve + plan.pages * plan.page
    assert 0 <= plan.free - parts < plan.page
    assert plan.reserve == round(0.03 * H200)
    assert plan.pages > 55_000
    assert plan.describe()["kv_bytes"] == plan.pages * plan.page


def test_fewer_pages_may_be_wanted_and_more_than_fit_are_refused() -> None:
    assert plan_memory(H200, H200, LLAMA_8B, pages_wanted=1000).pages == 1000
    with pytest.raises(DoesNotFitOnCard, match=r"1,000,000 KV pages take 2,097,152,000,000"):
        plan_memory(H200, H200, LLAMA_8B, pages_wanted=1_000_000)


def test_a_70b_on_one_card_is_refused_with_the_bytes() -> None:
    needs = MemoryNeeds("llama-3.1-70b", 141_107_412_992, 5_242_880, 3 * GIB, GIB)
    with pytest.raises(DoesNotFitOnCard) as refused:
        plan_memory(H200 - GIB, H200, needs)
    for number in ("150,754,820,096", "141,107,412,992", "0 are left"):
        assert number in str(refused.value)
