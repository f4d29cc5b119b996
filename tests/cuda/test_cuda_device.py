"""The CUDA device over streams that are threads: order, hand-over, failure, and the card that is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from device_port import CollectingPort, decode_item, prefill_item
from fake_streams import FakeRunner, FakeStreams, fake_device, opened_again, opened_with
from muxk.kernel.cuda_runner import CudaLaneState
from muxk.kernel.device import DeviceFailed, DeviceLost, ItemDone, ItemFailed
from muxk.kernel.devices import cuda, cuda_launcher
from muxk.kernel.devices.cuda import CudaDevice, Opened
from muxk.kernel.devices.cuda_launcher import LAUNCHES_MAX, LAYERS_A_TURN
from muxk.kernel.work import Item, Phase, PrefillWork

LAYERS = 3 * LAYERS_A_TURN


class HookedRunner(FakeRunner):
    """Calls back while a prefill is being enqueued, on the launcher's thread."""

    def __init__(self, streams: FakeStreams) -> None:
        super().__init__(streams, LAYERS)
        self.hooks: dict[tuple[int, int], Callable[[], None]] = {}
        """By batch and first layer."""

    def prefill(
        self, lane: CudaLaneState, work: PrefillWork, tokens: range, layers: range, item_id: int
    ) -> object:  # type: ignore[override]
        hook = self.hooks.get((work.batch_id, layers.start))
        if hook is not None:
            hook()
        return super().prefill(lane, work, tokens, layers, item_id)


class Rig:
    """A device of two SMs with one split, started."""

    def __init__(self, reopen: Callable[[], Opened] | None = None) -> None:
        self.streams = FakeStreams()
        self.runner = HookedRunner(self.streams)
        self.device = fake_device(self.streams, self.runner, reopen=reopen)
        self.port = CollectingPort()
        self.device.start(self.port)

    def prefill(self, item_id: int, batch_id: int = 1, after: tuple[int, ...] = (), units: int = 1) -> None:
        item = prefill_item(item_id, 0, LAYERS, LAYERS, batch_id)
        self.device.launch(self.device.lane(Phase.PREFILL, units), item, after)

    def decode(self, item_id: int, after: tuple[int, ...] = (), units: int = 1) -> None:
        self.device.launch(self.device.lane(Phase.DECODE, units), decode_item(item_id, LAYERS), after)

    def done(self) -> ItemDone:
        message = self.port.take()
        assert isinstance(message, ItemDone), message
        return message

    def lost(self) -> str:
        message = self.port.take()
        assert isinstance(message, DeviceFailed), message
        return message.reason

    def failed(self) -> ItemFailed:
        message = self.port.take()
        assert isinstance(message, ItemFailed), message
        return message

    def hold(self) -> threading.Event:
        """Prefill kernels that are enqueued from now on wait for the event."""
        self.runner.gate = threading.Event()
        return self.runner.gate

    def enqueued(self) -> list[tuple[str, object, int]]:
        return [(call, key, layers.start) for call, key, layers in self.runner.log]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.streams.lose("the test is over")
    rig.device.close()
    rig.streams.close()


def test_a_step_that_comes_while_a_long_prefill_is_enqueued_goes_before_its_rest(rig: Rig) -> None:
    rig.runner.hooks[1, 0] = lambda: rig.decode(2)
    rig.prefill(1)
    assert {rig.done().item_id, rig.done().item_id} == {1, 2}
    assert rig.enqueued() == [
        ("prefill", 1, 0),
        ("decode", 2, 0),
        ("prefill", 1, LAYERS_A_TURN),
        ("prefill", 1, 2 * LAYERS_A_TURN),
    ]


def test_a_step_that_comes_after_a_prefill_has_it_enqueued_first_and_to_its_end(rig: Rig) -> None:
    rig.runner.hooks[1, 0] = lambda: rig.decode(3, after=(1,), units=2)
    rig.prefill(1)
    rig.done()
    done = rig.done()
    assert done.item_id == 3
    assert [call for call, _, _ in rig.enqueued()] == ["prefill"] * 3 + ["decode"]
    assert rig.runner.ran[-1] == ("decode", 3)


def test_nothing_waits_for_the_card_while_a_prefill_runs_on_it(rig: Rig) -> None:
    gate = rig.hold()
    rig.prefill(1)
    for step in (2, 3, 4):
        rig.decode(step)
        assert rig.done().item_id == step
    assert rig.port.messages.empty()
    gate.set()
    assert rig.done().item_id == 1


def test_a_switch_of_the_split_waits_on_the_card_and_not_on_the_host(rig: Rig) -> None:
    gate = rig.hold()
    rig.prefill(1)
    rig.decode(2, after=(1,), units=2)
    rig.decode(3)
    assert rig.done().item_id == 3
    assert ("decode", 2) not in rig.runner.ran
    gate.set()
    first, second = rig.done(), rig.done()
    assert (first.item_id, second.item_id) == (1, 2)
    assert second.started_ns >= first.ended_ns


