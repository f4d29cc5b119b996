"""The machine's cores dealt out to several devices of one server, which share the weights.

Each has a KV pool of its own, and a migration is a real copy from one to the other: what static
disaggregation of prefill and decode does with GPUs, on cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from muxk.actors.backends import Cluster
from muxk.kernel.devices.cpu import CpuDevice
from muxk.kernel.link import CopyLink, Migration
from muxk.models.runner import ModelRunner


def share_cores(runner: ModelRunner, cores: Sequence[int], count: int) -> Cluster:
    """`count` devices with as equal parts of the cores as there can be, the first ones with the larger parts.

    `runner` becomes the first device's; the others get pools of the same size.
    """
    assert 2 <= count <= len(cores)
    least, more = divmod(len(cores), count)
    devices, runners, first = [], [], 0
    for number in range(count):
        own = cores[first : first + least + (number < more)]
        first += len(own)
        runners.append(runner if number == 0 else ModelRunner(runner.decoder, runner.pages))
        devices.append(CpuDevice(runners[-1], own))

    def copy(migration: Migration) -> None:
        source, target = runners[migration.source], runners[migration.target]
        target.copy_pages(source, migration.source_pages, migration.target_pages)

    pages = {number: range(1, runner.pages) for number in range(count)}
    return Cluster(tuple(devices), pages, CopyLink(runner.bytes_per_page, copy))
