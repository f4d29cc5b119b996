"""What the shipped policies do to token gaps and first tokens, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import virtual_server
from muxk.kernel.device import Lane
from muxk.kernel.devices.sim import SimCosts, SimDevice
from muxk.kernel.work import Item, PrefillWork
from virtual_server import MS, S, VirtualServer, expected_tokens

LONG = {"prompt_token_ids": [97 + i % 26 for i in range(3000)], "max_tokens": 3, "temperature": 0.0}
SHORT = {"prompt_token_ids": [66] * 20, "max_tokens": 3, "temperature": 0.0}
STREAM = {"prompt_token_ids": [65] * 30, "max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
# One layer of the long prompt on all units takes about 90 ms, all eight of them about 0.7 s.
SLOW_PREFILL = SimCosts(prefill_token_ns=25_000)


def gaps_beside_a_long_prompt(policy: str, units: int = 8) -> tuple[VirtualServer, float]:
    server = VirtualServer(policy, units=units, layers=8, costs=SLOW_PREFILL, kv_tokens=8192)
    server.submit(20 * S, "stream", **STREAM)
    server.submit(20 * S + 400 * MS, "long", **LONG)
    server.run_until(60 * S)
    assert server.outcome("stream").tokens == expected_tokens([65] * 30, 150)
    assert len(server.outcome("long").tokens) >= 1
    return server, max(server.outcome("stream").gaps_ms)


def test_muxwise_keeps_every_gap_within_the_slo_while_a_long_prompt_prefills() -> None:
    server, worst_ms = gaps_beside_a_long_prompt("muxwise")
    assert worst_ms < 100
    assert server.describe("arbiter")["counts"]["split/best-fit"] > 10


def test_inflight_stalls_the_stream_by_the_whole_prompt() -> None:
    _, worst_ms = gaps_beside_a_long_prompt("inflight")
    assert worst_ms > 600


def test_chunked_lengthens_no_step_by_more_than_its_budget() -> None:
    # 32 tokens of the long prompt cost about 8 layers * 32 * 25 us = 6 ms, and a few more for attention.
    server, worst_ms = gaps_beside_a_long_prompt("chunked")
    assert worst_ms < 6.5 + 7 + 6
    counts = server.describe("arbiter")["counts"]
    assert counts["fused steps"] > 80
    assert (server.outcome("long").times_ns[0] - 20 * S) / MS > 1500  # the price: the weights again and again


@pytest.mark.parametrize("budget", ["1", "7", "500", "5000"])
def test_any_budget_gives_the_same_tokens(budget: str) -> None:
    server = VirtualServer("chunked", layers=4, kv_tokens=8192, settings={"budget": budget})
    server.submit(20 * S, "stream", **STREAM)
    prompts = {f"p{index}": [97 + (i * index) % 26 for i in range(5 + 117 * index)] for index in range(5)}
    for index, (name, prompt) in enumerate(prompts.items()):
        at_ns = 20 * S + (50 + index // 2) * MS
        server.submit(at_ns, name, prompt_token_ids=prompt, max_tokens=30, temperature=0, ignore_eos=True)
    server.run_until(60 * S)
    assert server.outcome("stream").tokens == expected_tokens([65] * 30, 150)
    for name, prompt in prompts.items():
        assert server.outcome(name).tokens == expected_tokens(prompt, 30)
    server.check_whole()


def test_temporal_keeps_every_gap_within_the_slo_without_a_split() -> None:
    costs = SimCosts(prefill_token_ns=5_000)  # a layer of the long prompt takes about 16 ms
    server = VirtualServer("temporal", layers=8, costs=costs, kv_tokens=8192)
    server.submit(20 * S, "stream", **STREAM)
    server.submit(20 * S + 400 * MS, "long", **LONG)
    server.run_until(60 * S)
    worst_ms = max(server.outcome("stream").gaps_ms)
    assert 2 * 16 < worst_ms < 100
    assert server.describe("arbiter")["split_residency_ms"].keys() == {"8+8"}
    assert server.outcome("long").tokens == expected_tokens(list(LONG["prompt_token_ids"]), 3)


def test_static_split_never_changes_and_never_stalls() -> None:
    server, worst_ms = gaps_beside_a_long_prompt("static_split")
    assert worst_ms < 15
    residency = server.describe("arbiter")["split_residency_ms"]
    assert residency["4+4"] > 0.9 * sum(residency.values()) - 20_000
    assert server.describe("arbiter")["counts"].get("split changes", 0) <= 1


def test_chunks_and_layers_combine() -> None:
    source = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {name: both}
spec:
  slice: {layers: 3, tokens: 500}
  preempt:
    - {name: shorter, when: candidate.new_tokens < 100 and running.depth == 0, then: park}
    - {name: otherwise, then: continue}
"""
    from muxk.actors import protocol as wire

    server = VirtualServer("muxwise", layers=8, costs=SLOW_PREFILL, kv_tokens=8192)
    server.send(20 * S, wire.SwapPolicy(source, "both.yaml"))
    server.submit(21 * S, "long", **LONG)
    server.submit(21 * S + 130 * MS, "short", **SHORT)
    server.run_until(60 * S)
    assert server.outcome("long").tokens == expected_tokens(list(LONG["prompt_token_ids"]), 3)
    assert server.outcome("short").tokens == expected_tokens([66] * 20, 3)
    counts = server.describe("arbiter")["counts"]
    assert counts["preemptions"] == 1
    # Six chunks of three items each.
    assert counts["slice/always"] >= 18
    assert (server.outcome("short").times_ns[0] - 21 * S) / MS < 300


