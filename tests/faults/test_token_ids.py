"""Requests that want token ids and no text, among others that want text, of clients that misbehave.

What they get is held against the same request with text, alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from muxk.actors import protocol as wire
from muxk.actors.gateway import Gateway
from muxk.actors.messages import PagesGrown
from muxk.kernel.actor import Ref
from muxk.kernel.messages import PeerSlow, SendFrame
from muxk.policies.engine import load_policy
from virtual_server import GATEWAY, MS, Outcome, S, VirtualServer

REQUESTS = 24
CLIENTS = (b"p0", b"p1", b"p2")
SLOW_FOR = (1, 5 * MS, 200 * MS, 3 * S)


class SlowServer(VirtualServer):
    """Now and then a client takes no frame for some time."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._until: dict[bytes, int] = {}
        super().__init__(kv_tokens=256, seed=seed, jitter=True, calibrate=False)

    def _receive(self, frame: SendFrame) -> None:
        now_ns = self.runtime.now_ns()
        if frame.peer in CLIENTS and now_ns >= self._until.get(frame.peer, 0) and self._draw.random() < 0.01:
            self._until[frame.peer] = now_ns + self._draw.choice(SLOW_FOR)
        if now_ns < self._until.get(frame.peer, 0):
            self.runtime.inject(GATEWAY, PeerSlow(frame.peer, frame.payload), now_ns)
        else:
            super()._receive(frame)


@dataclass(frozen=True)
class Planned:
    """One request."""

    name: str
    peer: bytes
    fields: dict[str, Any]
    leaves: bool = False
    """Its client vanishes."""


@dataclass
class Storm:
    """Requests at random."""

    draw: random.Random
    server: VirtualServer
    text_share: float
    """Of the requests: steps of a batch without any take a way of their own."""
    planned: list[Planned] = field(default_factory=list)
    at_ns: int = S

    def submit(self) -> None:
        """One that comes twice now and then, or is aborted once or twice, or whose client vanishes."""
        draw = self.draw
        self.at_ns += draw.randrange(1, 40) * MS
        ends = draw.choice(["full", "full", "full", "abort", "abort", "leave"])
        name = f"r{len(self.planned)}"
        peer = b"leaver" + name.encode() if ends == "leave" else draw.choice(CLIENTS)
        request = Planned(name, peer, fields_of(draw, self.text_share), ends == "leave")
        self.planned.append(request)
        for _ in range(draw.choice([1, 1, 1, 2])):
            self.server.submit(self.at_ns, name, peer, **request.fields)
        later_ns = self.at_ns + draw.randrange(300) * MS
        if ends == "leave":
            self.server.leave(later_ns, peer)
        elif ends == "abort":
            for _ in range(draw.choice([1, 2])):
                self.server.abort(later_ns + draw.randrange(3) * MS, name, peer)
        if draw.random() < 0.1:
            policy = load_policy(draw.choice(["inflight", "muxwise", "chunked"]), {})
            self.server.swap(self.at_ns + draw.randrange(100) * MS, policy)


def fields_of(draw: random.Random, text_share: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_token_ids": [97 + draw.randrange(3)] * draw.randrange(1, 90),
        "max_tokens": draw.choice([1, 2, draw.randrange(1, 60), draw.randrange(1, 110)]),
        "temperature": draw.choice([0.0, 0.9]),
        "seed": draw.randrange(5),
        "n": draw.choice([1, 1, 1, 2, 5]),
        "ignore_eos": draw.random() < 0.6,
        "detokenize": draw.random() < text_share,
    }
    if draw.random() < 0.3:
        fields["stop_token_ids"] = [97 + draw.randrange(26) for _ in range(draw.randrange(1, 4))]
    if draw.random() < 0.3:
        fields["min_tokens"] = draw.randrange(fields["max_tokens"] + 1)
    if draw.random() < 0.1:
        fields["frequency_penalty"] = 1.0
    return fields


def with_text(planned: list[Planned]) -> dict[str, Outcome]:
    """The same requests with text, one after the other, on a server that has room for them."""
    server = VirtualServer(calibrate=False)
    for index, request in enumerate(planned):
        server.submit((1 + 3 * index) * S, request.name, **{**request.fields, "detokenize": True})
    server.run_until(3 * (len(planned) + 1) * S)
    return {request.name: server.outcome(request.name) for request in planned}


def check_request(request: Planned, outcome: Outcome, expected: Outcome) -> None:
    """It got what it gets alone, or the beginning of that when its end says so."""
    for choice, tokens in outcome.choice_tokens.items():
        assert tokens == expected.choice_tokens[choice][: len(tokens)], request
    assert request.fields["detokenize"] or not any(outcome.choice_texts.values())
    if request.leaves:
        assert len(outcome.terminal) <= 1
        return
    [end] = outcome.terminal
    if isinstance(end, wire.Failed):
        assert end.code in ("slow_reader", "engine_failed"), end
        return
    assert end.completion_tokens == sum(map(len, outcome.choice_tokens.values()))
    if end.finish_reason != "abort":
        assert outcome.choice_tokens == expected.choice_tokens, request
        assert told_of(end) == told_of(expected.terminal[0])
        assert list(map(told_of, sorted_ends(outcome))) == list(map(told_of, sorted_ends(expected)))


def sorted_ends(outcome: Outcome) -> list[wire.ChoiceFinished]:
    return [outcome.choice_ends[choice] for choice in sorted(outcome.choice_ends)]


def told_of(end: wire.Event) -> dict[str, Any]:
    """All but the name, and what depends on other requests."""
    told: dict[str, Any] = msgspec.to_builtins(end)
    return {key: value for key, value in told.items() if key not in ("request_id", "cached_tokens")}


@pytest.mark.parametrize(("seed", "text_share", "crashes"), [(4, 0.3, 0), (6, 0.0, 0), (1, 0.1, 2)])
def test_each_gets_what_it_gets_alone_and_one_end_and_nothing_is_left(
    seed: int, text_share: float, crashes: int
) -> None:
    storm = Storm(random.Random(seed), SlowServer(seed), text_share)
    for _ in range(REQUESTS):
        storm.submit()
    for _ in range(crashes):
        broken = PagesGrown((1,), (), ())
        storm.server.runtime.inject(Ref("decode"), broken, S + storm.draw.randrange(storm.at_ns - S))
    storm.server.run_until(storm.at_ns + 100 * S)
    expected = with_text(storm.planned)
    for request in storm.planned:
        check_request(request, storm.server.outcome(request.name, request.peer), expected[request.name])
    assert crashes or storm.server.describe("decode")["recomputes"] > 0, "the pool was not short"
    assert storm.server.describe("gateway")["slow_peers"] > 0
    storm.server.check_whole()
    gateway = storm.server.runtime.actor("gateway")
    assert isinstance(gateway, Gateway)
    state = gateway.state
    assert (state.names, state.open_choices, state.owed, state.unread_chars) == ({}, {}, {}, 0)


@pytest.mark.parametrize("value", [None, 0, "false"])
def test_detokenize_is_true_or_false_and_the_refusal_names_it(value: Any) -> None:
    server = VirtualServer(calibrate=False)
    submit = {"type": "Submit", "request_id": "it", "prompt": "x", "detokenize": value}
    server.send_raw(S, msgspec.msgpack.encode(submit))
    server.run_until(2 * S)
    [failed] = server.outcome("it").terminal
    assert failed.code == "invalid"
    assert "detokenize" in failed.message
    server.check_whole()
