"""One request, one seed, one answer: alone, in a crowd, preempted, computed again, on any units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from muxk.actors import protocol as wire
from muxk.kernel.devices.sim import SimCosts
from virtual_server import MS, S, VirtualServer, expected_tokens

PROMPT = [97 + i * 7 % 26 for i in range(70)]
COUNT = 50
ARRIVAL_NS = 20 * S
REQUEST: dict[str, Any] = {
    "prompt_token_ids": PROMPT,
    "max_tokens": COUNT,
    "temperature": 0.8,
    "seed": 1234,
    "ignore_eos": True,
}
EXPECTED = expected_tokens(PROMPT, COUNT, seed=1234, temperature=0.8)
OTHERS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.7, "ignore_eos": True}

PARKING = """
  preempt:
    - {name: shorter, when: candidate.new_tokens < 40 and running.depth == 0, then: park}
    - {name: otherwise, then: continue}
  slice: {layers: 1}
"""


@dataclass(frozen=True)
class Circumstance:
    """What is different for the request, and how it is known that it really was."""

    happened: Callable[[VirtualServer], bool]
    policy: str = "muxwise"
    rules: str = ""
    server: dict[str, Any] = field(default_factory=dict)
    before: tuple[dict[str, Any], ...] = ()
    """Requests that are over when it comes."""
    beside: tuple[dict[str, Any], ...] = ()
    after: tuple[dict[str, Any], ...] = ()
    """Requests that come 1 ms after it."""
    swaps: tuple[str, ...] = ()
    """Policies that take turns while it runs."""
    fields: dict[str, Any] = field(default_factory=dict)


def counts(server: VirtualServer) -> dict[str, int]:
    found = server.describe("arbiter")["counts"]
    assert isinstance(found, dict)
    return found


def cached_tokens(server: VirtualServer) -> int:
    return int(server.outcome("it").terminal[0].cached_tokens)


def crowd(requests: int) -> tuple[dict[str, Any], ...]:
    """Requests with prompts and seeds of their own."""
    prompts = [[97 + i % 26] * (5 + 3 * i) for i in range(requests)]
    return tuple({"prompt_token_ids": prompt, "seed": i, **OTHERS} for i, prompt in enumerate(prompts))


CIRCUMSTANCES = {
    "in a batch of 32": Circumstance(lambda server: counts(server)["decode steps"] < 150, beside=crowd(31)),
    "parked between layers": Circumstance(
        lambda server: counts(server)["preemptions"] >= 1,
        rules=PARKING,
        server={"costs": SimCosts(prefill_token_ns=100_000), "layers": 8},
        after=crowd(2),
    ),
    "computed again": Circumstance(
        lambda server: server.describe("decode")["recomputes"] > 0,
        server={"kv_tokens": 240},
        rules="  victim: {by: -request.prompt_tokens}\n",  # it has the longest prompt
        beside=crowd(5),
    ),
    "on a prefix hit": Circumstance(
        lambda server: cached_tokens(server) == 64, before=({"prompt_token_ids": PROMPT, **OTHERS},)
    ),
    "on a prefix that another one of its batch fills": Circumstance(
        lambda server: cached_tokens(server) == 64,
        beside=({"prompt_token_ids": PROMPT, "seed": 9, **OTHERS},) * 2,
    ),
    "on one unit": Circumstance(lambda server: server.device.units == 1, server={"units": 1}),
    "on 13 units": Circumstance(
        lambda server: server.device.units == 13, server={"units": 13}, beside=crowd(3)
    ),
    "on a fixed split": Circumstance(
        lambda server: server.describe("arbiter")["split"]["decode"] == 2,
        policy="static_split",
        server={"settings": {"decode_share": "25%"}},
        beside=crowd(3),
    ),
    "in chunks of one token": Circumstance(
        lambda server: counts(server)["slice/always"] >= 70,
        policy="chunked",
        server={"settings": {"budget": "1"}},
    ),
    "in chunks, fused with others": Circumstance(
        lambda server: counts(server)["fused steps"] >= 10,
        policy="chunked",
        server={"settings": {"budget": "12"}},
        beside=crowd(6),
    ),
    "layer by layer": Circumstance(lambda server: True, policy="temporal", beside=crowd(3)),
    "whole": Circumstance(lambda server: True, policy="inflight", beside=crowd(3)),
    "across swaps": Circumstance(
        lambda server: counts(server)["policy swaps"] >= 6,
        swaps=("chunked", "inflight", "temporal", "static_split", "muxwise", "chunked"),
        beside=crowd(6),
    ),
    "one step at a time": Circumstance(
        lambda server: True, rules="  limits: {decode_ahead: 0, backlog: 1}\n"
    ),
    "with everything reported": Circumstance(
        lambda server: len(server.outcome("it").logprobs) == COUNT,
        fields={"logprobs": 5, "echo": True, "min_tokens": COUNT},
    ),
    "as the first of several choices": Circumstance(
        lambda server: len(server.outcome("it").choice_tokens) == 5, fields={"n": 5}
    ),
}


def swap(name: str, base: str, rules: str = "") -> wire.SwapPolicy:
    head = f"apiVersion: muxk/v1alpha1\nkind: SchedulingPolicy\nmetadata: {{name: {name}}}\n"
    return wire.SwapPolicy(f"{head}spec:\n  extends: {base}\n{rules}", "changed.yaml")


def serve(circumstance: Circumstance) -> VirtualServer:
    server = VirtualServer(circumstance.policy, **circumstance.server)
    if circumstance.rules:
        server.send(ARRIVAL_NS - 2 * S, swap("changed", circumstance.policy, circumstance.rules))
    for index, fields in enumerate(circumstance.before):
        server.submit(ARRIVAL_NS - S, f"before{index}", **fields)
    for index, fields in enumerate(circumstance.beside):
        server.submit(ARRIVAL_NS, f"beside{index}", **fields)
    server.submit(ARRIVAL_NS, "it", **(REQUEST | circumstance.fields))
    for index, fields in enumerate(circumstance.after):
        server.submit(ARRIVAL_NS + MS, f"after{index}", **fields)
    for index, base in enumerate(circumstance.swaps):
        server.send(ARRIVAL_NS + 40 * MS * (1 + index), swap(f"{base}-again", base))
    server.run_until(ARRIVAL_NS + 10 * S)
    return server


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES.keys())
def test_a_seeded_request_says_the_same_in_every_circumstance(circumstance: Circumstance) -> None:
    server = serve(circumstance)
    assert server.outcome("it").tokens == EXPECTED
    assert circumstance.happened(server), "the circumstance did not come about"
    for fields, name in [(fields, f"beside{i}") for i, fields in enumerate(circumstance.beside)]:
        if "seed" in fields:
            wanted = expected_tokens(fields["prompt_token_ids"], 40, seed=fields["seed"], temperature=0.7)
            assert server.outcome(name).tokens == wanted, name
    for _, _, event in server.events:
        assert not isinstance(event, wire.PolicySwapped) or event.accepted, event.report
    server.check_whole()


def test_another_seed_says_something_else() -> None:
    server = serve(Circumstance(lambda server: True, fields={"seed": 1235}))
    assert server.outcome("it").tokens != EXPECTED
