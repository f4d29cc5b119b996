"""A server of several small simulated GPUs in virtual time, and policies that place at random."""

from __future__ import annotations

import random
from typing import Any

from muxk.actors.backends import Backend, Cluster
from muxk.kernel.devices.sim import HASH_FACTOR, _mix
from muxk.kernel.placing import Assign, Grow, Move, PlaceAnswer, PlaceView, Shrink
from muxk.kernel.policy import Policy
from muxk.kernel.work import PAGE_SIZE
from muxk.models.tokenizer import ByteTokenizer
from muxk.policies.engine import load_policy
from muxk.profiles.cluster import open_cluster
from muxk.profiles.gpu import load_gpu
from muxk.profiles.operators import ModelShape, load_shape
from virtual_server import VirtualServer

WORD = 1 << 64
LETTERS = [97 + letter for letter in range(26)]
SHAPE: ModelShape = load_shape("llama-3.1-8b")


def cluster_backend(devices: int, kv_tokens: int, seed: int = 0) -> Backend:
    """`kv_tokens` is the pool of one device."""
    pages = kv_tokens // PAGE_SIZE + 1
    found = open_cluster(load_gpu("a100"), SHAPE, 1, devices, pages, seed)
    cluster = Cluster(found.devices, found.pages, found.link, found.devices)
    return Backend(found.devices[0], ByteTokenizer(), "sim", (pages - 1) * PAGE_SIZE, cluster)


def cluster_server(
    policy: str | Policy, devices: int = 2, kv_tokens: int = 4096, seed: int = 1, **options: Any
) -> VirtualServer:
    return VirtualServer(
        policy, backend=cluster_backend(devices, kv_tokens), seed=seed, calibrate=False, **options
    )


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice(LETTERS) for _ in range(length)]


class RandomPlaces:
    """A policy that answers `place` with whatever comes, most of it legal, and the rest as muxwise."""

    places = True
    devices_min = 2
    group_devices_max = 16

    def __init__(self, seed: int, base: str = "muxwise", *, fetches: bool = False) -> None:
        self._base = load_policy(base, {})
        self._draw = random.Random(seed)
        self.fetches_prefix = fetches
        self.sha = f"{self._base.sha}-{seed}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def place(self, view: PlaceView) -> PlaceAnswer:
        draw, count = self._draw, len(view.groups)
        actions: list[Assign | Grow | Shrink | Move] = []
        if view.queue and draw.random() < 0.7:
            group = draw.randrange(count)
            others = [other for other in range(count) if other != group]
            devices = tuple(draw.sample(others, draw.randrange(len(others) + 1)))
            chosen = tuple(request.request_id for request in view.queue if draw.random() < 0.6)
            decode = draw.choice([None, None, draw.randrange(count)])
            keep = draw.choice([None, 1, 2])
            actions.append(Assign(chosen, group, devices if draw.random() < 0.4 else (), keep, decode))
        if draw.random() < 0.15:
            actions.append(Move(draw.randrange(count), draw.randrange(count)))
        if draw.random() < 0.15:
            actions.append(Grow(draw.randrange(count), (draw.randrange(count),)))
        if draw.random() < 0.3:
            actions.append(Shrink(draw.randrange(count), tuple(range(count))))
        return PlaceAnswer(tuple(actions), ("place/random",) if actions else ())


def gpu_tokens(prompt: list[int], count: int) -> list[int]:
    """What a simulated GPU says to a prompt, greedy, computed without pages, batches or a scheduler."""
    total, tokens = 0, []
    for position, token in enumerate(prompt):
        total += (token + 1) * pow(int(HASH_FACTOR), position + 1, WORD)
    for position in range(len(prompt), len(prompt) + count):
        mixed = _mix(total % WORD)
        tokens.append(b"abcdefghijklmnopqrstuvwxyz "[(mixed >> 16) % 27])
        total += (tokens[-1] + 1) * pow(int(HASH_FACTOR), position + 1, WORD)
    return tokens
