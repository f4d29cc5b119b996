"""Requests from submission to their one terminal event, in virtual time."""

from __future__ import annotations

import pytest
from muxk.actors import protocol as wire
from virtual_server import MS, S, VirtualServer, expected_tokens

POLICIES = ["muxwise", "inflight", "chunked", "temporal", "static_split"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_its_tokens_and_one_terminal_event(policy: str) -> None:
    server = VirtualServer(policy)
    prompts = {f"r{i}": [97 + (i * 7 + j) % 26 for j in range(1 + i * 23)] for i in range(12)}
    for i, (name, prompt) in enumerate(prompts.items()):
        server.submit(
            2 * S + i * MS, name, prompt_token_ids=prompt, max_tokens=20, ignore_eos=True, temperature=0
        )
    server.run_until(20 * S)
    for name, prompt in prompts.items():
        outcome = server.outcome(name)
        assert outcome.tokens == expected_tokens(prompt, 20)
        assert outcome.accepted == 1
        [finished] = outcome.terminal
        assert (finished.finish_reason, finished.prompt_tokens, finished.completion_tokens) == (
            "length",
            len(prompt),
            20,
        )
    server.check_whole()


def test_a_seed_gives_the_same_text_under_every_policy_and_in_any_company() -> None:
    seen = set()
    for policy in POLICIES:
        for company in (0, 9):
            server = VirtualServer(policy)
            for i in range(company):
                server.submit(2 * S, f"other{i}", prompt_token_ids=[100 + i] * 30, max_tokens=40, seed=i)
            server.submit(2 * S, "it", prompt_token_ids=[65] * 50, max_tokens=30, seed=7, ignore_eos=True)
            server.run_until(20 * S)
            seen.add(server.outcome("it").text)
    assert len(seen) == 1
    assert len(seen.pop()) == 30


def test_an_end_token_stops_a_request_unless_it_is_ignored() -> None:
    # The simulated model says the end token about once in 509 tokens: look for a prompt where it does early.
    prompt = next(
        [97 + i % 26, 97 + i // 26 % 26, 97 + i // 676]
        for i in range(5000)
        if len(expected_tokens([97 + i % 26, 97 + i // 26 % 26, 97 + i // 676], 20, stop_at_end=True)) < 20
    )
    stopped_at = len(expected_tokens(prompt, 20, stop_at_end=True))
    server = VirtualServer()
    server.submit(2 * S, "stops", prompt_token_ids=prompt, max_tokens=20, temperature=0)
    server.submit(2 * S, "goes on", prompt_token_ids=prompt, max_tokens=20, temperature=0, ignore_eos=True)
    server.run_until(10 * S)
    assert len(server.outcome("stops").tokens) == stopped_at
    assert server.outcome("stops").terminal[0].finish_reason == "stop"
    assert len(server.outcome("goes on").tokens) == 20
    server.check_whole()


def test_a_stop_string_ends_the_text_before_it_even_across_tokens() -> None:
    prompt = [65] * 30
    text = bytes(token for token in expected_tokens(prompt, 40) if token < 256).decode()
    stop = text[10:14]
    server = VirtualServer()
    server.submit(
        2 * S, "it", prompt_token_ids=prompt, max_tokens=40, temperature=0, stop=stop, ignore_eos=True
    )
    server.run_until(10 * S)
    outcome = server.outcome("it")
    assert outcome.text == text[: text.index(stop)]
    [finished] = outcome.terminal
    assert (finished.finish_reason, finished.stop_reason) == ("stop", stop)
    server.check_whole()


def test_a_shared_prompt_is_reused_and_gives_the_same_tokens() -> None:
    prompt = [97 + i % 26 for i in range(100)]
    server = VirtualServer()
    server.submit(2 * S, "first", prompt_token_ids=prompt, max_tokens=10, temperature=0, ignore_eos=True)
    server.submit(3 * S, "second", prompt_token_ids=prompt, max_tokens=10, temperature=0, ignore_eos=True)
    longer = prompt + expected_tokens(prompt, 10) + [65, 66]
    server.submit(4 * S, "next turn", prompt_token_ids=longer, max_tokens=10, temperature=0, ignore_eos=True)
    server.run_until(10 * S)
    assert server.outcome("first").terminal[0].cached_tokens == 0
    assert server.outcome("second").terminal[0].cached_tokens == 96
    assert server.outcome("next turn").terminal[0].cached_tokens == 96
    assert server.outcome("second").tokens == server.outcome("first").tokens == expected_tokens(prompt, 10)
    assert server.outcome("next turn").tokens == expected_tokens(longer, 10)
    server.check_whole()


def test_a_prompt_of_text_is_tokenised_and_a_conversation_uses_the_template() -> None:
    server = VirtualServer()
    server.submit(2 * S, "text", prompt="hello", max_tokens=3, temperature=0)
    server.submit(2 * S, "chat", messages=[wire.ChatMessage("user", "hello")], max_tokens=3, temperature=0)
    server.run_until(5 * S)
    assert server.outcome("text").terminal[0].prompt_tokens == 5
    assert server.outcome("text").tokens == expected_tokens(list(b"hello"), 3)
    assert server.outcome("chat").terminal[0].completion_tokens == 3


def test_max_tokens_of_one_ends_with_the_prefill() -> None:
    server = VirtualServer()
    server.submit(2 * S, "one", prompt_token_ids=[65] * 40, max_tokens=1, temperature=0)
    server.submit(2 * S, "two", prompt_token_ids=[66] * 40, max_tokens=5, temperature=0, ignore_eos=True)
    server.run_until(5 * S)
    assert server.outcome("one").tokens == expected_tokens([65] * 40, 1)
    assert server.outcome("two").tokens == expected_tokens([66] * 40, 5)
    server.check_whole()


def test_without_max_tokens_the_room_left_in_the_context_is_used() -> None:
    server = VirtualServer(kv_tokens=128)
    server.submit(2 * S, "it", prompt_token_ids=[65] * 40, temperature=0, ignore_eos=True)
    server.run_until(20 * S)
    [finished] = server.outcome("it").terminal
    assert (finished.finish_reason, finished.completion_tokens) == ("length", 88)
    server.check_whole()


def test_a_policy_swap_in_mid_stream_changes_no_token_and_takes_effect() -> None:
    source = """
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {name: swapped}
spec:
  split:
    - {name: when-prefilling, when: prefill.pending, then: {prefill: all}}
    - {name: else, then: {decode: all}}
"""
    server = VirtualServer("muxwise")
    server.submit(2 * S, "it", prompt_token_ids=[65] * 40, max_tokens=200, temperature=0, ignore_eos=True)
    server.send(2 * S + 300 * MS, wire.SwapPolicy(source, "swapped.yaml", ticket=5))
    server.run_until(10 * S)
    answers = [event for _, _, event in server.events if isinstance(event, wire.PolicySwapped)]
    assert [(answer.accepted, answer.name, answer.ticket) for answer in answers] == [(True, "swapped", 5)]
    assert server.outcome("it").tokens == expected_tokens([65] * 40, 200)
    assert server.describe("arbiter")["counts"]["split/else"] > 100
    server.check_whole()


def test_a_bad_policy_is_refused_with_its_place_and_the_old_one_goes_on() -> None:
    server = VirtualServer("muxwise")
    server.send(2 * S, wire.SwapPolicy("spec:\n  splitt: []\n", "bad.yaml"))
    server.submit(3 * S, "it", prompt_token_ids=[65] * 40, max_tokens=5, temperature=0, ignore_eos=True)
    server.run_until(10 * S)
    [answer] = [event for _, _, event in server.events if isinstance(event, wire.PolicySwapped)]
    assert not answer.accepted
    assert "bad.yaml:2:3" in answer.report
    assert server.describe("arbiter")["policy"] == "muxwise"
    assert server.outcome("it").tokens == expected_tokens([65] * 40, 5)


def test_draining_finishes_what_is_accepted_refuses_the_rest_and_stops() -> None:
    server = VirtualServer()
    server.submit(2 * S, "old", prompt_token_ids=[65] * 40, max_tokens=50, temperature=0, ignore_eos=True)
    server.send(2 * S + 100 * MS, wire.Drain())
    server.submit(2 * S + 150 * MS, "new", prompt_token_ids=[65] * 40, max_tokens=5)
    server.run_until(20 * S)
    assert server.outcome("old").tokens == expected_tokens([65] * 40, 50)
    [failed] = server.outcome("new").terminal
    assert failed.code == "draining"
    assert server.runtime.stop_reason == "drained"
