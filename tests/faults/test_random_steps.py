"""Random submits, aborts and ends against a tiny pool: after every message to the pool no page is lost.

Clients act on what they see at the moment, so that aborts meet requests in every state. Everything that a
client may rely on is looked at when a request ends, and then forgotten, so that a run can be long.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from checked_pool import checked_server
from muxk.actors import protocol as wire
from muxk.kernel.devices.sim import SimCosts
from virtual_server import MS, Outcome, S, expected_tokens

POLICIES = ["muxwise", "chunked", "temporal", "inflight", "static_split"]
POOL_TOKENS = 256
LIVE_MAX = 16
STEPS_BETWEEN_SWAPS = 250
CHEAP = SimCosts(launch_ns=20_000, decode_base_ns=800_000, decode_row_ns=20_000, prefill_layer_base_ns=60_000)


@dataclass
class Sent:
    """A request that has no terminal event yet."""

    peer: bytes
    fields: dict[str, Any]
    ended_by_client: bool = False


@dataclass
class Crowd:
    """Clients that submit and abort at random. A step is a submit, an abort, or an end by itself."""

    seed: int
    jitter: bool
    sent: dict[tuple[bytes, str], Sent] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    policies: Counter[str] = field(default_factory=Counter)
    policy: str = ""
    """The last one that was swapped in."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.server, self.pool = checked_server(
            kv_tokens=POOL_TOKENS, costs=CHEAP, calibrate=False, seed=self.seed, jitter=self.jitter
        )
        self.now_ns = S

    @property
    def steps(self) -> int:
        return self.counts["submits"] + self.counts["aborts"] + self.counts["ends"]

    def run(self, steps: int) -> None:
        while self.steps < steps:
            self.now_ns += self.draw.choice([0, 1, 1, 3, 8]) * MS // 2
            self.server.run_until(self.now_ns)
            self.collect()
            self.act()
        self.now_ns += 100 * S
        self.server.run_until(self.now_ns)
        self.collect()

    def act(self) -> None:
        if self.draw.random() * STEPS_BETWEEN_SWAPS < 1:
            self.swap()
        if len(self.sent) >= LIVE_MAX or (self.sent and self.draw.random() < 0.25):
            self.abort()
        else:
            self.submit()

    def swap(self) -> None:
        policy = self.draw.choice([name for name in POLICIES if name != self.policy])
        self.policy = policy  # the same one again would be no swap
        source = (
            "{apiVersion: muxk/v1alpha1, kind: SchedulingPolicy, "
            f"metadata: {{name: {policy}-again}}, spec: {{extends: {policy}}}}}"
        )
        self.policies[policy] += 1
        self.server.send(self.now_ns, wire.SwapPolicy(source, "again.yaml"))

    def submit(self) -> None:
        draw = self.draw
        peer, name = b"p%d" % draw.randrange(5), f"r{self.counts['submits']}"
        prompt = [97 + i % 26 for i in range(draw.choice([0, 0, 16, 32, 48]))]
        prompt += [97 + draw.randrange(26) for _ in range(draw.randrange(1, 40))]
        fields: dict[str, Any] = {
            "prompt_token_ids": prompt,
            "max_tokens": draw.choice([1, 2, 4, 8, 25, 50]),
            "temperature": draw.choice([0.0, 0.0, 0.8]),
            "seed": draw.randrange(1000),
            "n": draw.choice([1, 1, 1, 1, 3]),
            "ignore_eos": True,
        }
        if draw.random() < 0.3:
            fields |= {"prompt": bytes(prompt).decode(), "prompt_token_ids": None}
        if draw.random() < 0.1:
            fields["stop"] = [chr(97 + draw.randrange(26))]
        self.counts["submits"] += 1
        self.sent[peer, name] = Sent(peer, fields | {"prompt_token_ids": prompt})
        self.server.submit(self.now_ns, name, peer, **fields)

    def abort(self) -> None:
        """One request, twice now and then; all of a client, when it vanishes; or one that nobody knows."""
        chosen = self.draw.choice(list(self.sent))
        kind = self.draw.choices(["one", "twice", "leaves", "unknown"], [12, 2, 1, 1])[0]
        self.counts["aborts"] += 1
        if kind == "unknown":
            self.server.abort(self.now_ns, "r-1", chosen[0])
            return
        if kind == "leaves":
            self.counts["leaves"] += 1
            self.server.leave(self.now_ns, chosen[0])
            for key in [key for key in self.sent if key[0] == chosen[0]]:
                self.end(key, self.sent[key], self.server.outcome(key[1], key[0]))
            return
        self.sent[chosen].ended_by_client = True
        for _ in range(2 if kind == "twice" else 1):
            self.server.abort(self.now_ns, chosen[1], chosen[0])

    def collect(self) -> None:
        """Look at all that ended, and forget it."""
        self.server.events.clear()
        for key, outcome in list(self.server.outcomes.items()):
            sent = self.sent.get(key)
            if sent is None:
                assert not outcome.terminal, f"an end of {key}, which nobody waits for"
                del self.server.outcomes[key]
            elif outcome.terminal:
                self.counts["ends"] += outcome.terminal[0].finish_reason != "abort"
                self.end(key, sent, outcome)

    def end(self, key: tuple[bytes, str], sent: Sent, outcome: Outcome) -> None:
        check_outcome(sent, outcome)
        del self.sent[key]
        self.server.outcomes.pop(key, None)


