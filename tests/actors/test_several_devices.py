"""Several devices in one server: requests end once, with their own tokens, wherever their KV went."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cluster import RandomPlaces, cluster_server, gpu_tokens, prompt_of
from muxk.actors import protocol as wire
from muxk.kernel.actor import Ref
from muxk.kernel.messages import PrefillDone
from muxk.kernel.placing import Assign, Grow, PlaceAnswer, PlaceView, Shrink
from muxk.policies.engine import load_policy
from muxk.policies.shipped_files import shipped_text
from virtual_server import MS, S, VirtualServer

Asked = dict[str, tuple[list[int], int]]
"""Prompt and number of tokens, by name."""


def submit_many(server: VirtualServer, count: int, seed: int, outputs: int = 60) -> Asked:
    """Requests with short and long prompts, some with a shared beginning; what each asked for."""
    draw = random.Random(seed)
    shared = prompt_of(96, 7)
    asked = {}
    for index in range(count):
        prompt = shared[: draw.choice([0, 0, 32, 96])] + prompt_of(draw.randrange(1, 400), 1000 + index)
        tokens = draw.randrange(1, outputs)
        name = f"r{index}"
        server.submit(
            S + draw.randrange(800) * MS,
            name,
            prompt_token_ids=prompt,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0,
        )
        asked[name] = (prompt, tokens)
    return asked


def check_tokens(server: VirtualServer, asked: Asked) -> None:
    for name, (prompt, count) in asked.items():
        outcome = server.outcome(name)
        assert len(outcome.terminal) == 1, name
        assert outcome.tokens == gpu_tokens(prompt, count), name


@pytest.mark.parametrize("policy", ["splitwise", "muxwise"])
def test_tokens_are_those_of_one_device(policy: str) -> None:
    server = cluster_server(policy, devices=2)
    asked = submit_many(server, 24, seed=3)
    server.run_until(60 * S)
    check_tokens(server, asked)
    server.check_whole()


def test_kv_migrates_from_the_device_of_the_prompt_to_the_one_that_decodes() -> None:
    server = cluster_server("splitwise", devices=2)
    prompt = prompt_of(300, 1)
    server.submit(S, "one", prompt_token_ids=prompt, max_tokens=20, ignore_eos=True, temperature=0.0)
    server.run_until(20 * S)
    assert server.outcome("one").tokens == gpu_tokens(prompt, 20)
    assert server.describe("decode@0")["steps"] == 0
    assert server.describe("decode@1")["steps"] == 19
    assert server.describe("migration")["pages"] == 19


def test_sampling_choices_stops_and_log_probabilities_do_not_change_when_kv_moves() -> None:
    outcomes = []
    for policy in ("splitwise", "muxwise"):
        server = cluster_server(policy, devices=2)
        for index in range(4):
            server.submit(
                S + index * MS,
                f"r{index}",
                prompt_token_ids=prompt_of(60, index),
                max_tokens=30,
                temperature=0.8,
                seed=index,
                n=2,
                logprobs=1,
                stop=["e"] if index % 2 else [],
                min_tokens=3,
                presence_penalty=0.5,
            )
        server.run_until(20 * S)
        server.check_whole()
        outcomes.append([server.outcome(f"r{index}") for index in range(4)])
    for moved, stayed in zip(*outcomes, strict=True):
        assert moved.choice_tokens == stayed.choice_tokens
        assert moved.choice_texts == stayed.choice_texts
        assert moved.logprobs == stayed.logprobs
        assert moved.terminal == stayed.terminal


class Lends(RandomPlaces):
    """Gives device 1 to group 0, once, and sends all requests there."""

    lent = False

    def place(self, view: PlaceView) -> PlaceAnswer:
        actions: list[Assign | Grow] = []
        if not self.lent:
            self.lent = True
            actions.append(Grow(0, (1,)))
        elif view.queue and view.groups[0].devices:
            actions.append(Assign(tuple(request.request_id for request in view.queue), 0))
        return PlaceAnswer(tuple(actions))


def lent_out() -> VirtualServer:
    """A server whose device 1 works in the group of device 0, with a request that decodes there."""
    server = cluster_server(Lends(1), devices=2)
    server.submit(
        S, "it", prompt_token_ids=prompt_of(60, 1), max_tokens=200, ignore_eos=True, temperature=0.0
    )
    server.run_until(S + 300 * MS)
    assert devices_of(server) == [[0, 1], []]
    assert widths_of(server) == [2, 1]
    return server


def devices_of(server: VirtualServer) -> list[list[int]]:
    return [group["devices"] for group in server.describe("placement")["groups"]]


def widths_of(server: VirtualServer) -> list[int]:
    assert server.backend.cluster is not None
    return [device.width for device in server.backend.cluster.elastic]


@pytest.mark.parametrize("policy", ["splitwise", "muxwise", "loongserve"])
def test_devices_that_were_lent_come_back_when_another_policy_comes_into_force(policy: str) -> None:
    server = lent_out()
    server.swap(S + 301 * MS, load_policy(policy))
    later = prompt_of(50, 2)
    server.submit(2 * S, "late", prompt_token_ids=later, max_tokens=9, ignore_eos=True, temperature=0.0)
    server.run_until(20 * S)
    assert server.outcome("it").tokens == gpu_tokens(prompt_of(60, 1), 200)
    assert server.outcome("late").tokens == gpu_tokens(later, 9)
    assert (devices_of(server), widths_of(server)) == ([[0], [1]], [1, 1])
    server.check_whole()


def test_after_a_crash_devices_that_were_lent_work_alone_again() -> None:
    server = lent_out()
    victim: Ref[Any] = Ref("prefill@1")
    server.runtime.inject(victim, PrefillDone(999, b"", 0, False), S + 301 * MS)
    server.run_until(S + 301 * MS)
    assert server.backend.cluster is not None
    [failed] = server.outcome("it").terminal
    assert isinstance(failed, wire.Failed)
    assert widths_of(server) == [1, 1]


def test_a_request_that_fits_no_pool_is_refused_while_all_others_wait() -> None:
    server = cluster_server("loongserve", devices=2, kv_tokens=480)
    for index in range(6):
        prompt = prompt_of(300, index)
        server.submit(S, f"r{index}", prompt_token_ids=prompt, max_tokens=100, ignore_eos=True)
    server.submit(S, "huge", prompt="a" * 961, max_tokens=1)
    server.run_until(S + MS)
    [end] = server.outcome("huge").terminal
    assert isinstance(end, wire.Failed)
    assert end.code == "never_fits"
    server.run_until(60 * S)
    server.check_whole()


def test_an_answer_without_a_limit_is_promised_the_room_that_it_may_take() -> None:
    server = cluster_server("splitwise", devices=2, kv_tokens=1600)
    server.submit(S, "open", prompt_token_ids=prompt_of(100, 1), ignore_eos=True, temperature=0.0)
    server.run_until(S + 100 * MS)
    groups = server.describe("placement")["groups"]
    assert groups[1]["promised_pages"] >= 1600 // 16


@pytest.mark.parametrize("seed", range(2))
def test_no_answer_of_a_policy_loses_pages_requests_or_tokens(seed: int) -> None:
    """Devices come and go, requests move, pools are small, clients abort, events are shuffled."""
    draw = random.Random(seed)
    devices = draw.choice([2, 3, 4])
    server = cluster_server(
        RandomPlaces(seed), devices=devices, kv_tokens=draw.choice([720, 1600]), seed=seed, jitter=True
    )
    asked = submit_many(server, 25, seed=seed, outputs=100)
    aborted = [name for name in asked if draw.random() < 0.2]
    for name in aborted:
        server.abort(S + draw.randrange(1500) * MS, name)
    server.run_until(300 * S)
    check_tokens(server, {name: what for name, what in asked.items() if name not in aborted})
    for name in aborted:
        assert len(server.outcome(name).terminal) == 1
    server.check_whole()


# --- contexts that are longer than one pool ---

LONG = prompt_of(700, 5)
"""With its answer it takes one and a half pools of 480 tokens."""


def submit_long(server: VirtualServer, at_ns: int, name: str, tokens: int = 20) -> None:
    server.submit(at_ns, name, prompt_token_ids=LONG, max_tokens=tokens, ignore_eos=True, temperature=0.0)


def test_a_context_of_one_and_a_half_pools_is_served_by_a_group_and_its_devices_come_free() -> None:
    server = cluster_server("loongserve", devices=3, kv_tokens=480)
    submit_long(server, S, "long")
    beside = prompt_of(100, 6)
    server.submit(S, "short", prompt_token_ids=beside, max_tokens=60, ignore_eos=True, temperature=0.0)
    server.run_until(20 * S)
    check_tokens(server, {"long": (LONG, 20), "short": (beside, 60)})
    assert devices_of(server) == [[0], [1], [2]]
    server.check_whole()


@pytest.mark.parametrize("policy", ["splitwise", "muxwise"])
def test_it_is_refused_where_each_device_works_alone_and_told_what_would_take_it(policy: str) -> None:
    server = cluster_server(policy, devices=3, kv_tokens=480)
    submit_long(server, S, "long")
    server.run_until(2 * S)
    [end] = server.outcome("long").terminal
    assert isinstance(end, wire.Failed)
    assert end.code == "never_fits"
    assert f"exceeds the limit of 480 under the policy {policy}" in end.message
    assert "as loongserve does, takes up to 1440" in end.message


def test_on_one_device_it_is_refused_with_the_limit() -> None:
    server = VirtualServer("muxwise", kv_tokens=480, calibrate=False)
    submit_long(server, S, "long")
    server.run_until(2 * S)
    [end] = server.outcome("long").terminal
    assert isinstance(end, wire.Failed)
    assert "exceeds the limit of 480" in end.message


def test_the_limit_that_clients_are_told_is_that_of_the_policy_in_force() -> None:
    server = cluster_server("loongserve", devices=3, kv_tokens=480)
    server.send(S, wire.Hello(wire.PROTOCOL_VERSION))
    server.send(2 * S, wire.SwapPolicy(shipped_text("splitwise"), "splitwise.yaml"))
    server.send(3 * S, wire.Hello(wire.PROTOCOL_VERSION))
    server.run_until(4 * S)
    told = [event.max_context_tokens for _, _, event in server.events if isinstance(event, wire.Welcome)]
    assert told == [1440, 480]


def test_an_answer_without_a_limit_gets_the_pools_that_its_prompt_needs() -> None:
    server = cluster_server("loongserve", devices=3, kv_tokens=480)
    for length in (100, 500):
        server.submit(S, f"open{length}", prompt_token_ids=prompt_of(length, 1), ignore_eos=True)
    server.run_until(60 * S)
    assert [len(server.outcome(f"open{length}").tokens) for length in (100, 500)] == [380, 460]


def test_a_long_context_that_decodes_keeps_its_devices_under_a_policy_that_lends_none() -> None:
    server = cluster_server("loongserve", devices=3, kv_tokens=480)
    submit_long(server, S, "long", 200)
    server.run_until(S + 700 * MS)
    assert len(server.outcome("long").tokens) > 1
    server.swap(S + 701 * MS, load_policy("muxwise"))
    server.run_until(2 * S)
    assert sorted(map(len, devices_of(server))) == [0, 1, 2]
    submit_long(server, 2 * S, "late")
    server.run_until(20 * S)
    assert server.outcome("long").tokens == gpu_tokens(LONG, 200)
    assert isinstance(server.outcome("late").terminal[0], wire.Failed)
    assert (devices_of(server), widths_of(server)) == ([[0], [1], [2]], [1, 1, 1])
    server.check_whole()


def test_a_long_context_that_waits_for_devices_is_refused_when_no_policy_will_lend_them() -> None:
    server = cluster_server("loongserve", devices=2, kv_tokens=480)
    submit_long(server, S, "first", 200)
    submit_long(server, S + MS, "second", 200)
    server.run_until(S + 400 * MS)
    assert server.describe("placement")["waiting"] == 1
    server.swap(S + 401 * MS, load_policy("splitwise"))
    server.run_until(20 * S)
    assert server.outcome("first").tokens == gpu_tokens(LONG, 200)
    [end] = server.outcome("second").terminal
    assert isinstance(end, wire.Failed)
    assert end.code == "never_fits"
    server.check_whole()


class Misplaces(RandomPlaces):
    """Sends everything to device 0 alone, and takes from its group all that it can."""

    def place(self, view: PlaceView) -> PlaceAnswer:
        actions: list[Assign | Shrink] = [Shrink(0, (1, 2))]
        actions += [Assign((request.request_id,), 0) for request in view.queue]
        return PlaceAnswer(tuple(actions))


def test_no_policy_sends_a_context_where_it_never_fits_or_takes_the_pages_that_it_needs() -> None:
    server = cluster_server(Misplaces(1), devices=3, kv_tokens=480)
    submit_long(server, S, "long", 100)
    server.run_until(20 * S)
    assert server.outcome("long").tokens == gpu_tokens(LONG, 100)
    assert server.describe("placement")["counts"]["forced placements"] == 1
    server.check_whole()


class LendsTheTarget(RandomPlaces):
    """Has a prompt computed by the very device that is to decode it, as another one's helper."""

    def place(self, view: PlaceView) -> PlaceAnswer:
        return PlaceAnswer(tuple(Assign((one.request_id,), 0, (1,), decode=1) for one in view.queue))


