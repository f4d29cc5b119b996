"""Several devices in one server: requests end once, with their own tokens, wherever their KV went."""

from __future__ import annotations

import random

import pytest
from cluster import RandomPlaces, cluster_server, gpu_tokens, prompt_of
from virtual_server import MS, S, VirtualServer

Asked = dict[str, tuple[list[int], int]]
"""Prompt and number of tokens, by name."""


def submit_many(server: VirtualServer, count: int, seed: int, outputs: int = 60) -> Asked:
    """Requests with short and long prompts, some with a shared beginning; what each asked for."""
    draw = random.Random(seed)
    shared = prompt_of(96, 7)
    asked = {}
    for index in range(count):
        prompt = shared[: draw.choice([0, 0, 32, 96])] + prompt_of(draw.randrange(1, 400), 1000 + index)
        tokens = draw.randrange(1, outputs)
        name = f"r{index}"
        server.submit(
            S + draw.randrange(800) * MS,
            name,
            prompt_token_ids=prompt,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0,
        )
        asked[name] = (prompt, tokens)
    return asked


def check_tokens(server: VirtualServer, asked: Asked) -> None:
    for name, (prompt, count) in asked.items():
        outcome = server.outcome(name)
        assert len(outcome.terminal) == 1, name
        assert outcome.tokens == gpu_tokens(prompt, count), name


@pytest.mark.parametrize("policy", ["splitwise", "muxwise"])
def test_tokens_are_those_of_one_device(policy: str) -> None:
    server = cluster_server(policy, devices=2)
    asked = submit_many(server, 40, seed=3)
    server.run_until(60 * S)
    check_tokens(server, asked)
    server.check_whole()


def test_kv_migrates_from_the_device_of_the_prompt_to_the_one_that_decodes() -> None:
    server = cluster_server("splitwise", devices=2)
    prompt = prompt_of(300, 1)
    server.submit(S, "one", prompt_token_ids=prompt, max_tokens=20, ignore_eos=True, temperature=0.0)
    server.run_until(20 * S)
    assert server.outcome("one").tokens == gpu_tokens(prompt, 20)
    assert server.describe("decode@0")["steps"] == 0
    assert server.describe("decode@1")["steps"] == 19
    assert server.describe("migration")["pages"] == 19


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_of_a_policy_loses_pages_requests_or_tokens(seed: int) -> None:
    """Devices come and go, requests move, pools are small, clients abort, events are shuffled."""
    draw = random.Random(seed)
    devices = draw.choice([2, 3, 4])
    server = cluster_server(
        RandomPlaces(seed), devices=devices, kv_tokens=draw.choice([720, 1600]), seed=seed, jitter=True
    )
    asked = submit_many(server, 40, seed=seed, outputs=120)
    aborted = [name for name in asked if draw.random() < 0.2]
    for name in aborted:
        server.abort(S + draw.randrange(1500) * MS, name)
    server.run_until(300 * S)
    check_tokens(server, {name: what for name, what in asked.items() if name not in aborted})
    for name in aborted:
        assert len(server.outcome(name).terminal) == 1
    server.check_whole()
