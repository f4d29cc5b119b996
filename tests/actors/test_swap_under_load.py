"""A swap under load, for every pair of shipped policies: nothing is lost, and it costs at most an item."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import pytest
from muxk.actors import engine
from muxk.actors import protocol as wire
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.device import Lane
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.messages import PolicyChanged
from muxk.kernel.work import DecodeWork, Item
from virtual_server import MS, S, VirtualServer, expected_tokens

POLICIES = ("muxwise", "chunked", "temporal", "inflight", "static_split")
COSTS = SimCosts(prefill_token_ns=6_000)
STREAMS, STREAM_TOKENS = 4, 70
PROMPTS, PROMPT_TOKENS = 14, 300
SWAP_AT_NS = S + 300 * MS


class Swapped(Arbiter):
    """Notes what was in flight when the new policy came, and who decided what was launched afterwards."""

    in_flight: Counter[str]
    launched_by: Counter[str]
    prompts_first_ns: int
    """Prefill that the new policy launched before its first decode step."""

    def started(self) -> None:
        super().started()
        self.in_flight, self.launched_by = Counter(), Counter()
        self.prompts_first_ns = 0

    def on_policy_changed(self, message: PolicyChanged) -> None:
        self.in_flight.update(str(flight.phase) for flight in self._lanes.flights.values())
        super().on_policy_changed(message)


def run(before: str, after: str | None) -> tuple[VirtualServer, Swapped, float]:
    """Streams that decode beside prompts; the longest item in ms comes with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Arbiter", Swapped)
        server = VirtualServer(before, calibrate=False, costs=COSTS, kv_tokens=16_384)
        server.runtime.start()
    arbiter = server.runtime.actor("arbiter")
    assert isinstance(arbiter, Swapped)
    longest_ns, decoded = [0], [False]
    launch, cost_ns = server.device.launch, server.device._cost_ns

    def spy(lane: Lane, item: Item, after: Any) -> None:
        item_ns = cost_ns(item, len(lane.units))
        longest_ns[0] = max(longest_ns[0], item_ns)
        if arbiter.state.policy.name == "swapped" and not decoded[0]:
            decoded[0] = isinstance(item.work, DecodeWork) or item.decode is not None
            arbiter.prompts_first_ns += 0 if decoded[0] else item_ns
        arbiter.launched_by[arbiter.state.policy.name] += 1
        launch(lane, item, after)

    server.device.launch = spy  # type: ignore[method-assign]
    for index in range(STREAMS):
        stream = {"prompt_token_ids": [65 + index] * 30, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        server.submit(S + index * MS, f"stream{index}", temperature=0.0, **stream)
    for index in range(PROMPTS):
        ids = [97 + index] * PROMPT_TOKENS
        fields = {"prompt_token_ids": ids, "max_tokens": 3, "ignore_eos": True, "temperature": 0.0}
        server.submit(S + (20 + 40 * index) * MS, f"prompt{index}", **fields)
    if after is not None:
        head = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: swapped}\n"
        server.send(SWAP_AT_NS, wire.SwapPolicy(f"{head}spec: {{extends: {after}}}\n", "swapped.yaml"))
    server.run_until(20 * S)
    return server, arbiter, longest_ns[0] / MS


def worst_gap_ms(server: VirtualServer) -> float:
    return max(max(server.outcome(f"stream{index}").gaps_ms) for index in range(STREAMS))


@cache
def alone(policy: str) -> tuple[float, float]:
    """The worst gap and the longest item of a policy that is not swapped, in ms."""
    server, _, item_ms = run(policy, None)
    return worst_gap_ms(server), item_ms


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(POLICIES, 2)))
def test_a_swap_under_load_loses_nothing_and_costs_at_most_one_item(before: str, after: str) -> None:
    server, arbiter, _ = run(before, after)
    for index in range(STREAMS):
        outcome = server.outcome(f"stream{index}")
        assert outcome.tokens == expected_tokens([65 + index] * 30, STREAM_TOKENS)
        assert isinstance(outcome.terminal[0], wire.Finished)
    for index in range(PROMPTS):
        assert server.outcome(f"prompt{index}").tokens == expected_tokens([97 + index] * PROMPT_TOKENS, 3)
    server.check_whole()
    # It came in mid-work; two items of a phase at most were launched before it, and all that followed were
    # decided by the new policy.
    assert arbiter.in_flight
    assert max(arbiter.in_flight.values()) <= 2
    assert arbiter.state.counts["policy swaps"] == 1
    assert arbiter.launched_by["swapped"] > 20
    # Gaps are those of one policy or the other, and an item of the one in front of a step of the other.
    (gap_before, item_before), (gap_after, item_after) = alone(before), alone(after)
    allowed_ms = max(gap_before, gap_after) + max(item_before, item_after)
    if after == "inflight":  # it is its rule that all prompts which wait come first
        allowed_ms += arbiter.prompts_first_ns / MS
    assert worst_gap_ms(server) <= allowed_ms
