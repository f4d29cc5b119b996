"""The simulated GPU as an arbiter sees it: splits, host costs, noise, and completions that move."""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Sequence

import pytest
from muxk.kernel.actor import Message, Timer
from muxk.kernel.bandwidth import Sharing
from muxk.kernel.device import ItemDone
from muxk.kernel.devices.sim_gpu import HostTimes, SimGpu, SimGpuOptions
from muxk.kernel.devices.sim_gpu_load import ItemLoad, load_of
from muxk.kernel.lanes import LaneTable
from muxk.kernel.messages import ItemsMeasured
from muxk.kernel.noise import mixed, normals
from muxk.kernel.timeline import PhaseCost
from muxk.kernel.work import (
    DecodeWork,
    Item,
    Phase,
    PrefillWork,
    ProbeWork,
    SamplingColumns,
    Split,
    int32_bytes,
)

LAYERS = 4
HOST = HostTimes(decode_launch_ns=500, prefill_layer_launch_ns=100, wakeup_ns=20, switch_ns=10)
FREE = HostTimes(0, 0, 0, 0)
SHARING = Sharing(bandwidth=1.0, interference=0.0, slowdown_max=0.3)


class Port:
    """Virtual time; `taken` are the completions in the order in which they came."""

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, Message]] = []
        self._cancelled: list[int] = []
        self._timers = itertools.count()

    def now_ns(self) -> int:
        return self.now

    def post(self, message: Message) -> None:
        raise NotImplementedError

    def post_after(self, delay_ns: int, message: Message) -> Timer:
        timer = Timer(next(self._timers))
        heapq.heappush(self._heap, (self.now + delay_ns, timer.timer_id, message))
        return timer

    def cancel(self, timer: Timer) -> None:
        self._cancelled.append(timer.timer_id)

    def rest(self) -> dict[int, ItemDone]:
        """All completions that were not taken back, by item; time goes on to each."""
        found: dict[int, ItemDone] = {}
        while self._heap:
            self.now, timer_id, message = heapq.heappop(self._heap)
            if timer_id not in self._cancelled:
                assert isinstance(message, ItemDone)
                assert message.item_id not in found
                found[message.item_id] = message
        return found


class Fixed:
    """A layer takes 1 us on all units and the bandwidth share is what a test says."""

    layers = LAYERS

    def __init__(self, units: int = 132, demand: float = 0.5) -> None:
        self.units = units
        self._demand = demand

    def phases(self, load: ItemLoad, units: int) -> Sequence[PhaseCost]:
        ns = 1000.0 * load.layers * self.units / units
        return [PhaseCost(ns, ns * self._demand)]


def gpu(
    host: HostTimes = FREE, noise: float = 0.0, seed: int = 0, demand: float = 0.5
) -> tuple[SimGpu, Port]:
    options = SimGpuOptions("sim:test", 64, SHARING, host, noise=noise, seed=seed)
    device, port = SimGpu(Fixed(demand=demand), options), Port()
    device.start(port)
    return device, port


def greedy(rows: int) -> SamplingColumns:
    return SamplingColumns(
        bytes(4 * rows), b"\0\0\x80\x3f" * rows, bytes(4 * rows), bytes(8 * rows), bytes(4 * rows), True
    )


def decode_item(item_id: int, rows: int = 1) -> Item:
    table = int32_bytes(range(1, rows + 1))
    ones = int32_bytes([1] * rows)
    work = DecodeWork(item_id, 1, tuple(range(rows)), ones, ones, table, 1, 2 * rows, greedy(rows))
    return Item(item_id, work, 0, LAYERS, True)


def prefill_item(item_id: int, first: int = 0, last: int = LAYERS, decode: DecodeWork | None = None) -> Item:
    work = PrefillWork(7, (5,), int32_bytes([1] * 20), (20,), (16,), int32_bytes([10, 11, 12]), 3, greedy(1))
    return Item(item_id, work, first, last, last == LAYERS, 0, 20, decode)


@pytest.mark.parametrize(
    ("units", "decode"), [(108, [12, 28, 44, 60, 76, 92]), (132, [20, 36, 52, 68, 84, 100, 116])]
)
def test_prefill_has_multiples_of_16_sms_and_decode_the_rest(units: int, decode: list[int]) -> None:
    device = SimGpu(Fixed(units), SimGpuOptions("sim:test", 64, SHARING, FREE))
    assert device.splits() == tuple(Split(count, units - count) for count in decode)


def test_a_completion_that_was_foreseen_moves_when_the_other_lane_gets_work() -> None:
    device, port = gpu(demand=0.8)
    whole_ns = 4000 * 132 / 36
    device.launch(device.lane(Phase.DECODE, 36), decode_item(1), ())
    port.now = 1000
    device.launch(device.lane(Phase.PREFILL, 96), prefill_item(2), ())
    done = port.rest()
    # Alone for 1,000 ns, then each has 0.5 of the 0.8 that it asks for until the prefill has ended.
    shared_ns = 5500 / 0.625
    assert done[2].ended_ns == 1000 + math.ceil(shared_ns)
    assert done[1].ended_ns == pytest.approx(1000 + shared_ns + (whole_ns - 1000 - 5500), abs=2)


def test_a_completion_that_is_on_its_way_is_not_taken_back() -> None:
    """The item has ended, the host does not know yet: what is launched then can not change it."""
    device, port = gpu(HostTimes(0, 0, wakeup_ns=500, switch_ns=0))
    device.launch(device.lane(Phase.DECODE, 132), decode_item(1), ())
    port.now = 4100
    device.launch(device.lane(Phase.PREFILL, 96), prefill_item(2), (1,))
    done = port.rest()
    assert (done[1].started_ns, done[1].ended_ns) == (0, 4000)


