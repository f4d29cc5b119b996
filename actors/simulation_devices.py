"""The devices of a simulation: one of given costs, or several with a link, each with a KV pool of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.actors.backends import Backend, Cluster
from muxk.actors.simulation_watch import Notes, WatchedDevice
from muxk.kernel.devices.sim import Memory, SimCosts, new_memory
from muxk.kernel.link import LinkTimes, Migration, SimLink
from muxk.kernel.work import PAGE_SIZE
from muxk.models.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class DeviceSetup:
    """The device that is simulated: given costs, whatever it runs on."""

    units: int = 16
    layers: int = 32
    granularity: int = 1
    kv_tokens: int = 65_536
    """Of the pool of one device."""
    costs: SimCosts = field(default_factory=SimCosts)
    calibrate: bool = True
    """Measure it first, as a server does; else the policy starts without estimates."""
    devices: int = 1
    """Alike, with links between them; they can work together."""


def open_devices(setup: DeviceSetup, notes: Notes) -> Backend:
    """What serves with them. Pages of several devices have numbers of their own, in one memory."""
    own = max(1, setup.kv_tokens // PAGE_SIZE)
    first = _device(setup, notes, own, None)
    if setup.devices == 1:
        return Backend(first, ByteTokenizer(), "sim", own * PAGE_SIZE)
    memory = new_memory(1 + setup.devices * own)
    devices = tuple(_device(setup, notes, own, memory) for _ in range(setup.devices))

    def copy(migration: Migration) -> None:
        devices[0].copy_pages(migration.source_pages, migration.target_pages)

    times = LinkTimes(bytes_per_ns=1.0, latency_ns=setup.costs.launch_ns)
    link = SimLink(times, max(1, round(PAGE_SIZE * setup.costs.migration_token_ns)), copy)
    pages = {number: range(1 + number * own, 1 + (number + 1) * own) for number in range(setup.devices)}
    cluster = Cluster(devices, pages, link, devices)
    return Backend(devices[0], ByteTokenizer(), "sim", own * PAGE_SIZE, cluster)


def _device(setup: DeviceSetup, notes: Notes, pages: int, memory: Memory | None) -> WatchedDevice:
    return WatchedDevice(
        notes,
        units=setup.units,
        layers=setup.layers,
        pages=pages + 1,
        costs=setup.costs,
        granularity=setup.granularity,
        memory=memory,
    )