def test_a_prompt_that_scratch_memory_does_not_hold_runs_in_chunks_under_every_policy() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_server, "SimDevice", partial(SimDevice, chunk_tokens_max=700))
        for policy in ("muxwise", "inflight", "temporal", "static_split"):
            server = VirtualServer(policy, layers=4, kv_tokens=8192)
            items: list[Item] = []
            patch.setattr(server.device, "launch", noting(items, server.device.launch))
            server.submit(20 * S, "long", **LONG)
            server.run_until(40 * S)
            chunks = {
                item.last_token - item.first_token for item in items if isinstance(item.work, PrefillWork)
            }
            assert max(chunks) == 700, policy
            assert server.outcome("long").tokens == expected_tokens(list(LONG["prompt_token_ids"]), 3)


def noting(items: list[Item], launch: Callable[..., None]) -> Callable[..., None]:
    def note(lane: Lane, item: Item, after: Sequence[int]) -> None:
        items.append(item)
        launch(lane, item, after)

    return note


def test_one_unit_shares_time_layer_by_layer_and_no_gap_exceeds_a_layer_and_a_step() -> None:
    _, worst_ms = gaps_beside_a_long_prompt("muxwise", units=1)
    assert worst_ms < 90 + 60


def test_a_short_prompt_overtakes_a_long_one_at_a_layer_border_under_muxwise() -> None:
    first_ms = {}
    for policy in ("muxwise", "inflight"):
        server = VirtualServer(policy, layers=8, costs=SLOW_PREFILL, kv_tokens=8192)
        server.submit(20 * S, "long", **LONG)
        server.submit(20 * S + 50 * MS, "short", **SHORT)
        server.run_until(40 * S)
        first_ms[policy] = (server.outcome("short").times_ns[0] - 20 * S) / MS
        assert server.outcome("short").tokens == expected_tokens([66] * 20, 3)
        assert server.outcome("long").tokens == expected_tokens(list(LONG["prompt_token_ids"]), 3)
    assert first_ms["muxwise"] < 350
    assert first_ms["inflight"] > 600


def test_the_parked_prompt_goes_on_where_it_stopped() -> None:
    server = VirtualServer("muxwise", layers=8, costs=SLOW_PREFILL, kv_tokens=8192)
    server.submit(20 * S, "long", **LONG)
    for index in range(3):
        server.submit(20 * S + (50 + 150 * index) * MS, f"short{index}", **SHORT)
    server.run_until(40 * S)
    counts = server.describe("arbiter")["counts"]
    assert counts["preemptions"] >= 2
    # All layers run once each: alone the long prompt takes 0.72 s, and the short ones need about 10 ms each.
    assert (server.outcome("long").times_ns[0] - 20 * S) / MS < 900


@pytest.mark.parametrize("policy", ["muxwise", "inflight"])
def test_short_prompts_that_wait_together_are_prefilled_together(policy: str) -> None:
    server = VirtualServer(policy, kv_tokens=8192)
    server.submit(20 * S, "first", **(SHORT | {"prompt_token_ids": [70] * 600}))
    for index in range(4):
        server.submit(20 * S + MS, f"r{index}", **SHORT)
    server.run_until(30 * S)
    firsts = {server.outcome(f"r{index}").times_ns[0] for index in range(4)}
    assert len(firsts) == 1


def test_a_policy_that_holds_everything_can_not_stop_the_kernel() -> None:
    source = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {name: lazy}
spec:
  split: {prefill: all}    # nothing decodes, ever
"""
    from muxk.actors import protocol as wire

    server = VirtualServer("muxwise")
    server.send(20 * S, wire.SwapPolicy(source, "lazy.yaml"))
    server.submit(21 * S, "it", **STREAM)
    server.run_until(60 * S)
    [answer] = [event for _, _, event in server.events if isinstance(event, wire.PolicySwapped)]
    assert answer.accepted, answer.report
    assert server.outcome("it").tokens == expected_tokens([65] * 30, 150)
    assert server.describe("arbiter")["counts"]["forced launches"] > 10


def test_decode_is_never_held_beyond_the_floor() -> None:
    source = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {name: greedy-prefill}
spec:
  limits: {decode_floor: 50ms, backlog: 1}
  split: {prefill: all}
  slice: {layers: 1}
"""
    from muxk.actors import protocol as wire

    server = VirtualServer("muxwise", layers=8, costs=SLOW_PREFILL, kv_tokens=16_384)
    server.send(20 * S, wire.SwapPolicy(source, "greedy.yaml"))
    server.submit(21 * S, "stream", **STREAM)
    for index in range(3):
        fields = LONG | {"prompt_token_ids": [97 + (i + index) % 26 for i in range(3000)]}
        server.submit(21 * S + 300 * MS, f"long{index}", **fields)
    server.run_until(60 * S)
    assert server.outcome("stream").tokens == expected_tokens([65] * 30, 150)
    # The floor, what is left of the layer that runs then, and the step.
    assert 50 < max(server.outcome("stream").gaps_ms) < 50 + 100 + 20


def test_no_gap_is_longer_than_a_step_when_a_request_joins_a_running_batch() -> None:
    server = VirtualServer("muxwise", costs=SimCosts(decode_base_ns=50 * MS))
    server.submit(20 * S, "stream", **STREAM)
    for index in range(8):
        at_ns = 21 * S + 463 * index * MS
        server.submit(
            at_ns, f"joins{index}", **(STREAM | {"max_tokens": 8, "prompt_token_ids": [70 + index] * 40})
        )
    server.run_until(60 * S)
    step_ms = sorted(server.outcome("stream").gaps_ms)[75]
    for index in range(8):
        assert max(server.outcome(f"joins{index}").gaps_ms) < 1.2 * step_ms