def test_a_decode_graph_waits_for_the_host_behind_layers_that_it_launches() -> None:
    device, port = gpu(HOST)
    device.launch(device.lane(Phase.PREFILL, 96), prefill_item(1), ())
    device.launch(device.lane(Phase.DECODE, 36), decode_item(2), ())
    done = port.rest()
    assert done[1].started_ns == 100, "the first layer runs while the others are launched"
    assert done[2].started_ns == 4 * 100 + 500
    assert port.now == max(item.ended_ns for item in done.values()) + 20


def test_layers_that_run_faster_than_they_are_launched_end_with_the_launches() -> None:
    device, port = gpu(HostTimes(0, prefill_layer_launch_ns=5000, wakeup_ns=0, switch_ns=0))
    device.launch(device.lane(Phase.PREFILL, 132), prefill_item(1), ())
    assert port.rest()[1].ended_ns == 4 * 5000


def test_a_new_split_waits_for_the_old_lanes_and_the_switch() -> None:
    device, port = gpu(HostTimes(0, 0, 0, switch_ns=10))
    device.launch(device.lane(Phase.DECODE, 132), decode_item(1), ())
    device.launch(device.lane(Phase.DECODE, 36), decode_item(2), (1,))
    assert port.rest()[2].started_ns == 4000 + 10


def test_noise_depends_on_the_seed_and_the_item_and_on_nothing_else() -> None:
    def spans(seed: int, items: Sequence[int]) -> dict[int, int]:
        device, port = gpu(noise=0.04, seed=seed)
        for item_id in items:
            device.launch(device.lane(Phase.DECODE, 132), decode_item(item_id), ())
        return {item_id: done.ended_ns - done.started_ns for item_id, done in port.rest().items()}

    assert spans(1, range(1, 30)) == spans(1, range(1, 30))
    assert spans(1, range(1, 30)) != spans(2, range(1, 30))
    assert spans(1, [20])[20] == spans(1, range(1, 30))[20]


def test_noise_is_normal() -> None:
    values = normals(mixed(3), range(20_000))
    assert statistics.fmean(values) == pytest.approx(0.0, abs=0.03)
    assert statistics.stdev(values) == pytest.approx(1.0, abs=0.03)
    assert sum(abs(value) > 1.96 for value in values) / len(values) == pytest.approx(0.05, abs=0.01)


def test_after_a_reset_nothing_that_was_in_flight_completes_and_new_items_run() -> None:
    device, port = gpu()
    device.launch(device.lane(Phase.DECODE, 132), decode_item(1), ())
    device.reset()
    device.launch(device.lane(Phase.DECODE, 132), decode_item(2), (1,))
    assert list(port.rest()) == [2]


def test_memory_does_not_grow_with_the_items_that_ended() -> None:
    device, port = gpu(HOST)
    for item_id in range(1, 400):
        device.launch(device.lane(Phase.DECODE, 132), decode_item(item_id), ())
        port.rest()
    assert len(device._outputs) + len(device._posted) + len(device._timeline._jobs) <= 6


def test_loads_are_sums_over_rows() -> None:
    assert load_of(decode_item(1, rows=3), LAYERS) == ItemLoad(4, 3, 6, 0, 0, 0, 0, 3, 3)
    pairs = 20 * 21 // 2 + 20 * 16
    assert load_of(prefill_item(1), LAYERS) == ItemLoad(4, 0, 0, 1, 20, pairs, 36, 20, 1)
    assert load_of(prefill_item(1, 1, 3), LAYERS) == ItemLoad(2, 0, 0, 1, 20, pairs, 36, 0, 0)
    step = decode_item(1, rows=2).work
    assert isinstance(step, DecodeWork)
    assert load_of(prefill_item(1, decode=step), LAYERS) == ItemLoad(4, 2, 4, 1, 20, pairs, 36, 22, 3)
    probe = ProbeWork(1, Phase.PREFILL, 132, 2, 20, 16)
    assert load_of(Item(1, probe, 0, 4, True), LAYERS) == ItemLoad(4, 0, 0, 2, 40, 2 * pairs, 72, 40, 2)
    probe = ProbeWork(1, Phase.DECODE, 132, 3, 1, 50)
    assert load_of(Item(1, probe, 0, 4, True), LAYERS) == ItemLoad(4, 3, 150, 0, 0, 0, 0, 3, 3)


@pytest.mark.parametrize(("shared_at", "told_at"), [((), [32, 64]), ((3,), [8, 40]), ((20, 30), [20, 30])])
def test_the_estimator_is_told_of_steps_that_ran_alone_32_at_a_time_and_of_others_eight(
    shared_at: tuple[int, ...], told_at: list[int]
) -> None:
    device, port = gpu()
    table = LaneTable(device, 1)
    told: list[tuple[int, ItemsMeasured]] = []
    for number in range(1, 66):
        work = decode_item(number).work
        assert isinstance(work, DecodeWork)
        table.launch_decode(132 if number % 2 else 36, work, port.now)
        [done] = port.rest().values()
        flight = table.ended(done, port.now)
        assert flight is not None
        flight.shared = number in shared_at
        if (message := table.measured(flight, done)) is not None:
            told.append((number, message))
    assert [number for number, _ in told][:2] == told_at
    units = [item.units for _, message in told for item in message.items]
    assert units == ([132, 36] * 33)[: told[-1][0]]
