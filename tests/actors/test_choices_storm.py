"""Requests with choices, stops, reports and aborts at random against a pool that is too small for them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from muxk.actors import protocol as wire
from virtual_server import MS, S, VirtualServer, expected_tokens

REQUESTS = 50


def fields_of(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_token_ids": [97 + draw.randrange(3)] * draw.randrange(1, 90),
        "max_tokens": draw.randrange(1, 60),
        "temperature": draw.choice([0.0, 0.9]),
        "n": draw.choice([1, 1, 2, 3, 7]),
        "ignore_eos": True,
    }
    if draw.random() < 0.3:
        fields["stop"] = [draw.choice(["e", "no", "xyz"])]
    if draw.random() < 0.3:
        fields["stop_token_ids"] = [97 + draw.randrange(26)]
    if draw.random() < 0.3:
        fields["min_tokens"] = draw.randrange(fields["max_tokens"] + 1)
    if draw.random() < 0.2:
        fields |= {"echo": True, "logprobs": 2}
    return fields


def check_greedy(fields: dict[str, Any], outcome: Any) -> None:
    """Every choice says what the model says, up to where it ended."""
    for choice, tokens in outcome.choice_tokens.items():
        wanted = expected_tokens(fields["prompt_token_ids"], fields["max_tokens"])
        assert tokens == wanted[: len(tokens)]
        if "stop" not in fields and "stop_token_ids" not in fields:
            assert len(tokens) == len(wanted), choice
        for stop in fields.get("stop", ()) if not fields.get("min_tokens") else ():
            assert stop not in outcome.choice_texts[choice]


@pytest.mark.parametrize("policy", ["muxwise", "inflight"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_once_and_nothing_is_left(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    server = VirtualServer(policy, kv_tokens=640, seed=seed, jitter=True)
    planned: dict[str, dict[str, Any]] = {}
    ends: dict[str, str] = {}
    at_ns = 2 * S
    for number in range(REQUESTS):
        name, at_ns = f"r{number}", at_ns + draw.randrange(1, 120) * MS
        planned[name], ends[name] = fields_of(draw), draw.choice(["full", "full", "full", "abort", "leave"])
        peer = name.encode()
        server.submit(at_ns, name, peer, **planned[name])
        later_ns = at_ns + draw.randrange(300) * MS
        if ends[name] == "abort":
            server.abort(later_ns, name, peer)
        elif ends[name] == "leave":
            server.leave(later_ns, peer)
    server.run_until(at_ns + 200 * S)
    for name, fields in planned.items():
        outcome = server.outcome(name, name.encode())
        assert len(outcome.terminal) <= 1
        if ends[name] == "leave":
            continue
        [end] = outcome.terminal
        if ends[name] == "full":
            assert isinstance(end, wire.Finished), end
            assert end.completion_tokens == sum(map(len, outcome.choice_tokens.values()))
            assert fields["n"] == 1 or len(outcome.choice_ends) == fields["n"]
            assert (outcome.prompt is not None) == fields.get("echo", False)
            if fields["temperature"] == 0.0:
                check_greedy(fields, outcome)
    server.check_whole()