def test_layers_of_a_batch_that_move_to_another_lane_run_after_those_before_them(rig: Rig) -> None:
    lane, whole = rig.device.lane(Phase.PREFILL, 1), rig.device.lane(Phase.PREFILL, 2)
    rig.device.launch(lane, prefill_item(1, 0, 6, LAYERS), ())
    rig.device.launch(whole, prefill_item(2, 6, LAYERS, LAYERS), (1,))
    first, second = rig.done(), rig.done()
    assert (first.tokens, len(second.tokens)) == (b"", 4)
    assert second.started_ns >= first.ended_ns


def test_an_item_that_raises_half_way_ends_when_what_it_had_enqueued_has_ended(rig: Rig) -> None:
    """Before that its pages would be given to somebody else while kernels still write them."""
    gate = rig.hold()
    rig.runner.fails[1, LAYERS_A_TURN] = ValueError("no such expert\nand much more text")
    rig.prefill(1)
    rig.decode(2)
    assert rig.done().item_id == 2
    assert rig.port.messages.empty()
    gate.set()
    assert rig.failed().reason == "ValueError: no such expert"
    rig.decode(3)
    assert rig.done().item_id == 3


def test_an_item_that_raises_at_once_fails_and_what_waits_for_it_still_runs(rig: Rig) -> None:
    rig.runner.fails[1] = MemoryError("out of memory")
    rig.prefill(1)
    rig.decode(2, after=(1,), units=2)
    assert rig.failed().reason == "MemoryError: out of memory"
    assert rig.done().item_id == 2
    rig.device.discard(1)
    rig.device.reset()
    assert rig.runner.discarded == [1]


def test_a_fused_item_brings_both_outputs(rig: Rig) -> None:
    step = decode_item(7, LAYERS).work
    chunk = prefill_item(1, 0, LAYERS, LAYERS)
    item = Item(1, chunk.work, 0, LAYERS, True, 0, 20, step)  # type: ignore[arg-type]
    rig.device.launch(rig.device.lane(Phase.DECODE, 2), item, ())
    done = rig.done()
    assert done.decode is not None
    assert (len(done.tokens), len(done.decode.tokens)) == (4, 4)
    assert rig.enqueued() == [("fused", 1, 0)]


def test_more_items_than_the_bound_are_refused_with_the_bound(rig: Rig) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold_the_thread() -> None:
        entered.set()
        go_on.wait(10)

    rig.runner.hooks[1, 0] = hold_the_thread
    rig.prefill(1)
    assert entered.wait(10)
    for number in range(LAUNCHES_MAX):
        rig.decode(2 + number)
    assert rig.failed().reason == f"more than {LAUNCHES_MAX} items wait to be launched"
    go_on.set()
    for _ in range(LAUNCHES_MAX):
        rig.done()


# --- crashes above it, and a lost card ---


def test_a_reset_drops_what_has_not_begun_waits_for_the_rest_and_forgets_parked_prefills(rig: Rig) -> None:
    gate = rig.hold()
    rig.device.launch(rig.device.lane(Phase.PREFILL, 1), prefill_item(1, 0, 6, LAYERS), ())
    rig.decode(2)
    rig.done()
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    rig.device.reset()
    timer.join()
    assert ("prefill", 1) in rig.runner.ran
    assert rig.runner.parked == {}
    assert rig.runner.resets == 1
    rig.runner.gate = None
    rig.prefill(10)
    while rig.done().item_id != 10:
        pass


def test_items_that_hang_make_a_reset_fail_with_their_number(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_launcher, "DRAIN_S", 0.05)
    rig.hold()
    rig.prefill(1)
    rig.decode(2)
    rig.done()
    with pytest.raises(DeviceLost, match="1 items have not ended"):
        rig.device.reset()


def test_a_lost_card_fails_what_is_in_flight_with_the_reason_and_refuses_the_next_launch(rig: Rig) -> None:
    rig.hold()
    rig.prefill(1)
    rig.prefill(2, batch_id=2)
    rig.decode(3)
    rig.done()
    rig.streams.lose()
    reasons = {rig.failed().reason for _ in range(2)}
    assert reasons == {"the device is lost: CUDA error: an illegal memory access was encountered"}
    assert rig.lost() == "CUDA error: an illegal memory access was encountered"
    with pytest.raises(DeviceLost, match="illegal memory access"):
        rig.decode(4)
    assert "illegal memory access" in rig.device.describe()["lost"]


