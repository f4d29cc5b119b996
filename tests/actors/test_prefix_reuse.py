"""Prompts that begin alike share pages: over turns of a conversation, and within one prefill batch."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_server import MS, S, VirtualServer, expected_tokens

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
POLICIES = ["muxwise", "chunked", "inflight"]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_turn_of_a_conversation_computes_only_what_is_new(policy: str) -> None:
    server = VirtualServer(policy, kv_tokens=8192)
    history = [65 + i % 26 for i in range(200)]
    for turn in range(4):
        name = f"turn{turn}"
        server.submit((20 + 5 * turn) * S, name, prompt_token_ids=history, max_tokens=50, **GREEDY)
        server.run_until((24 + 5 * turn) * S)
        answer = server.outcome(name).tokens
        assert answer == expected_tokens(history, 50)
        [finished] = server.outcome(name).terminal
        # Everything of the turn before but its last token, in whole pages.
        known = 0 if turn == 0 else (len(history) - 20 - 1) // 16 * 16
        assert finished.cached_tokens == known
        history = history + answer + [66] * 20


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_one_batch_share_a_prefix_that_none_of_them_has_computed_yet(policy: str) -> None:
    server = VirtualServer(policy, kv_tokens=8192, layers=8)
    shared = [65 + i % 26 for i in range(64)]
    prompts = {f"r{index}": shared + [97 + index] * 5 for index in range(6)}
    server.submit(20 * S, "first", prompt_token_ids=[70] * 900, max_tokens=2, **GREEDY)
    for name, prompt in prompts.items():
        server.submit(20 * S + MS, name, prompt_token_ids=prompt, max_tokens=20, **GREEDY)
    server.run_until(30 * S)
    for name, prompt in prompts.items():
        assert server.outcome(name).tokens == expected_tokens(prompt, 20)
    cached = [server.outcome(name).terminal[0].cached_tokens for name in prompts]
    assert sorted(cached)[1:] == [64] * 5
    server.check_whole()


@pytest.mark.parametrize("seed", range(4))
def test_the_one_that_computes_a_shared_prefix_may_be_aborted(seed: int) -> None:
    server = VirtualServer("muxwise", kv_tokens=4096, layers=8, seed=seed, jitter=True)
    shared = [65 + i % 26 for i in range(640)]
    for index in range(4):
        server.submit(20 * S, f"r{index}", prompt_token_ids=[*shared, 97 + index], max_tokens=30, **GREEDY)
    for index in (0, 2):
        server.abort(20 * S + (3 + 4 * seed) * MS, f"r{index}")
    server.run_until(30 * S)
    for index in (1, 3):
        assert server.outcome(f"r{index}").tokens == expected_tokens([*shared, 97 + index], 30)
    server.check_whole()
