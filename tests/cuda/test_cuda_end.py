"""What has to be so before CUDA is first called, and in which order a card is left: no card tells in CI."""

from __future__ import annotations

import os
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from device_port import CollectingPort
from fake_streams import FakePartitions, FakeRunner, FakeStreams, fake_device, opened_with
from muxk.kernel.devices.cuda import CudaDevice, Opened
from muxk.kernel.devices.cuda_driver import CONNECTIONS_VARIABLE, CudaUnavailable, open_driver
from muxk.kernel.devices.cuda_launcher import SWITCH_S


class WatchedPartitions(FakePartitions):
    """Notes which lanes live while its streams are destroyed."""

    def __init__(self) -> None:
        super().__init__(2, (1,))
        self.lanes: list[weakref.ref[Any]] = []
        self.alive: list[bool] = []

    def close(self) -> None:
        self.alive = [lane() is not None for lane in self.lanes]
        super().close()


class WatchedRunner(FakeRunner):
    def __init__(self, streams: FakeStreams, partitions: WatchedPartitions) -> None:
        super().__init__(streams)
        self._watching = partitions

    def open_lane(self, phase: Any, units: int) -> Any:
        lane = super().open_lane(phase, units)
        self._watching.lanes.append(weakref.ref(lane))
        return lane


def watched() -> tuple[FakeStreams, WatchedPartitions, WatchedRunner, Opened]:
    streams, partitions = FakeStreams(), WatchedPartitions()
    runner = WatchedRunner(streams, partitions)
    opened = opened_with(streams, runner)
    return streams, partitions, runner, Opened(**{**vars(opened), "partitions": partitions})


def test_no_lane_holds_memory_when_its_stream_is_destroyed() -> None:
    """torch records an event on every stream that used a block, when the block is freed."""
    streams, partitions, runner, opened = watched()
    device = CudaDevice("cuda:0", opened, lambda: opened)
    device.start(CollectingPort())
    assert len(partitions.lanes) == 3
    device.close()
    assert runner.closed
    assert partitions.alive == [False] * 3
    streams.close()


def test_nothing_of_a_lost_card_is_held_while_its_weights_are_read_again() -> None:
    streams, partitions, runner, opened = watched()
    alive: list[bool] = []
    new = FakeStreams()
    again = opened_with(new, FakeRunner(new))

    def reopen() -> Opened:
        alive.extend(lane() is not None for lane in partitions.lanes)
        return again

    device = CudaDevice("cuda:0", opened, reopen)
    device.start(CollectingPort())
    streams.lose()
    device._running().call(lambda: device._running()._lose("lost"))
    device.reset()
    assert alive == [False] * 3
    assert runner.closed
    device.close()
    streams.close()
    new.close()


def test_the_number_of_hardware_queues_is_set_before_the_driver_is_initialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    seen: list[str | None] = []

    def init(flags: int) -> tuple[object]:
        seen.append(os.environ.get(CONNECTIONS_VARIABLE))
        raise RuntimeError("the library has no such symbol")

    monkeypatch.delenv(CONNECTIONS_VARIABLE, raising=False)
    api = SimpleNamespace(cuInit=init)
    monkeypatch.setattr(bindings, "driver", api, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", api)
    with pytest.raises(CudaUnavailable):
        open_driver()
    assert seen == ["32"]


def test_the_event_loop_gives_the_interpreter_to_the_launcher_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()
    streams = FakeStreams()
    try:
        sys.setswitchinterval(0.005)
        device = fake_device(streams, FakeRunner(streams))
        device.start(CollectingPort())
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        device.close()
    finally:
        sys.setswitchinterval(before)
        streams.close()
