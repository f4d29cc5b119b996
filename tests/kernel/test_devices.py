"""What every device owes the arbiter; the folder listing is the list of devices."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import muxk.kernel.devices
import pytest
from device_port import CollectingPort
from fake_streams import FakeRunner, FakeStreams, fake_device
from muxk.kernel.actor import Message, Timer
from muxk.kernel.bandwidth import Sharing
from muxk.kernel.device import Device, ItemDone, ItemFailed
from muxk.kernel.devices import cpu
from muxk.kernel.devices.cpu import CpuDevice
from muxk.kernel.devices.sim import SimCosts, SimDevice
from muxk.kernel.devices.sim_gpu import HostTimes, SimGpu, SimGpuOptions
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.idle import Cause
from muxk.kernel.jobs import PrefillJob
from muxk.kernel.lanes import LaneTable
from muxk.kernel.timeline import PhaseCost
from muxk.kernel.work import (
    DecodeWork,
    Item,
    Phase,
    PrefillWork,
    ProbeWork,
    SamplingColumns,
    Split,
    StepOutput,
)

LAYERS = 4


class SlowRunner:
    """A model that takes 5 ms an item and remembers what ran when."""

    layers = LAYERS
    pages = 64
    chunk_tokens_max = 4096
    parked_bytes_per_token = 16

    def __init__(self) -> None:
        self.spans: list[tuple[object, int, int]] = []
        self.discarded: list[int] = []
        self.was_reset = False
        self.affinity: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def _run(self, key: object) -> bytes:
        started = time.monotonic_ns()
        threading.Event().wait(0.005)
        with self._lock:
            self.spans.append((key, started, time.monotonic_ns()))
        return b"\1\0\0\0"

    def prefill(self, work: PrefillWork, tokens: range, layers: range) -> StepOutput:
        if work.batch_id == 666:
            raise ValueError("a broken batch")
        if layers.stop == LAYERS:
            return StepOutput(self._run((work.batch_id, layers.start)))
        self._run(0)
        return StepOutput()

    def decode(self, work: DecodeWork) -> StepOutput:
        return StepOutput(self._run("decode"))

    def fused(self, decode: DecodeWork, work: PrefillWork, tokens: range) -> tuple[StepOutput, StepOutput]:
        token = self._run(("fused", work.batch_id, tokens))
        return StepOutput(token), StepOutput(token)

    def probe(self, work: ProbeWork, first_layer: int, last_layer: int) -> None:
        self._run("probe")

    def reset(self) -> None:
        self.was_reset = True

    def discard(self, batch_id: int) -> None:
        self.discarded.append(batch_id)


class VirtualPort(CollectingPort):
    """Time goes on to the next message when it is taken, and stands still otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._now_ns = 0
        self._later: dict[int, tuple[int, Message]] = {}
        self._timers = itertools.count()

    def now_ns(self) -> int:
        return self._now_ns

    def post_after(self, delay_ns: int, message: Message) -> Timer:
        timer = Timer(next(self._timers))
        self._later[timer.timer_id] = (self._now_ns + delay_ns, message)
        return timer

    def cancel(self, timer: Timer) -> None:
        self._later.pop(timer.timer_id, None)

    def take(self) -> Message:
        timer_id = min(self._later, key=lambda timer_id: (self._later[timer_id][0], timer_id))
        self._now_ns, message = self._later.pop(timer_id)
        return message


class FixedCost:
    """Every layer takes 1 ms and moves half of what the memory can."""

    units = 2
    layers = LAYERS

    def phases(self, load: ItemLoad, units: int) -> Sequence[PhaseCost]:
        return [PhaseCost(1e6 * load.layers, 5e5 * load.layers)]


def simulated_gpu() -> SimGpu:
    sharing = Sharing(bandwidth=1.0, interference=0.1, slowdown_max=0.3)
    host = HostTimes(decode_launch_ns=1000, prefill_layer_launch_ns=1000, wakeup_ns=1000, switch_ns=1000)
    options = SimGpuOptions("sim:gpu", 64, sharing, host, granularity=1, noise=0.04)
    return SimGpu(FixedCost(), options)


def cuda_device() -> Device:
    streams = FakeStreams()
    return fake_device(streams, FakeRunner(streams, LAYERS, item_s=0.005))