def check_outcome(sent: Sent, outcome: Outcome) -> None:
    """What a client sees of a request is whole, or the beginning of it for one that it ended."""
    fields = sent.fields
    assert len(outcome.terminal) <= 1
    for choice, tokens in outcome.choice_tokens.items():
        if fields["temperature"] and choice:
            continue
        wanted = expected_tokens(
            fields["prompt_token_ids"],
            fields["max_tokens"],
            seed=fields["seed"],
            temperature=fields["temperature"],
        )
        assert tokens == wanted[: len(tokens)]
        if outcome.terminal and outcome.terminal[0].finish_reason == "length":
            assert "stop" in fields or len(tokens) == len(wanted)
    if outcome.terminal:
        [end] = outcome.terminal
        assert isinstance(end, wire.Finished), end
        assert end.finish_reason != "abort" or sent.ended_by_client


def check_crowd(crowd: Crowd) -> None:
    """Nothing is left, nobody crashed, and the counters tell what happened."""
    server, counts = crowd.server, crowd.counts
    assert crowd.sent == {}
    server.check_whole()
    assert server.runtime.actor("kv_pool") is crowd.pool, "the engine was rebuilt"
    assert crowd.pool.checks > counts["submits"]
    shown = server.describe("gateway")
    assert shown["failed"] == shown["refused"] == 0
    assert shown["accepted"] == counts["submits"] == shown["finished"] + shown["aborts"]
    numbers = [value for value in shown.values() if isinstance(value, int | float)]
    assert min(numbers) >= 0
    swaps = server.describe("arbiter")["counts"].get("policy swaps", 0)
    assert swaps == sum(crowd.policies.values()), "a policy was refused"
    assert server.describe("decode")["recomputes"] > 0, "the pool was not short: the run shows nothing"
    assert crowd.pool.state.reused_tokens > 0, "no prefix was reused: the run shows nothing"


@pytest.mark.parametrize("jitter", [False, True])
def test_after_each_of_1500_random_steps_every_page_is_used_cached_or_free(jitter: bool) -> None:
    crowd = Crowd(seed=5 + jitter, jitter=jitter)
    crowd.run(1500)
    check_crowd(crowd)


@pytest.mark.soak
def test_after_each_of_100_000_random_steps_every_page_is_used_cached_or_free() -> None:
    crowd = Crowd(seed=46, jitter=True)
    crowd.run(100_000)
    check_crowd(crowd)
    assert set(crowd.policies) == set(POLICIES)
    print(dict(crowd.counts), crowd.pool.checks, crowd.server.describe("decode"))


def test_the_check_after_each_message_sees_a_lost_page() -> None:
    crowd = Crowd(seed=1, jitter=False)
    crowd.pool.state.pool._free.popleft()
    crowd.submit()
    crowd.server.run_until(crowd.now_ns + S)
    assert crowd.server.runtime.actor("kv_pool") is not crowd.pool
