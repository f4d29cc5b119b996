"""A decode step that is to be fused, beside an item of another policy: held no longer than the floor."""

from __future__ import annotations

from typing import Any

from muxk.actors import protocol as wire
from muxk.kernel.devices.sim import SimCosts
from virtual_server import MS, S, VirtualServer, expected_tokens

FUSING = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {name: fusing}
spec:
  split: {decode: all, prefill: all}
  slice: {tokens: 32, fuse: decode}
  limits: {decode_floor: 100ms}
"""
FIELDS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def test_after_a_swap_to_fused_steps_the_arbiter_does_not_spin_while_a_long_item_ends() -> None:
    server = VirtualServer("static_split", costs=SimCosts(prefill_token_ns=250_000), calibrate=False)
    server.submit(2 * S, "stream", prompt_token_ids=[65] * 30, max_tokens=100, **FIELDS)
    server.submit(2 * S + 100 * MS, "long", prompt_token_ids=[66] * 1000, max_tokens=2, **FIELDS)
    server.submit(2 * S + 105 * MS, "second", prompt_token_ids=[68] * 600, max_tokens=2, **FIELDS)
    server.submit(2 * S + 110 * MS, "next", prompt_token_ids=[67] * 100, max_tokens=2, **FIELDS)
    server.send(2 * S + 200 * MS, wire.SwapPolicy(FUSING, "fusing.yaml"))
    runtime, steps = server.runtime, 0
    while runtime.now_ns() < 10 * S and steps < 20_000:
        server.step()
        steps += 1
    assert runtime.now_ns() >= 10 * S, "a timer that is always due"
    assert server.outcome("stream").tokens == expected_tokens([65] * 30, 100)
    assert len(server.outcome("next").tokens) == 2
    server.check_whole()
