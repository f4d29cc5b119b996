"""Policies that arrive while the server serves: extreme numbers, many of them, and shorter floors."""

from __future__ import annotations

from typing import Any

import pytest
from muxk.actors import protocol as wire
from muxk.actors.gateway import Gateway
from muxk.kernel.actor import Ref
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.messages import PrefillDone
from muxk.kernel.policy import BOOK_POLICIES, PolicyBook
from muxk.policies.engine import compile_policy
from virtual_server import MS, S, VirtualServer, expected_tokens

SLO = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {{name: patient}}
spec:
  extends: muxwise
  slo: {{tbt: 100ms, ttft: {ttft}}}
"""
NUMBERED = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {{name: n{number}}}
spec:
  split: [{{name: rule-{number}, then: {{decode: units.total / 2, prefill: rest}}}}]
"""
HOLDING = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {{name: holding}}
spec:
  limits: {{decode_floor: {floor}, backlog: 1}}
  split: {{decode: 0, prefill: all}}
  slice: {{layers: all}}
"""
LONG: dict[str, Any] = {"prompt_token_ids": [65] * 3000, "temperature": 0.0, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt_token_ids": [65] * 300, "temperature": 0.0, "ignore_eos": True}


def swaps(server: VirtualServer) -> list[wire.PolicySwapped]:
    return [event for _, _, event in server.events if isinstance(event, wire.PolicySwapped)]


@pytest.mark.parametrize("ttft", ["1000h/token", "20000h/token", "2000000h/token", "2000000h"])
def test_a_time_beyond_any_clock_is_refused_with_its_place_or_clamped_and_the_server_serves_on(
    ttft: str,
) -> None:
    server = VirtualServer()
    server.send(2 * S, wire.SwapPolicy(SLO.format(ttft=ttft), filename="patient.yaml"))
    for index in range(2):
        server.submit(3 * S + index * MS, f"r{index}", max_tokens=3, **LONG)
    server.run_until(10 * S)
    [answer] = swaps(server)
    assert answer.accepted or answer.report.startswith("patient.yaml:7:27: a time must be at most 10 years")
    for index in range(2):
        assert server.outcome(f"r{index}").tokens == expected_tokens([65] * 3000, 3)
    server.check_whole()


def test_a_deadline_stays_within_the_integers_of_messages() -> None:
    policy = compile_policy(SLO.format(ttft="2000h/token"), "patient.yaml", {})
    assert policy.ttft.at(1 << 24) == policy.ttft.at(1 << 20) < 1 << 62


def test_three_hundred_swaps_leave_a_bounded_book_and_the_counters_of_the_last() -> None:
    server = VirtualServer()
    server.submit(7 * S + 500 * MS, "stream", prompt_token_ids=[65] * 20, max_tokens=200, ignore_eos=True)
    for number in range(300):
        server.send(2 * S + number * 20 * MS, wire.SwapPolicy(NUMBERED.format(number=number)))
    server.run_until(9 * S)
    assert sum(answer.accepted for answer in swaps(server)) == 300
    gateway = server.runtime.actor("gateway")
    assert isinstance(gateway, Gateway)
    assert len(gateway._policy._book._policies) <= BOOK_POLICIES + 1
    rules = [name for name in server.describe("arbiter")["counts"] if name.startswith("split/")]
    assert rules == ["split/rule-299"]
    assert server.describe("arbiter")["counts"]["policy swaps"] == 300


def test_an_engine_that_is_rebuilt_after_many_swaps_serves_with_the_policy_in_force() -> None:
    server = VirtualServer()
    for number in range(3 * BOOK_POLICIES):
        server.send(2 * S + number * 20 * MS, wire.SwapPolicy(NUMBERED.format(number=number)))
    server.runtime.inject(Ref("prefill"), PrefillDone(999, b"", 0, False), 5 * S)
    server.submit(9 * S, "next", max_tokens=10, **SHORT)
    server.run_until(12 * S)
    assert server.runtime.stop_reason is None
    assert server.describe("arbiter")["policy"] == f"n{3 * BOOK_POLICIES - 1}"
    assert server.outcome("next").tokens == expected_tokens([65] * 300, 10)


def test_the_book_keeps_the_first_policy_and_the_latest() -> None:
    book = PolicyBook()
    shas = [book.add(compile_policy(NUMBERED.format(number=n), "n.yaml", {})) for n in range(40)]
    again = book.add(compile_policy(NUMBERED.format(number=39 - BOOK_POLICIES + 1), "n.yaml", {}))
    book.add(compile_policy(NUMBERED.format(number=40), "n.yaml", {}))
    assert book[shas[0]].name == "n0"
    assert [book[sha].name for sha in shas[-3:]] == ["n37", "n38", "n39"]
    assert book[again].name == f"n{39 - BOOK_POLICIES + 1}", "used again, so not the oldest"
    with pytest.raises(KeyError):
        book[shas[1]]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_shorter_decode_floor_counts_for_a_step_that_is_held_already(swapped: bool) -> None:
    # All layers of the long prompt are one item of about three seconds, in which nothing else happens.
    costs = SimCosts(prefill_token_ns=400_000)
    server = VirtualServer(kv_tokens=4096, costs=costs, calibrate=False)
    server.submit(2 * S, "stream", prompt_token_ids=[65] * 20, max_tokens=60, ignore_eos=True)
    server.send(2 * S + 100 * MS, wire.SwapPolicy(HOLDING.format(floor="60s"), ticket=1))
    server.submit(2 * S + 110 * MS, "long", prompt_token_ids=[66] * 2000, max_tokens=1, ignore_eos=True)
    if swapped:
        server.send(2 * S + 200 * MS, wire.SwapPolicy(HOLDING.format(floor="500ms"), ticket=2))
    server.run_until(2 * S + 500 * MS)
    assert [lane["phase"] for lane in server.describe("arbiter")["lanes"]] == ["prefill"]
    server.run_until(2 * S + 750 * MS)
    phases = [lane["phase"] for lane in server.describe("arbiter")["lanes"]]
    assert ("decode" in phases) == swapped
    server.run_until(60 * S)
    assert len(server.outcome("stream").tokens) == 60
    server.check_whole()