FACTORIES: dict[str, Callable[[], Device]] = {
    "cpu": lambda: CpuDevice(SlowRunner(), cores=[0, 0]),
    "cuda": cuda_device,
    "sim": lambda: SimDevice(units=2, layers=LAYERS, pages=64),
    "sim_gpu": simulated_gpu,
}
GREEDY = SamplingColumns(b"\0\0\0\0", b"\0\0\x80\x3f", b"\0\0\0\0", bytes(8), b"\0\0\0\0", True)


def prefill_item(item_id: int, first: int, last: int, batch_id: int = 1) -> Item:
    tokens = b"\1\0\0\0" * 20
    work = PrefillWork(batch_id, (batch_id,), tokens, (20,), (0,), b"\1\0\0\0\2\0\0\0", 2, GREEDY)
    return Item(item_id, work, first, last, last == LAYERS, last_token=20)


def decode_item(item_id: int) -> Item:
    work = DecodeWork(item_id, 1, (9,), b"\1\0\0\0", b"\0\0\0\0", b"\3\0\0\0", 1, 1, GREEDY)
    return Item(item_id, work, 0, LAYERS, True)


@pytest.fixture(params=sorted(FACTORIES))
def opened(request: Any) -> Iterator[tuple[Device, CollectingPort]]:
    device = FACTORIES[request.param]()
    port = CollectingPort() if request.param in ("cpu", "cuda") else VirtualPort()
    device.start(port)
    yield device, port
    device.close()
    device.close()  # idempotent


def collect(port: CollectingPort, count: int) -> list[Message]:
    return [port.take() for _ in range(count)]


def test_every_device_in_the_folder_is_held_to_this() -> None:
    """Other files there are parts of a device, named after it."""
    folder = Path(next(iter(muxk.kernel.devices.__path__)))
    stems = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    wholes = ("cuda", "sim_gpu")
    parts = {stem for stem in stems for whole in wholes if stem.startswith(f"{whole}_")}
    assert stems - parts == set(FACTORIES)


def test_splits_are_disjoint_ascending_and_use_the_whole_device(
    opened: tuple[Device, CollectingPort],
) -> None:
    device, _ = opened
    assert list(device.splits()) == sorted(device.splits())
    assert device.splits() == (Split(1, 1),)
    decode, prefill = device.lane(Phase.DECODE, 1), device.lane(Phase.PREFILL, 1)
    assert not set(decode.units) & set(prefill.units)
    whole = device.lane(Phase.DECODE, 2)
    assert whole is device.lane(Phase.PREFILL, 2)
    assert set(whole.units) == {0, 1}


def test_a_lane_runs_its_items_one_after_the_other(opened: tuple[Device, CollectingPort]) -> None:
    device, port = opened
    lane = device.lane(Phase.PREFILL, 1)
    for index in range(LAYERS):
        device.launch(lane, prefill_item(index + 1, index, index + 1), ())
    done = collect(port, LAYERS)
    assert [message.item_id for message in done if isinstance(message, ItemDone)] == [1, 2, 3, 4]
    spans = [(message.started_ns, message.ended_ns) for message in done if isinstance(message, ItemDone)]
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))
    assert [len(message.tokens) for message in done if isinstance(message, ItemDone)] == [0, 0, 0, 4]


def test_two_lanes_run_at_the_same_time_unless_one_waits_for_the_other(
    opened: tuple[Device, CollectingPort],
) -> None:
    device, port = opened
    decode, prefill = device.lane(Phase.DECODE, 1), device.lane(Phase.PREFILL, 1)
    device.launch(prefill, prefill_item(1, 0, LAYERS), ())
    device.launch(decode, decode_item(2), ())
    device.launch(device.lane(Phase.DECODE, 2), decode_item(3), (1, 2))
    done = {message.item_id: message for message in collect(port, 3) if isinstance(message, ItemDone)}
    assert done[2].started_ns < done[1].ended_ns
    assert done[3].started_ns >= max(done[1].ended_ns, done[2].ended_ns)


def test_an_item_that_waits_for_one_that_ended_long_ago_runs(opened: tuple[Device, CollectingPort]) -> None:
    device, port = opened
    device.launch(device.lane(Phase.DECODE, 1), decode_item(1), ())
    collect(port, 1)
    device.launch(device.lane(Phase.DECODE, 2), decode_item(2), (1, 77))
    [done] = collect(port, 1)
    assert isinstance(done, ItemDone)


