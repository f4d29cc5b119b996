"""Items that fail on the device, and an engine that crashes: who is told what, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import virtual_server
from muxk.actors import protocol as wire
from muxk.actors.columns import sampling_columns
from muxk.kernel.actor import Message, Ref
from muxk.kernel.device import DevicePort, ItemDone, ItemFailed, Lane
from muxk.kernel.devices.cpu import CpuDevice
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.messages import PrefillDone
from muxk.kernel.work import DecodeWork, Item, Phase, PrefillWork, ProbeWork, StepOutput, int32_bytes
from virtual_server import MS, S, VirtualServer, expected_tokens

Fail = Callable[[Item], str | None]
LONG_PROMPT = [65] * 1500
FIRST, SECOND = "OutOfMemory: the real reason", "KeyError: what the first one should have left"


@dataclass
class FailingPort:
    """Passes on what the device posts, but for items in `failing`."""

    port: DevicePort
    failing: dict[int, str] = field(default_factory=dict)

    def now_ns(self) -> int:
        return self.port.now_ns()

    def post(self, message: Message) -> None:
        self.port.post(message)

    def post_after(self, delay_ns: int, message: Message) -> None:
        assert isinstance(message, ItemDone)
        reason = self.failing.get(message.item_id)
        self.port.post_after(delay_ns, message if reason is None else ItemFailed(message.item_id, reason))


class FailingDevice(SimDevice):
    """`fail(item)` gives the reason why an item is to fail, or None."""

    fail: Fail

    def start(self, port: DevicePort) -> None:
        self.failures = FailingPort(port)
        super().start(self.failures)

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        reason = self.fail(item)
        if reason is not None:
            self.failures.failing[item.item_id] = reason
        super().launch(lane, item, after)


def serve_beside_a_stream(monkeypatch: pytest.MonkeyPatch, fail: Fail) -> VirtualServer:
    """A long prompt runs in slices beside a stream, and the same prompt again much later."""
    monkeypatch.setattr(virtual_server, "SimDevice", FailingDevice)
    server = VirtualServer(layers=8)
    assert isinstance(server.device, FailingDevice)
    server.device.fail = fail
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    server.submit(2 * S, "stream", prompt_token_ids=[66] * 30, max_tokens=200, **fields)
    server.submit(2 * S + 200 * MS, "long", prompt_token_ids=LONG_PROMPT, max_tokens=5, **fields)
    server.submit(10 * S, "again", prompt_token_ids=LONG_PROMPT, max_tokens=5, **fields)
    server.run_until(20 * S)
    return server


def is_long_slice(item: Item) -> bool:
    return isinstance(item.work, PrefillWork) and max(item.work.new_tokens) > 1000


def last_slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First layers of the last two slices of the long prompt."""
    seen: list[int] = []
    serve_beside_a_stream(
        monkeypatch, lambda item: seen.append(item.first_layer) if is_long_slice(item) else None
    )
    assert seen[0] == 0
    assert len(seen) >= 3
    return seen[-2:]


@pytest.mark.parametrize("reasons", [[FIRST], [FIRST, SECOND]], ids=["one fails", "both fail"])
def test_a_prompt_of_which_a_slice_failed_fails_for_the_first_reason_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, reasons: list[str]
) -> None:
    failing = dict(zip(last_slices(monkeypatch), reasons, strict=False))

    def fail(item: Item) -> str | None:
        return failing.pop(item.first_layer, None) if is_long_slice(item) else None

    server = serve_beside_a_stream(monkeypatch, fail)
    assert failing == {}
    [failed] = server.outcome("long").terminal
    assert isinstance(failed, wire.Failed)
    assert failed.code == "engine_failed"
    assert failed.message == f"prefill failed: {FIRST}"
    assert server.outcome("long").tokens == []
    [finished] = server.outcome("again").terminal
    assert finished.cached_tokens == 0, "KV that was never written is in the prefix index"
    assert server.outcome("again").tokens == expected_tokens(LONG_PROMPT, 5)
    assert server.outcome("stream").tokens == expected_tokens([66] * 30, 200)
    server.check_whole()


def test_a_state_request_that_meets_a_crash_is_answered_with_what_is_known() -> None:
    server = VirtualServer()
    server.send(2 * S, wire.GetState(ticket=7))
    server.runtime.inject(Ref("prefill"), PrefillDone(999, b"", 0, False), 2 * S)
    server.send(6 * S, wire.GetState(ticket=8))
    server.run_until(10 * S)
    cut_off, whole = [event for _, _, event in server.events if isinstance(event, wire.State)]
    assert (cut_off.ticket, whole.ticket) == (7, 8)
    assert "server" in cut_off.state
    assert "prefill" in whole.state


class ParkingRunner:
    """Keeps a hidden state of each batch that has layers left."""

    layers = 4
    pages = 8
    chunk_tokens_max = 4096
    parked_bytes_per_token = 16

    def __init__(self) -> None:
        self.parked: dict[int, bytes] = {}

    def prefill(self, work: PrefillWork, tokens: range, layers: range) -> StepOutput:
        self.parked[work.batch_id] = bytes(8)
        return StepOutput()

    def decode(self, work: DecodeWork) -> StepOutput:
        return StepOutput()

    def fused(self, decode: DecodeWork, work: PrefillWork, tokens: range) -> tuple[StepOutput, StepOutput]:
        return StepOutput(), StepOutput()

    def probe(self, work: ProbeWork, first_layer: int, last_layer: int) -> None: ...

    def discard(self, batch_id: int) -> None:
        self.parked.pop(batch_id, None)

    def reset(self) -> None:
        self.parked.clear()


class DeafPort:
    def now_ns(self) -> int:
        return 0

    def post(self, message: Message) -> None: ...

    def post_after(self, delay_ns: int, message: Message) -> None: ...


def test_a_reset_of_the_cpu_frees_the_parked_state_of_all_batches() -> None:
    runner = ParkingRunner()
    device = CpuDevice(runner, [0])
    device.start(DeafPort())
    one = int32_bytes([1])
    for batch_id in range(40, 43):
        work = PrefillWork(batch_id, (batch_id,), one, (1,), (0,), one, 1, sampling_columns([]))
        device.launch(device.lane(Phase.PREFILL, 1), Item(batch_id, work, 0, 2, False), [])
    device.reset()
    assert runner.parked == {}
    device.close()
