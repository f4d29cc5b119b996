"""How long a decode step is held counts from the end of the step before it, one queued ahead included."""

from __future__ import annotations

from typing import Any

import pytest
import virtual_server
from muxk.kernel.devices.sim import SimCosts
from muxk.policies.engine import compile_policy
from virtual_server import MS, S, VirtualServer

PAUSING = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {{name: pausing}}
spec:
  limits: {{decode_ahead: {ahead}, backlog: 1}}
  split:
    - {{name: pause, when: prefill.pending and decode.idle < 50ms, then: {{decode: 0, prefill: all}}}}
    - {{name: decode, then: {{decode: all, prefill: all}}}}
  slice: {{layers: 1}}
"""
COSTS = SimCosts(decode_base_ns=20 * MS, prefill_token_ns=2_500)
FIELDS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rule_that_pauses_decode_after_each_step_gets_its_whole_pause(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    policy = compile_policy(PAUSING.format(ahead=ahead), "pausing.yaml", {})
    monkeypatch.setattr(virtual_server, "load_policy", lambda *_: policy)
    server = VirtualServer(costs=COSTS, calibrate=False, layers=64)
    server.submit(2 * S, "stream", prompt_token_ids=[65] * 30, max_tokens=60, **FIELDS)
    server.submit(2 * S + 100 * MS, "long", prompt_token_ids=[66] * 3000, max_tokens=1, **FIELDS)
    server.run_until(20 * S)
    stream, long = server.outcome("stream"), server.outcome("long")
    beside = [
        gap
        for gap, end_ns in zip(stream.gaps_ms, stream.times_ns[1:], strict=True)
        if 2 * S + 200 * MS < end_ns < long.times_ns[0]
    ]
    assert len(beside) >= 5
    assert min(beside) > 70
    server.check_whole()
