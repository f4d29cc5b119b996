"""A seeded storm of requests, aborts and dying clients against a pool that is too small for them.

Run as a program it prints what happened and the trace hash, so that two processes can be compared.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass

from virtual_server import MS, S, VirtualServer, expected_tokens

START_NS = 2 * S


@dataclass(frozen=True)
class Shape:
    """How long requests are, how fast they come, and the pool that is too small for them."""

    outputs: int
    """Most tokens of an answer."""
    pause_ms: int
    """Longest pause between two arrivals."""
    kv_tokens: int


LONG = Shape(outputs=150, pause_ms=300, kv_tokens=960)
SHORT = Shape(outputs=50, pause_ms=220, kv_tokens=360)
"""Recomputes too, and keeps up with the arrivals, at about half the work: for storms of thousands."""


@dataclass(frozen=True)
class Planned:
    """One request of the storm."""

    name: str
    peer: bytes
    prompt: list[int]
    count: int
    seed: int
    temperature: float
    ends: str
    """`full`, `abort` or `leave`."""


def plan(requests: int, seed: int, shape: Shape = LONG) -> list[tuple[int, Planned]]:
    """(arrival in ns, request), in order of arrival; about 12 % aborts, 3 % clients that vanish."""
    draw = random.Random(seed)
    at_ns = START_NS
    planned = []
    shared = [97 + i % 26 for i in range(64)]
    for index in range(requests):
        # Bursts, and pauses in which the queue empties: about what the small pool can serve.
        at_ns += draw.choice([draw.randrange(1, 6), draw.randrange(1, shape.pause_ms)]) * MS
        prompt = shared[: draw.choice([0, 0, 16, 33, 64])] + [
            97 + draw.randrange(26) for _ in range(draw.randrange(1, 120))
        ]
        ends = draw.choices(["full", "abort", "leave"], [85, 12, 3])[0]
        peer = b"leaver%d" % index if ends == "leave" else b"p%d" % (index % 7)
        temperature = draw.choice([0.0, 0.8])
        count = draw.randrange(1, shape.outputs)
        planned.append((at_ns, Planned(f"r{index}", peer, prompt, count, index, temperature, ends)))
    return planned


def run_storm(
    requests: int, seed: int, policy: str = "muxwise", jitter: bool = False, shape: Shape = LONG
) -> tuple[VirtualServer, list[tuple[int, Planned]]]:
    """Run it to the end and a little longer."""
    server = VirtualServer(policy, kv_tokens=shape.kv_tokens, seed=seed, jitter=jitter)
    planned = plan(requests, seed, shape)
    draw = random.Random(seed + 1)
    for at_ns, request in planned:
        server.submit(
            at_ns,
            request.name,
            request.peer,
            prompt_token_ids=request.prompt,
            max_tokens=request.count,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=True,
        )
        until_end_ns = draw.randrange(0, 700) * MS
        if request.ends == "abort":
            server.abort(at_ns + until_end_ns, request.name, request.peer)
        elif request.ends == "leave":
            server.leave(at_ns + until_end_ns, request.peer)
    server.run_until(planned[-1][0] + 600 * S)
    return server, planned


def wrong_outcomes(server: VirtualServer, planned: list[tuple[int, Planned]]) -> list[str]:
    """Requests whose tokens or terminal events are not what they must be."""
    wrong = []
    for _, request in planned:
        outcome = server.outcome(request.name, request.peer)
        expected = expected_tokens(
            request.prompt, request.count, seed=request.seed, temperature=request.temperature
        )
        whole = outcome.tokens == expected
        if outcome.tokens != expected[: len(outcome.tokens)]:
            wrong.append(f"{request.name}: foreign tokens")
        elif request.ends == "full" and not (whole and len(outcome.terminal) == 1):
            wrong.append(f"{request.name}: {len(outcome.tokens)} tokens, {outcome.terminal}")
        elif request.ends == "abort" and len(outcome.terminal) != 1:
            wrong.append(f"{request.name}: aborted with {outcome.terminal}")
        elif request.ends == "leave" and len(outcome.terminal) > 1:
            wrong.append(f"{request.name}: left with {outcome.terminal}")
    return wrong


def main() -> None:
    requests, seed, policy = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    server, planned = run_storm(requests, seed, policy, shape=SHORT)
    server.check_whole()
    report = {
        "hash": server.trace.hash,
        "wrong": wrong_outcomes(server, planned)[:10],
        "recomputes": server.describe("decode")["recomputes"],
        "aborts": server.describe("gateway")["aborts"],
        "finished": server.describe("gateway")["finished"],
        "counts": server.describe("arbiter")["counts"],
        "kv": server.describe("kv_pool"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
