"""Completions that come late, out of order, or for batches that nobody wants any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import virtual_server
from muxk.kernel.actor import Message
from muxk.kernel.device import DevicePort, ItemDone, Lane
from muxk.kernel.devices.sim import SimCosts, SimDevice
from muxk.kernel.work import Item
from muxk.policies.engine import compile_policy
from virtual_server import MS, S, VirtualServer, expected_tokens

CHUNKS = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {name: chunks}
spec:
  split: {decode: all, prefill: all}
  form: {requests: 8, tokens: 2048}
  slice: {layers: all, tokens: 32}
"""
SLOW_PREFILL = SimCosts(prefill_token_ns=500_000)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def chunked_server(monkeypatch: pytest.MonkeyPatch) -> VirtualServer:
    monkeypatch.setattr(virtual_server, "load_policy", lambda *_: compile_policy(CHUNKS, "chunks.yaml", {}))
    return VirtualServer(costs=SLOW_PREFILL, calibrate=False)


def test_a_batch_cancelled_while_its_last_two_chunks_run_gives_all_its_pages_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = chunked_server(monkeypatch)
    # The first keeps the lane busy while the other two arrive, which then run as one batch of two chunks.
    server.submit(2 * S, "first", prompt_token_ids=[65] * 20, max_tokens=1, **GREEDY)
    for number, length in enumerate((20, 40)):
        server.submit(
            2 * S + MS, f"r{number}", prompt_token_ids=[66 + number] * length, max_tokens=5, **GREEDY
        )
    server.run_until(2 * S + 60 * MS)
    assert [lane["tokens"] for lane in server.describe("arbiter")["lanes"]] == [32, 28]
    for number in range(2):
        server.abort(2 * S + 61 * MS, f"r{number}")
    server.run_until(10 * S)
    server.check_whole()


@dataclass
class OvertakenPort:
    """What the device posts about an item on one lane comes after what follows on another lane."""

    port: DevicePort
    late: dict[int, int] = field(default_factory=dict)
    """Nanoseconds by which an item's completion is late."""

    def now_ns(self) -> int:
        return self.port.now_ns()

    def post(self, message: Message) -> None:
        self.port.post(message)

    def post_after(self, delay_ns: int, message: Message) -> None:
        assert isinstance(message, ItemDone)
        self.port.post_after(delay_ns + self.late.get(message.item_id, 0), message)


class OvertakingDevice(SimDevice):
    """Every third completion is late by more than the next item takes: threads post, a queue merges."""

    def start(self, port: DevicePort) -> None:
        self.overtaken = OvertakenPort(port)
        super().start(self.overtaken)

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        if item.item_id % 3 == 0:
            self.overtaken.late[item.item_id] = 20 * MS
        super().launch(lane, item, after)


@pytest.mark.parametrize("policy", ["muxwise", "chunked", "temporal"])
def test_completions_that_overtake_others_change_no_token(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(virtual_server, "SimDevice", OvertakingDevice)
    server = VirtualServer(policy)
    prompts = {f"r{number}": [65 + number] * (20 + 37 * number) for number in range(12)}
    for number, (name, prompt) in enumerate(prompts.items()):
        server.submit(2 * S + 30 * number * MS, name, prompt_token_ids=prompt, max_tokens=20, **GREEDY)
    server.run_until(20 * S)
    for name, prompt in prompts.items():
        assert server.outcome(name).tokens == expected_tokens(prompt, 20)
    server.check_whole()