def test_a_kernel_that_dies_loses_the_card(rig: Rig) -> None:
    rig.streams.stream(1).enqueue(lambda: 1 // 0)  # type: ignore[func-returns-value]
    rig.decode(1)
    assert "device-side assert" in rig.failed().reason


def test_a_lost_card_is_opened_again_by_a_reset_and_serves() -> None:
    rig = Rig()
    rig.streams.lose()
    rig.decode(1)
    assert "illegal memory access" in rig.failed().reason
    rig.lost()
    rig.device.reset()
    assert rig.runner.closed
    assert rig.device.describe()["lost"] is None
    assert rig.device.describe()["rebuilds"] == 1
    rig.prefill(2)
    rig.decode(3)
    assert {rig.done().item_id, rig.done().item_id} == {2, 3}
    rig.device.close()
    rig.streams.close()


def test_a_card_that_can_not_be_opened_again_says_to_start_a_new_process() -> None:
    def reopen() -> Opened:
        raise RuntimeError("CUDA error: unknown error")

    rig = Rig(reopen)
    rig.streams.lose()
    rig.decode(1)
    rig.failed()
    with pytest.raises(DeviceLost, match=r"illegal memory access.*unknown error.*start a new one"):
        rig.device.reset()
    rig.device.close()
    rig.streams.close()


def test_a_card_that_comes_back_with_other_sizes_is_not_used() -> None:
    rig = Rig(lambda: opened_with(FakeStreams(), FakeRunner(FakeStreams(), LAYERS, pages=7)))
    rig.streams.lose()
    rig.decode(1)
    rig.failed()
    with pytest.raises(DeviceLost, match="units, splits and pages"):
        rig.device.reset()
    rig.device.close()
    rig.streams.close()


def test_a_card_is_opened_again_only_so_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "REBUILDS_MAX", 1)
    made: list[Opened] = []
    streams = FakeStreams()
    runner = FakeRunner(streams, LAYERS)

    def reopen() -> Opened:
        made.append(opened_again(runner, 2, (1,)))
        return made[-1]

    device = fake_device(streams, runner, reopen=reopen)
    port = CollectingPort()
    device.start(port)
    for lost in (streams, None):
        (lost or made[0].streams).lose()  # type: ignore[attr-defined]
        device.launch(device.lane(Phase.DECODE, 1), decode_item(1, LAYERS), ())
        assert isinstance(port.take(), ItemFailed)
        assert isinstance(port.take(), DeviceFailed)
        if lost is not None:
            device.reset()
    with pytest.raises(DeviceLost, match="opened again 1 times already"):
        device.reset()
    device.close()
    streams.close()


# --- start and end ---


def test_every_lane_is_opened_and_captured_on_the_stream_of_its_own_partition() -> None:
    streams = FakeStreams()
    runner = FakeRunner(streams, LAYERS)
    opened: list[tuple[Phase, int, int]] = []
    inner = runner.open_lane

    def note(phase: Phase, units: int) -> object:
        assert streams.current is not None
        opened.append((phase, units, streams.current.handle))
        return inner(phase, units)

    runner.open_lane = note  # type: ignore[assignment, method-assign]
    device = fake_device(streams, runner, units=8, decode_units=(2, 4))
    device.start(CollectingPort())
    assert opened == [
        (Phase.PREFILL, 8, 8),
        (Phase.DECODE, 2, 2),
        (Phase.PREFILL, 6, 1006),
        (Phase.DECODE, 4, 4),
        (Phase.PREFILL, 4, 1004),
    ]
    state = device.describe()
    assert set(state["graphs"]["captured"]) == {"whole", "decode@2", "decode@4"}
    assert state["graphs"]["bytes"] == 8 << 20
    assert state["graphs"]["left_out"] > 0
    assert "budget" in state["graphs"]["why"]
    device.close()
    streams.close()


def test_closing_ends_the_thread_and_frees_the_model_before_its_streams() -> None:
    order: list[str] = []
    rig = Rig()
    partitions = rig.device._opened.partitions
    rig.runner.close = lambda: order.append("model")  # type: ignore[method-assign]
    partitions.close = lambda: order.append("streams")  # type: ignore[method-assign]
    rig.prefill(1)
    rig.device.close()
    rig.device.close()
    assert order == ["model", "streams"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("launcher")]
    rig.streams.close()


def test_closing_under_an_item_that_hangs_leaves_its_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launcher, "DRAIN_S", 0.05)
    rig = Rig()
    gate = rig.hold()
    rig.prefill(1)
    rig.decode(2)
    rig.done()
    rig.device.close()
    assert not rig.runner.closed
    gate.set()
    rig.streams.close()


def test_the_device_is_usable_from_no_thread_but_its_own() -> None:
    rig = Rig()
    assert rig.streams.bound == ["launcher cuda:0"]
    assert isinstance(rig.device, CudaDevice)
    rig.device.close()
    rig.streams.close()
