"""The whole server on simulated cards in virtual time: the production actors and policies."""

from __future__ import annotations

import random

import pytest
from muxk.actors import protocol as wire
from muxk.profiles.cost import open_gpu
from muxk.profiles.gpu import load_gpu
from muxk.profiles.operators import load_shape
from virtual_server import S, VirtualServer

PAGES = 4001
POLICIES = ("muxwise", "chunked", "static_split", "temporal", "inflight")
REQUESTS = 16


def served(
    policy: str,
    gpu: str = "h200",
    model: str = "qwen3-8b",
    tp: int = 1,
    jitter: bool = False,
    seed: int = 1,
    requests: int = REQUESTS,
) -> VirtualServer:
    """A burst of prompts of some thousand tokens, after the few seconds of measurements at start."""
    device = open_gpu(load_gpu(gpu), load_shape(model), tp, pages=PAGES)
    server = VirtualServer(
        policy,
        device=device,  # type: ignore[arg-type]
        kv_tokens=(PAGES - 1) * 16,
        seed=seed,
        jitter=jitter,
    )
    chance, at_ns = random.Random(3), 20 * S
    for number in range(requests):
        at_ns += round(chance.expovariate(6.0) * S)
        prompt = [chance.randrange(97, 123) for _ in range(chance.randrange(100, 5000))]
        server.submit(
            at_ns, f"r{number}", prompt_token_ids=prompt, max_tokens=chance.randrange(20, 80), temperature=0.0
        )
    server.run_until(at_ns + 60 * S)
    server.check_whole()
    return server


def tokens_of(server: VirtualServer) -> dict[str, list[int]]:
    assert all(
        [type(event) for event in outcome.terminal] == [wire.Finished] for outcome in server.outcomes.values()
    )
    return {name: outcome.tokens for (_, name), outcome in server.outcomes.items()}


def worst_gap_ms(server: VirtualServer) -> float:
    return max(gap for outcome in server.outcomes.values() for gap in outcome.gaps_ms)


@pytest.fixture(scope="module")
def runs() -> dict[str, VirtualServer]:
    return {policy: served(policy) for policy in POLICIES}


def test_every_policy_gives_every_request_the_same_tokens(runs: dict[str, VirtualServer]) -> None:
    tokens = {policy: tokens_of(server) for policy, server in runs.items()}
    assert len(tokens["muxwise"]) == REQUESTS
    for policy in POLICIES:
        assert tokens[policy] == tokens["muxwise"], policy


def test_decodes_that_wait_for_whole_prompts_wait_longest(runs: dict[str, VirtualServer]) -> None:
    gaps = {policy: worst_gap_ms(server) for policy, server in runs.items()}
    assert gaps["inflight"] > 3 * max(gaps["muxwise"], gaps["chunked"], gaps["static_split"])
    assert gaps["muxwise"] < 50


def test_two_runs_with_one_seed_are_the_same_to_the_last_message(runs: dict[str, VirtualServer]) -> None:
    again = served("muxwise")
    assert again.trace.hash == runs["muxwise"].trace.hash
    assert [o.times_ns for o in again.outcomes.values()] == [
        o.times_ns for o in runs["muxwise"].outcomes.values()
    ]


@pytest.mark.parametrize("seed", [2, 3])
def test_messages_that_change_places_change_no_token(runs: dict[str, VirtualServer], seed: int) -> None:
    assert tokens_of(served("muxwise", jitter=True, seed=seed)) == tokens_of(runs["muxwise"])


@pytest.mark.parametrize(
    ("gpu", "model", "tp"),
    [("a100", "llama-3.1-70b", 8), ("h100", "llama-3.1-8b", 1), ("h200", "qwen3-235b-a22b", 8)],
)
def test_other_cards_models_and_several_gpus_serve(gpu: str, model: str, tp: int) -> None:
    server = served("muxwise", gpu, model, tp, requests=6)
    assert len(tokens_of(server)) == 6
    assert worst_gap_ms(server) < 200
