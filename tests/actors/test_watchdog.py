"""An item that does not end: its requests fail with the reason, and the server says which lane hangs."""

from __future__ import annotations

from typing import Any

import pytest
import virtual_server
from muxk.actors import protocol as wire
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.work import Item, Phase
from virtual_server import S, VirtualServer, expected_tokens

STREAM: dict[str, Any] = {"max_tokens": 9000, "temperature": 0.0, "ignore_eos": True}
HANG_S = 100


class HangingDevice(SimDevice):
    """The first item of a phase after 20 s takes HANG_S."""

    hangs: Phase | None = None

    def _cost_ns(self, item: Item, units: int) -> int:
        assert self._port is not None
        phase = Phase.DECODE if hasattr(item.work, "positions") else Phase.PREFILL
        if phase is self.hangs and self._port.now_ns() > 20 * S:
            self.hangs = None
            return HANG_S * S
        return super()._cost_ns(item, units)


def hanging_server(phase: Phase, policy: str = "muxwise") -> VirtualServer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_server, "SimDevice", HangingDevice)
        server = VirtualServer(policy, kv_tokens=16_384)
    assert isinstance(server.device, HangingDevice)
    server.device.hangs = phase
    return server


def test_a_prefill_that_hangs_fails_its_requests_and_those_behind_it_while_decode_goes_on() -> None:
    server = hanging_server(Phase.PREFILL)
    server.submit(15 * S, "stream", prompt_token_ids=[65] * 30, **STREAM)
    server.submit(21 * S, "hangs", prompt_token_ids=[66] * 600, **STREAM)
    server.submit(40 * S, "behind", prompt_token_ids=[67] * 30, **STREAM)
    server.run_until(60 * S)
    for name in ("hangs", "behind"):
        [failed] = server.outcome(name).terminal
        assert failed.code == "engine_failed"
        assert "lane prefill@" in failed.message
        assert "has not ended for" in failed.message
    server.submit(61 * S, "refused", prompt_token_ids=[68] * 30, **STREAM)
    server.run_until(62 * S)
    [refused] = server.outcome("refused").terminal
    assert refused.code == "engine_failed"
    shown = server.describe("gateway")
    assert not shown["ready"]
    assert list(shown["stuck_lanes"]) == [
        lane["lane"] for lane in server.describe("arbiter")["lanes"] if lane["stuck"]
    ]
    assert not server.outcome("stream").terminal
    assert len(server.outcome("stream").tokens) > 3000


@pytest.mark.parametrize(("phase", "policy"), [(Phase.DECODE, "muxwise"), (Phase.PREFILL, "chunked")])
def test_when_the_item_ends_after_all_its_pages_come_back_and_the_server_serves(
    phase: Phase, policy: str
) -> None:
    server = hanging_server(phase, policy)
    server.submit(19 * S, "stream", prompt_token_ids=[65] * 30, **STREAM)
    server.submit(21 * S, "other", prompt_token_ids=[66] * 600, **STREAM)
    server.run_until(80 * S)
    for name in ("stream", "other"):
        [failed] = server.outcome(name).terminal
        assert isinstance(failed, wire.Failed)
        assert failed.code == "engine_failed"
    assert server.describe("kv_pool")["pages_used"] > 0  # the item may still write to them
    server.run_until((22 + HANG_S) * S)
    server.check_whole()
    assert server.describe("gateway")["ready"]
    server.submit(150 * S, "later", prompt_token_ids=[67] * 30, **(STREAM | {"max_tokens": 9}))
    server.run_until(160 * S)
    assert server.outcome("later").tokens == expected_tokens([67] * 30, 9)


def test_an_item_that_is_long_because_it_has_much_to_do_is_left_alone() -> None:
    slow = virtual_server.SimCosts(prefill_token_ns=3_000_000)  # 3,000 tokens: 9 s a layer, 72 s in all
    server = VirtualServer("inflight", layers=8, costs=slow, kv_tokens=8192)
    server.submit(2000 * S, "long", prompt_token_ids=[66] * 3000, max_tokens=1, temperature=0)
    server.run_until(2200 * S)
    assert server.outcome("long").tokens == expected_tokens([66] * 3000, 1)