def test_an_item_that_raises_on_the_cpu_is_reported_and_the_lane_goes_on() -> None:
    runner, port = SlowRunner(), CollectingPort()
    device = CpuDevice(runner, cores=[0, 0])
    device.start(port)
    lane = device.lane(Phase.PREFILL, 1)
    device.launch(lane, prefill_item(1, 0, LAYERS, batch_id=666), ())
    device.launch(device.lane(Phase.DECODE, 1), decode_item(2), (1,))
    messages = {message.item_id: message for message in collect(port, 2)}  # type: ignore[attr-defined]
    assert isinstance(messages[1], ItemFailed)
    assert messages[1].reason == "ValueError: a broken batch"
    assert isinstance(messages[2], ItemDone)
    device.discard(666)
    assert runner.discarded == [666]
    device.close()


def test_reset_waits_for_what_is_in_flight_on_the_cpu() -> None:
    runner, port = SlowRunner(), CollectingPort()
    device = CpuDevice(runner, cores=[0, 0])
    device.start(port)
    for index in range(3):
        device.launch(device.lane(Phase.DECODE, 1), decode_item(index + 1), ())
    device.reset()
    assert len(runner.spans) == 3
    assert runner.was_reset
    device.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")]


@pytest.mark.parametrize(
    ("cores", "decode_units"), [(1, []), (2, [1]), (4, [1, 2, 3]), (8, [1, 2, 3, 4, 5, 6, 7])]
)
def test_a_cpu_is_split_at_every_core_while_there_are_few(cores: int, decode_units: list[int]) -> None:
    device = CpuDevice(SlowRunner(), cores=list(range(cores)))
    assert [split.decode_units for split in device.splits()] == decode_units


def test_a_cpu_of_many_cores_has_a_bounded_number_of_teams() -> None:
    splits = CpuDevice(SlowRunner(), cores=list(range(64))).splits()
    assert len(splits) == 7
    assert all(split.decode_units + split.prefill_units == 64 for split in splits)
    assert len({split.decode_units for split in splits}) == 7


def test_the_simulated_device_sees_a_page_given_away_while_it_is_read() -> None:
    slow = SimCosts(prefill_layer_base_ns=10_000_000_000)
    device = SimDevice(units=2, layers=LAYERS, pages=64, costs=slow)
    device.start(VirtualPort())
    device.launch(device.lane(Phase.PREFILL, 1), prefill_item(1, 0, 1, batch_id=1), ())
    with pytest.raises(AssertionError, match="in flight for"):
        device.launch(device.lane(Phase.PREFILL, 1), prefill_item(2, 0, 1, batch_id=2), ())


class HangingRunner(SlowRunner):
    """A decode step that does not end before the test does."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.over = threading.Event(), threading.Event()

    def decode(self, work: DecodeWork) -> StepOutput:
        self.entered.set()
        self.over.wait()
        return StepOutput()


def test_closing_the_cpu_device_does_not_wait_for_an_item_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CLOSE_S", 0.1)
    runner = HangingRunner()
    device = CpuDevice(runner, cores=[0, 0])
    device.start(CollectingPort())
    lane = device.lane(Phase.DECODE, 2)
    device.launch(lane, decode_item(1), [])
    assert runner.entered.wait(10)
    closer = threading.Thread(target=device.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    runner.over.set()
    assert lane.thread is not None
    lane.thread.join(10)


def test_the_times_that_a_device_tells_of_its_items_add_up_in_the_ledger(
    opened: tuple[Device, CollectingPort],
) -> None:
    device, port = opened
    table = LaneTable(device, 1)
    table.idle.begin(port.now_ns())
    prefill, step = prefill_item(1, 0, 1).work, decode_item(1).work
    assert isinstance(prefill, PrefillWork)
    assert isinstance(step, DecodeWork)
    job = PrefillJob(prefill, 0, 0, 0, device.layers)
    job.begin_chunk(20)
    table.launch_decode(1, step, port.now_ns())
    table.launch_prefill(1, job, 2, port.now_ns())
    table.launch_prefill(2, job, 2, port.now_ns())  # of another split: it waits for both
    told_ns = 0
    for message in collect(port, 3):
        assert isinstance(message, ItemDone)
        told_ns += (message.ended_ns - message.started_ns) * (2 if message.item_id == 3 else 1)
        table.early[message.item_id] = message
        while (due := table.next_completion()) is not None:
            table.ended(due, port.now_ns())
    report = table.idle.report(port.now_ns())
    assert report.booked_unit_ns == report.total_unit_ns
    assert report.open_unit_ns == report.idle[Cause.UNEXPLAINED].total_unit_ns == 0
    assert sum(report.busy.values()) == pytest.approx(told_ns, rel=0.01)
    assert report.idle[Cause.LAUNCH].count + report.idle[Cause.DRAIN].count > 0
