"""What the kernel guarantees whatever a policy answers: hostile policies in Python try to break each of it.

An arbiter that checks itself before and after every turn looks for anything that a policy must not be able to
bring about; the pool checks itself after every message; the simulated device refuses an item that writes a
page which an older item may touch, and its tokens are wrong if KV ever was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from checked_pool import CheckedPool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from muxk.actors import engine
from muxk.actors import protocol as wire
from muxk.kernel.devices.sim import SimCosts, SimDevice
from muxk.kernel.policy import Policy
from muxk.kernel.sane import BACKLOG_MAX
from muxk.kernel.view import Decision, FormAnswer, FormView, OrderAnswer, RequestView, VictimAnswer, View
from muxk.kernel.work import Split
from python_policies import HUGE, MS, NUMBERS, Fixed, Like, Random
from virtual_server import S, VirtualServer, expected_tokens
from watched_arbiter import WatchedArbiter

FLOOR_NS = 40 * MS
CHEAP = SimCosts(launch_ns=20_000, decode_base_ns=800_000, decode_row_ns=20_000, prefill_layer_base_ns=60_000)
SLOW_PREFILL = SimCosts(prefill_token_ns=20_000)
UNITS, LAYERS = 8, 4


def hostile_server(policy: Policy, **options: Any) -> VirtualServer:
    fields: dict[str, Any] = {"units": UNITS, "layers": LAYERS, "kv_tokens": 1024, "costs": CHEAP}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "KvPool", CheckedPool)
        patch.setattr(engine, "Arbiter", WatchedArbiter)
        server = VirtualServer(policy, calibrate=False, **fields | options)
        server.runtime.start()
    return server


def watched(server: VirtualServer) -> WatchedArbiter:
    arbiter = server.runtime.actor("arbiter")
    assert isinstance(arbiter, WatchedArbiter)
    return arbiter


def submit_crowd(
    server: VirtualServer, count: int = 14, every_ns: int = 3 * MS, longer: int = 0
) -> dict[str, list[int]]:
    """Requests of all sizes, some with the same beginning; what each is to answer."""
    expected = {}
    for index in range(count):
        prompt = [97 + i % 26 for i in range(32 * (index % 2))] + [97 + index % 26] * (5 + 23 * (index % 7))
        tokens = 1 + 5 * (index % 5) + longer
        server.submit(
            S + index * every_ns,
            f"r{index}",
            prompt_token_ids=prompt,
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            request_class=("a", "b", "")[index % 3],
        )
        expected[f"r{index}"] = expected_tokens(prompt, tokens)
    return expected


def assert_all_served(server: VirtualServer, expected: dict[str, list[int]]) -> None:
    assert server.runtime.stop_reason is None
    for name, tokens in expected.items():
        outcome = server.outcome(name)
        assert len(outcome.terminal) == 1, f"{name} did not end, or ended twice"
        assert isinstance(outcome.terminal[0], wire.Finished), outcome.terminal
        assert outcome.tokens == tokens, name
    server.check_whole()


def serve_crowd(policy: Policy, count: int = 14, longer: int = 0, **options: Any) -> VirtualServer:
    server = hostile_server(policy, **options)
    expected = submit_crowd(server, count, longer=longer)
    server.run_until(60 * S)
    assert_all_served(server, expected)
    return server


# --- everything at once ---


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_lose_no_request_no_page_and_no_token(seed: int) -> None:
    policy = Random(seed, decode_floor_ns=FLOOR_NS, preemptions=3, parked_bytes=400_000)
    server = serve_crowd(policy, jitter=bool(seed % 2), seed=seed)
    arbiter = watched(server)
    assert arbiter.turns > 200
    assert arbiter.state.counts["illegal splits"] > 0
    assert arbiter.longest_hold_ns <= FLOOR_NS


def test_hostile_policies_that_replace_each_other_in_mid_work_lose_nothing() -> None:
    server = hostile_server(Random(0, decode_floor_ns=FLOOR_NS))
    for index in range(15):
        after: Policy = Random(index + 1, decode_floor_ns=FLOOR_NS, preemptions=2)
        if index % 4 == 0:
            after = Like("chunked", f"chunked {index}", preemptions=2)
        server.swap(S + index * 9 * MS, after)
    expected = submit_crowd(server, longer=20)
    server.run_until(60 * S)
    assert_all_served(server, expected)
    assert watched(server).state.counts["policy swaps"] == 15


def test_answers_without_end_fill_no_table_of_counts() -> None:
    server = serve_crowd(Random(1, decode_floor_ns=FLOOR_NS))
    arbiter = watched(server)
    view = arbiter.state.view(arbiter._device, arbiter._lanes, arbiter._splits, 0)
    for _ in range(3000):
        arbiter.state.decider.decide(view)
    assert len(arbiter.state.decider.counts) < 2000


decisions = st.builds(
    Decision,
    split=st.builds(Split, st.integers(-2, UNITS + 2), st.integers(-2, UNITS + 2)),
    layers=st.sampled_from(NUMBERS),
    preempt=st.booleans(),
    rules=st.just(("split/any",)),
    tokens=st.one_of(st.none(), st.sampled_from(NUMBERS)),
    fuse=st.booleans(),
)
indices = st.lists(st.integers(-2, 9), max_size=6)


class Scripted(Like):
    """Goes through lists of answers again and again, whatever is asked."""

    def __init__(
        self,
        decided: Sequence[Decision],
        orders: Sequence[Sequence[int]],
        victims: Sequence[int],
        **limits: int,
    ) -> None:
        super().__init__("inflight", **limits)
        self._decided, self._victims = itertools.cycle(decided), itertools.cycle(victims)
        self._orders = itertools.cycle(orders)

    def decide(self, view: View) -> Decision:
        return next(self._decided)

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        return OrderAnswer(tuple(next(self._orders)), "order/any")

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        return VictimAnswer(next(self._victims), "victim/any")


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(decisions, min_size=1, max_size=5),
    st.lists(indices, min_size=1, max_size=3),
    st.lists(st.integers(-2, 9), min_size=1, max_size=3),
    st.integers(-1, 5),
    st.integers(-1, 3),
)
def test_any_cycle_of_answers_serves_every_request(
    decided: list[Decision], orders: list[list[int]], victims: list[int], backlog: int, preemptions: int
) -> None:
    policy = Scripted(
        decided, orders, victims, decode_floor_ns=FLOOR_NS, backlog=backlog, preemptions=preemptions
    )
    server = hostile_server(policy, kv_tokens=512)
    expected = submit_crowd(server, count=5, every_ns=2 * MS)
    server.run_until(60 * S)
    assert_all_served(server, expected)


# --- splits and lanes ---


@pytest.mark.parametrize(
    "split",
    [Split(3, 5), Split(5, 5), Split(8, 1), Split(-2, 10), Split(HUGE, HUGE), Split(1, 1), Split(3, 0)],
)
def test_a_split_that_the_device_does_not_offer_is_never_used(split: Split) -> None:
    device = SimDevice(units=UNITS, layers=LAYERS, pages=65, costs=CHEAP, granularity=2)
    server = serve_crowd(Fixed(split=split, decode_floor_ns=FLOOR_NS), device=device)
    assert watched(server).state.counts["illegal splits"] > 0
    assert server.describe("arbiter")["split"] == {"decode": UNITS, "prefill": UNITS}


@pytest.mark.parametrize("backlog", [HUGE, 4, 0, -HUGE])
@pytest.mark.parametrize("fuse", [True, False])
def test_no_lane_holds_more_than_the_backlog_that_a_device_can_take_back(backlog: int, fuse: bool) -> None:
    policy = Fixed("muxwise", layers=1, tokens=7, fuse=fuse, backlog=backlog, decode_ahead=HUGE)
    assert watched(serve_crowd(policy, count=4)).most_in_lane <= BACKLOG_MAX


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("fuse", [True, False])
def test_any_number_of_layers_and_tokens_computes_every_prompt_once(number: int, fuse: bool) -> None:
    serve_crowd(Fixed("muxwise", layers=number, tokens=number, fuse=fuse), count=4)


# --- the decode floor ---


@pytest.mark.parametrize("layers", [1, HUGE])
def test_decode_is_held_no_longer_than_the_floor_under_endless_prompts(layers: int) -> None:
    policy = Fixed(split=Split(0, UNITS), fuse=False, layers=layers, decode_floor_ns=FLOOR_NS)
    server = hostile_server(policy, costs=SLOW_PREFILL)
    stream = {"prompt_token_ids": [65] * 30, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    server.submit(S, "stream", **stream)
    for index in range(400):
        prompt = [97 + index % 26, 97 + index // 26] * 100
        server.submit(S + (10 + index * 5) * MS, f"p{index}", prompt_token_ids=prompt, max_tokens=1)
    server.run_until(5 * S)
    outcome = server.outcome("stream")
    assert outcome.tokens == expected_tokens([65] * 30, 40)
    assert FLOOR_NS // 2 < watched(server).longest_hold_ns <= FLOOR_NS
    # A step that goes at the floor waits for the items on its units that were launched before: a backlog.
    prompt_ms = LAYERS * 200 * SLOW_PREFILL.prefill_token_ns / MS
    assert FLOOR_NS / MS < max(outcome.gaps_ms) < FLOOR_NS / MS + 2 * 1.5 * prompt_ms


def test_a_floor_of_years_is_cut_to_what_an_operator_can_wait_for() -> None:
    policy = Fixed(split=Split(0, UNITS), decode_floor_ns=HUGE * HUGE)
    server = hostile_server(policy)
    assert watched(server).state.limits.decode_floor_ns == 600 * S


# --- preemption ---


class AlwaysPreempts(Fixed):
    """The newest goes first, each batch is one request, and whoever runs is parked for it."""

    def __init__(self, **limits: int) -> None:
        super().__init__(layers=1, preempt=True, **limits)

    def form(self, view: FormView) -> FormAnswer:
        return FormAnswer(1, 1, "form/one")

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        newest = sorted(range(len(requests)), key=lambda index: -requests[index].arrival_ns)
        return OrderAnswer(tuple(newest), "order/newest")


def flood_one_long_prompt(policy: Policy, tokens: int = 600) -> VirtualServer:
    """A long prompt, and short ones without end that arrive faster than its layers pass."""
    server = hostile_server(policy, costs=SLOW_PREFILL)
    server.submit(S, "long", prompt_token_ids=[65] * tokens, max_tokens=2, temperature=0.0)
    for index in range(400):
        server.submit(S + (5 + index * 5) * MS, f"s{index}", prompt_token_ids=[66] * 8, max_tokens=1)
    server.run_until(30 * S)
    server.check_whole()
    assert server.outcome("long").tokens == expected_tokens([65] * tokens, 2, stop_at_end=True)
    return server


@pytest.mark.parametrize("preemptions", [0, 1, 3, -HUGE])
def test_a_batch_is_parked_no_more_often_than_the_limit_and_then_runs_to_its_end(preemptions: int) -> None:
    server = flood_one_long_prompt(AlwaysPreempts(preemptions=preemptions))
    arbiter = watched(server)
    assert arbiter.most_parkings == max(0, preemptions)
    assert arbiter.state.counts["preemptions over the limit"] > 0


def test_a_batch_whose_hidden_state_is_over_the_limit_is_not_parked() -> None:
    limit = 599 * 8192
    server = flood_one_long_prompt(AlwaysPreempts(parked_bytes=limit, preemptions=1000))
    arbiter = watched(server)
    assert arbiter.state.counts["preemptions over the limit of parked bytes"] > 0
    assert arbiter.most_parked_bytes < limit


def test_chunks_within_the_limit_are_parked_and_their_bytes_counted() -> None:
    policy = AlwaysPreempts(parked_bytes=64 * 8192, preemptions=5)
    policy.parts["tokens"] = 64
    arbiter = watched(flood_one_long_prompt(policy))
    assert arbiter.most_parked_bytes == 64 * 8192
    assert arbiter.state.counts["preemptions over the limit of parked bytes"] == 0


# --- progress ---


@pytest.mark.parametrize("split", [Split(0, 0), Split(0, UNITS), Split(UNITS, 0)])
@pytest.mark.parametrize("preempt", [True, False])
def test_a_policy_that_holds_everything_ends_every_request(split: Split, preempt: bool) -> None:
    policy = Fixed(split=split, preempt=preempt, fuse=False, layers=1, decode_floor_ns=FLOOR_NS)
    arbiter = watched(serve_crowd(policy))
    assert arbiter.longest_hold_ns <= FLOOR_NS


# --- the queue ---


class Answers(Like):
    """Its `order` and `victim` are functions of the number of requests."""

    def __init__(self, order: Callable[[int], Sequence[int]], victim: Callable[[int], int]) -> None:
        super().__init__("inflight")
        self._order, self._victim = order, victim

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        return OrderAnswer(tuple(self._order(len(requests))), "order/any")

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        return VictimAnswer(self._victim(len(requests)), "victim/any")


@pytest.mark.parametrize(
    ("order", "victim"),
    [
        (lambda count: [], lambda count: -1),
        (lambda count: [0] * count, lambda count: count),
        (lambda count: range(1, count + 1), lambda count: HUGE),
        (lambda count: range(-1, -count - 1, -1), lambda count: -HUGE),
        (lambda count: [count - 1], lambda count: -count),
        (lambda count: [*range(count), *range(count)], lambda count: count + 1),
    ],
    ids=["nobody", "one again and again", "one too far", "negative", "a part", "twice"],
)
def test_indices_that_name_nobody_or_somebody_twice_lose_nobody(
    order: Callable[[int], Sequence[int]], victim: Callable[[int], int]
) -> None:
    server = serve_crowd(Answers(order, victim), longer=40, kv_tokens=320)
    rules = server.describe("admission")["rules"]
    assert rules["rule error: order: the answer does not name each request once"] > 0
    assert server.describe("decode")["recomputes"] > 0
    assert (
        server.describe("decode")["rules"]["rule error: victim: the answer is no index of the requests"] > 0
    )


@pytest.mark.parametrize("bound", [5, 0, -HUGE])
def test_the_queue_stays_within_its_bound_whatever_is_accepted(bound: int) -> None:
    policy = Like("inflight", queue_bound=bound)
    policy.admit = lambda view: msgspec.structs.replace(policy.base.admit(view), action="accept")  # type: ignore[method-assign]
    server = hostile_server(policy, costs=SLOW_PREFILL)
    longest = 0
    for index in range(40):
        server.submit(S + index * MS, f"r{index}", prompt_token_ids=[65 + index] * 200, max_tokens=2)
    for step in range(200):
        server.run_until(S + step * MS)
        longest = max(longest, server.describe("admission")["waiting"])
    server.run_until(60 * S)
    assert longest == max(1, bound)
    codes = [server.outcome(f"r{index}").terminal[0] for index in range(40)]
    refused = [end for end in codes if isinstance(end, wire.Failed)]
    assert refused
    assert {end.code for end in refused} == {"overloaded"}
    server.check_whole()
