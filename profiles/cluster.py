"""Several simulated GPUs of one kind with links between them, each with the model's weights and a KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from muxk.kernel.devices.sim_gpu import SimGpu
from muxk.kernel.link import LinkTimes, Migration, SimLink
from muxk.kernel.token_pool import TokenPool
from muxk.kernel.work import PAGE_SIZE
from muxk.profiles.cost import RooflineCost, gpu_options
from muxk.profiles.gpu import GpuProfile
from muxk.profiles.operators import ModelShape
from muxk.profiles.sequence_parallel import RingTimes, WideCost

DEVICES_MAX = 16
LINK_DIRECTION = 0.5
"""Of the bandwidth that data sheets give for a link, which is the sum of both directions."""
LINK_EFFICIENCY = 0.8
"""Assumed: what copies between two GPUs reach of it."""
LINK_LATENCY_NS = 20_000
"""Assumed: of one copy, with its launch and the word that it has ended."""
EXCHANGE_LATENCY_NS = 10_000
"""Assumed: of one exchange inside a layer, as of a small all-reduce."""
HIDDEN = 0.9
"""Splitwise (ISCA 2024, section 4.3) sends KV layer by layer while the prompt is computed: its simulator
hides so much of it."""
HIDDEN_FROM_TOKENS = 512
"""From prompts of about so many tokens on; shorter ones are sent at once, when they are computed."""


@dataclass(frozen=True)
class GpuCluster:
    """Simulated GPUs of one server."""

    devices: tuple[SimGpu, ...]
    pages: dict[int, range]
    """Of each device; every page has a number of its own."""
    link: SimLink


def open_cluster(
    profile: GpuProfile,
    shape: ModelShape,
    tp: int,
    count: int,
    pages: int | None = None,
    seed: int = 0,
) -> GpuCluster:
    """`count` times the device of `open_gpu`, and the links. Raises DoesNotFit, ShapeError.

    With tensor parallelism each device is `tp` GPUs; a migration moves the parts of all of them at the same
    time, each over a link of its own.
    """
    assert 2 <= count <= DEVICES_MAX
    options = gpu_options(profile, shape, tp, pages, seed)
    own = options.pages - 1
    whole = TokenPool(1 + count * own, options.end_every)
    one = RooflineCost(profile, shape, tp)
    bandwidth = profile.card.link_bandwidth * LINK_DIRECTION * LINK_EFFICIENCY
    ring = RingTimes(bandwidth, EXCHANGE_LATENCY_NS)
    costs = {width: WideCost(one, width, ring) for width in range(1, count + 1)}
    devices = tuple(
        SimGpu(
            one,
            msgspec.structs.replace(
                options, name=f"{options.name}#{number}", seed=seed * DEVICES_MAX + number
            ),
            whole.beside(),
            costs.__getitem__,
            own,
        )
        for number in range(count)
    )

    def copy(migration: Migration) -> None:
        whole.copy(migration.source_pages, migration.target_pages)

    times = LinkTimes(bandwidth, LINK_LATENCY_NS, HIDDEN, HIDDEN_FROM_TOKENS // PAGE_SIZE)
    link = SimLink(times, PAGE_SIZE * shape.kv_bytes_per_token(tp), copy)
    ranges = {number: range(1 + number * own, 1 + (number + 1) * own) for number in range(count)}
    return GpuCluster(devices, ranges, link)