def test_a_request_never_waits_for_pages_of_a_device_that_was_lent_to_where_it_is() -> None:
    server = cluster_server(LendsTheTarget(1), devices=2, kv_tokens=480)
    prompt = prompt_of(300, 3)
    server.submit(S, "it", prompt_token_ids=prompt, max_tokens=20, ignore_eos=True, temperature=0.0)
    server.run_until(20 * S)
    check_tokens(server, {"it": (prompt, 20)})
    server.check_whole()


class NewestFirst(RandomPlaces):
    """When three wait it places the last of them, one an answer; it notes what it is told of the others."""

    def __init__(self) -> None:
        super().__init__(1)
        self.told: list[int] = []
        self.begun = False

    def place(self, view: PlaceView) -> PlaceAnswer:
        self.told.append(view.overtaken)
        self.begun = self.begun or view.waiting == 3
        chosen = view.queue[-1:] if self.begun else ()
        return PlaceAnswer(tuple(Assign((one.request_id,), 0) for one in chosen))


def test_a_plan_is_told_how_often_in_a_row_requests_were_overtaken() -> None:
    policy = NewestFirst()
    server = cluster_server(policy, devices=2)
    # One decodes meanwhile: on an idle server nobody may be kept waiting.
    policy.begun = True
    server.submit(S, "a", prompt_token_ids=prompt_of(20, 1), max_tokens=200, ignore_eos=True)
    server.run_until(S + 100 * MS)
    policy.begun = False
    for name in "bcd":
        server.submit(S + 101 * MS, name, prompt_token_ids=prompt_of(20, 1), max_tokens=2, ignore_eos=True)
    server.run_until(10 * S)
    assert list(dict.fromkeys(policy.told)) == [0, 1, 2]
    assert policy.told[-1] == 0
