"""A process that was stopped for minutes (Ctrl-Z, a paused machine) has no lane that hangs."""

from __future__ import annotations

from typing import Any

from muxk.kernel.devices.sim import SimCosts
from virtual_server import S, VirtualServer, expected_tokens

FIELDS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def stop_process(server: VirtualServer, seconds: int) -> None:
    """Everything that is to come comes so much later, and time goes on."""
    server.runtime._agenda.postpone(seconds * S)


def test_an_item_that_was_running_when_the_process_was_stopped_is_not_given_up() -> None:
    server = VirtualServer("inflight", costs=SimCosts(prefill_layer_base_ns=S), layers=8, calibrate=False)
    server.submit(2 * S, "it", prompt_token_ids=[65] * 30, max_tokens=5, **FIELDS)
    server.run_until(5 * S)
    assert server.describe("arbiter")["lanes"]
    stop_process(server, 3600)
    server.run_until(3700 * S)
    assert server.outcome("it").tokens == expected_tokens([65] * 30, 5)
    assert server.describe("gateway")["stuck_lanes"] == {}
    assert "stuck items" not in server.describe("arbiter")["counts"]
    server.check_whole()
