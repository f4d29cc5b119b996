"""Devices that work on the same items: what gets faster with their number, and what does not."""

from __future__ import annotations

import math
from collections import deque

import pytest
from device_port import GREEDY, CollectingPort
from muxk.actors.page_ranges import mixed
from muxk.kernel.actor import Message, Timer
from muxk.kernel.device import ItemDone
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.work import PAGE_SIZE, DecodeWork, Item, Phase, int32_bytes
from muxk.profiles.cluster import open_cluster
from muxk.profiles.cost import RooflineCost
from muxk.profiles.gpu import load_gpu
from muxk.profiles.operators import load_shape
from muxk.profiles.sequence_parallel import RingTimes, WideCost

CARD, SHAPE = load_gpu("a100"), load_shape("llama-3.1-8b")
ONE = RooflineCost(CARD, SHAPE, 1)
RING = RingTimes(240.0, 10_000)
OWN = 100
"""Pages of one device."""


def total_ns(width: int, load: ItemLoad) -> float:
    return math.fsum(phase.ns for phase in WideCost(ONE, width, RING).phases(load, ONE.units))


def step(context: int, most: int | None = None) -> ItemLoad:
    return ItemLoad(SHAPE.layers, 8, context, 0, 0, 0, 0, 8, 8, most)


def test_a_long_prefill_is_nearly_twice_as_fast_on_two_devices() -> None:
    tokens = 32_768
    prefill = ItemLoad(SHAPE.layers, 0, 0, 1, tokens, tokens * (tokens + 1) // 2, tokens, tokens, 1)
    assert 1.7 < total_ns(1, prefill) / total_ns(2, prefill) < 2.05


def test_a_step_waits_for_the_device_that_has_most_of_its_context() -> None:
    context = 400_000
    equal, skewed, all_of_it = (
        total_ns(2, step(context, round(part * context))) for part in (0.5, 0.75, 1.0)
    )
    assert total_ns(2, step(context)) == equal < skewed < all_of_it
    assert skewed - equal == pytest.approx(all_of_it - skewed, rel=0.05)
    assert total_ns(1, step(context)) < all_of_it, "exchanges, and nothing saved but weights' arithmetic"


class VirtualPort(CollectingPort):
    """A runtime in which nothing else happens."""

    def now_ns(self) -> int:
        return 0

    def post_after(self, delay_ns: int, message: Message) -> Timer:
        self.post(message)
        return Timer(1)


def step_ns(pages: list[int]) -> int:
    """Of one row with these pages, on two devices."""
    device = open_cluster(CARD, SHAPE, 1, 2, OWN + 1).devices[0]
    port = VirtualPort()
    device.start(port)
    device.resize(2)
    context, token = len(pages) * PAGE_SIZE, int32_bytes([97])
    position, table = int32_bytes([context - 1]), int32_bytes(pages)
    work = DecodeWork(1, 1, (7,), token, position, table, len(pages), context, GREEDY)
    item = Item(1, work, 0, device.layers, True)
    device.launch(device.lane(Phase.DECODE, device.units), item, ())
    done = port.take()
    assert isinstance(done, ItemDone)
    return done.ended_ns - done.started_ns


def test_pages_say_how_a_context_is_spread() -> None:
    first, second = range(1, OWN + 1), range(OWN + 1, 2 * OWN + 1)
    half = step_ns([*first[:50], *second[:50]])
    assert half < step_ns([*first[:75], *second[:25]]) < step_ns(list(first))
    assert step_ns(list(second)) == step_ns(list(first))


def test_a_pool_with_more_devices_spreads_what_it_gives_out() -> None:
    free = mixed(mixed(deque(range(1, 101)), range(101, 201)), range(201, 301))
    assert sorted(free) == list(range(1, 301))
    for count in (3, 30, 150):
        given = [(page - 1) // 100 for page in list(free)[:count]]
        assert [given.count(device) for device in range(3)] == [count // 3] * 3
