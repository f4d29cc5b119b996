"""A prefix hit changes nothing but the time, however histories grow, shrink and are edited meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
from virtual_server import MS, S, VirtualServer, expected_tokens

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PAGE = 16
PREFIX = [97 + i * 5 % 26 for i in range(4 * PAGE)]


@pytest.mark.parametrize("policy", ["muxwise", "chunked", "inflight"])
def test_any_length_of_what_is_left_after_a_hit_has_its_answer(policy: str) -> None:
    server = VirtualServer(policy, calibrate=False)
    server.submit(2 * S, "first", prompt_token_ids=PREFIX, max_tokens=20, **GREEDY)
    server.run_until(3 * S)
    known = PREFIX + server.outcome("first").tokens
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1, 5 * PAGE, len(known)]
    prompts = [known[:length] for length in lengths]
    prompts += [[*known, *[98 + more] * more] for more in (1, 15, 16, 17)]
    for index, prompt in enumerate(prompts):
        at_ns = (4 + index) * S
        server.submit(at_ns, f"r{index}", prompt_token_ids=prompt, max_tokens=6, **GREEDY)
        server.run_until(at_ns + S - 1)
        outcome = server.outcome(f"r{index}")
        assert outcome.tokens == expected_tokens(prompt, 6)
        # Whole pages of what was computed, and one token at least is computed anew.
        computed = min(len(prompt) - 1, len(known) - 1)
        assert outcome.terminal[0].cached_tokens == computed // PAGE * PAGE
    server.check_whole()


@pytest.mark.parametrize("order", ["hit first", "report first"])
def test_a_report_on_a_prompt_that_is_cached_is_of_a_whole_computation_and_a_hit_after_it_is_one(
    order: str,
) -> None:
    server = VirtualServer(calibrate=False)
    plain: dict[str, Any] = {"prompt_token_ids": [*PREFIX, 98], "max_tokens": 5, **GREEDY}
    reports = plain | {"echo": True, "logprobs": 1}
    first, second = (plain, reports) if order == "hit first" else (reports, plain)
    server.submit(2 * S, "first", **first)
    server.submit(3 * S, "second", **second)
    server.submit(4 * S, "third", **reports)
    server.run_until(6 * S)
    cached = [server.outcome(name).terminal[0].cached_tokens for name in ("first", "second", "third")]
    assert cached == ([0, 0, 0] if order == "hit first" else [0, 4 * PAGE, 0])
    for name in ("first", "second", "third"):
        assert server.outcome(name).tokens == expected_tokens([*PREFIX, 98], 5)
    for name in ("second" if order == "hit first" else "first", "third"):
        prompt = server.outcome(name).prompt
        assert prompt is not None
        assert list(prompt.token_ids) == [*PREFIX, 98]
    server.check_whole()


def edited(draw: random.Random, history: list[int]) -> list[int]:
    """What a client may send next: more, less, something else in the middle, another beginning."""
    kind = draw.choice(["more", "less", "middle", "beginning", "same"])
    fresh = [97 + draw.randrange(26) for _ in range(draw.randrange(1, 30))]
    if kind == "more" or not history:
        return history + fresh
    at = draw.randrange(len(history))
    if kind == "less":
        return history[: at + 1]
    if kind == "middle":
        return [*history[:at], 97 + draw.randrange(26), *history[at + 1 :]]
    return fresh + history if kind == "beginning" else list(history)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["muxwise", "chunked"])
def test_histories_that_are_edited_under_eviction_say_what_they_say_without_a_cache(
    policy: str, seed: int
) -> None:
    draw = random.Random(seed)
    server = VirtualServer(policy, kv_tokens=512, calibrate=False, seed=seed, jitter=True)
    histories: list[list[int]] = [[] for _ in range(4)]
    at_ns = 2 * S
    hits = 0
    for turn in range(8):
        prompts = [edited(draw, history)[-200:] for history in histories]
        for index, prompt in enumerate(prompts):
            sent_ns = at_ns + draw.randrange(20) * MS
            server.submit(sent_ns, f"r{turn}/{index}", prompt_token_ids=prompt, max_tokens=12, **GREEDY)
        at_ns += S
        server.run_until(at_ns)
        for index, prompt in enumerate(prompts):
            outcome = server.outcome(f"r{turn}/{index}")
            assert outcome.tokens == expected_tokens(prompt, 12)
            hits += outcome.terminal[0].cached_tokens > 0
            histories[index] = prompt + outcome.tokens
    assert hits > 3
    server.check_whole()


def test_nothing_of_an_aborted_prompt_is_taken_for_computed() -> None:
    server = VirtualServer(calibrate=False, layers=16)
    prompt = [97 + i * 3 % 26 for i in range(600)]
    for index in range(12):  # at another layer each time
        at_ns = (2 + index) * S
        server.submit(at_ns, f"gone{index}", prompt_token_ids=[*prompt, 97 + index], max_tokens=5, **GREEDY)
        server.abort(at_ns + index * 2 * MS, f"gone{index}")
        server.submit(at_ns + 30 * MS, f"r{index}", prompt_token_ids=prompt[index:], max_tokens=5, **GREEDY)
    server.run_until(20 * S)
    for index in range(12):
        assert server.outcome(f"r{index}").tokens == expected_tokens(prompt[index:], 5)
    server.check_whole()
