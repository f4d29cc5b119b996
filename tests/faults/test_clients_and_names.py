"""Names of requests, many clients at once, a drain in the middle of it, and fields that a policy ignores."""

from __future__ import annotations

from typing import Any

import pytest
from muxk.actors import protocol as wire
from virtual_server import MS, S, VirtualServer, expected_tokens

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def test_one_name_from_forty_clients_at_one_moment_is_forty_requests_with_forty_answers() -> None:
    server = VirtualServer(calibrate=False, jitter=True)
    prompts = {b"c%d" % index: [97 + index % 26] * (1 + index) for index in range(40)}
    for peer, prompt in prompts.items():
        server.submit(2 * S, "chatcmpl-1", peer, prompt_token_ids=prompt, max_tokens=5, **GREEDY)
    server.abort(2 * S + 5 * MS, "chatcmpl-1", b"c39")
    server.run_until(5 * S)
    for peer, prompt in prompts.items():
        outcome = server.outcome("chatcmpl-1", peer)
        assert len(outcome.terminal) == 1
        assert outcome.accepted == 1
        if peer != b"c39":
            assert outcome.tokens == expected_tokens(prompt, 5)
    shown = server.describe("gateway")
    assert (shown["accepted"], shown["finished"], shown["aborts"]) == (40, 39, 1)
    server.check_whole()


@pytest.mark.parametrize("first", ["text", "tokens"])
def test_a_name_that_is_used_twice_at_any_moment_is_one_request_with_one_answer(first: str) -> None:
    for after_ms in (0, 1, 7, 20, 90):  # tokenised or queued, prefilled, decoded
        server = VirtualServer(calibrate=False)
        prompts: dict[str, Any] = {"text": {"prompt": "A" * 300}, "tokens": {"prompt_token_ids": [65] * 300}}
        server.submit(2 * S, "same", max_tokens=20, **prompts[first], **GREEDY)
        for _ in range(3):
            at_ns = 2 * S + after_ms * MS
            server.submit(at_ns, "same", prompt_token_ids=[66] * 10, max_tokens=20, **GREEDY)
        server.run_until(5 * S)
        assert server.outcome("same").tokens == expected_tokens([65] * 300, 20)
        assert len(server.outcome("same").terminal) == 1
        duplicates = [event for _, _, event in server.events if isinstance(event, wire.DuplicateRequest)]
        assert len(duplicates) == 3
        assert server.describe("gateway")["accepted"] == 1
        server.check_whole()


def test_a_hundred_and_twenty_texts_and_chats_of_all_sizes_at_once_are_all_read_and_answered() -> None:
    server = VirtualServer(calibrate=False, kv_tokens=16_384)
    for index in range(120):
        text = chr(97 + index % 26) * (1 + index * 37 % 300)
        given: dict[str, Any] = {"prompt": text}
        if index % 2:
            given = {"messages": [wire.ChatMessage("user", text)]}
        server.submit(2 * S, f"r{index}", b"c%d" % (index % 9), max_tokens=2, **given, **GREEDY)
    server.run_until(60 * S)
    for index in range(120):
        text = chr(97 + index % 26) * (1 + index * 37 % 300)
        read = f"user: {text}\nassistant: " if index % 2 else text
        outcome = server.outcome(f"r{index}", b"c%d" % (index % 9))
        assert outcome.tokens == expected_tokens(list(read.encode()), 2)
    server.check_whole()


@pytest.mark.parametrize("policy", ["muxwise", "chunked"])
def test_a_drain_lets_every_stream_end_whatever_it_does_at_the_moment(policy: str) -> None:
    server = VirtualServer(policy, calibrate=False, kv_tokens=800)
    prompts = {f"r{index}": chr(97 + index) * (5 + 9 * index) for index in range(20)}
    for index, (name, prompt) in enumerate(prompts.items()):
        at_ns = 2 * S + index * 15 * MS
        server.submit(at_ns, name, prompt=prompt, max_tokens=30, **GREEDY)
    drain_ns = 2 * S + 19 * 15 * MS
    server.send(drain_ns, wire.Drain(), b"operator")
    server.submit(drain_ns + MS, "late", b"other", prompt="x", max_tokens=1)
    server.run_until(30 * S)
    for name, prompt in prompts.items():
        assert server.outcome(name).tokens == expected_tokens(list(prompt.encode()), 30)
        assert len(server.outcome(name).terminal) == 1
    [refused] = server.outcome("late", b"other").terminal
    assert refused.code == "draining"
    assert server.runtime.stop_reason == "drained"
    told = [type(event) for _, peer, event in server.events if peer == b"client"]
    assert told.count(wire.Draining) == 1


@pytest.mark.parametrize("policy", ["muxwise", "chunked", "temporal", "inflight", "static_split"])
def test_a_priority_that_no_rule_looks_at_is_noted_by_name_and_zero_is_not(policy: str) -> None:
    server = VirtualServer(policy, calibrate=False)
    for name, priority in (("noted", 5), ("plain", 0)):
        server.submit(2 * S, name, prompt="x", max_tokens=1, priority=priority)
    server.run_until(3 * S)
    assert server.outcome("noted").notes == (
        f"priority has no effect: no rule of the policy {policy} looks at it",
    )
    assert server.outcome("plain").notes == ()


def test_a_priority_has_its_effect_and_no_note_as_soon_as_a_policy_that_reads_it_is_in_force() -> None:
    source = (
        "{apiVersion: muxk/v1alpha1, kind: SchedulingPolicy, metadata: {name: urgent-first}, "
        "spec: {extends: inflight, order: {by: request.priority}, form: {requests: 1, tokens: 4096}}}"
    )
    server = VirtualServer("inflight", calibrate=False)
    server.send(1 * S, wire.SwapPolicy(source, "urgent.yaml"))
    server.submit(2 * S, "running", prompt_token_ids=[65] * 900, max_tokens=2, **GREEDY)
    for index, (name, priority) in enumerate((("later", 7), ("middle", 0), ("sooner", -7))):
        prompt = [66 + index] * 50
        server.submit(2 * S + MS, name, prompt_token_ids=prompt, max_tokens=1, priority=priority, **GREEDY)
    server.run_until(5 * S)
    assert server.describe("arbiter")["policy"] == "urgent-first"
    names = ["sooner", "middle", "later"]
    firsts = [server.outcome(name).times_ns[0] for name in names]
    assert firsts == sorted(firsts)
    assert len(set(firsts)) == 3
    assert [server.outcome(name).notes for name in names] == [(), (), ()]
