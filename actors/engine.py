"""The actors that work on a device, and on each of several: what `actors/system.py` puts behind the gateway.

With one device they are one group, and requests go straight to its admission. With several each device has a
group of its own, and placement and migration stand between them (`kernel/placing.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from muxk.actors.admission import Admission
from muxk.actors.backends import Backend, Cluster
from muxk.actors.decode import Decode
from muxk.actors.estimator import Estimator
from muxk.actors.kv_pool import KvPool
from muxk.actors.migration import MigrationActor
from muxk.actors.placement import Placement
from muxk.actors.placer import Fleet
from muxk.actors.prefill import Prefill
from muxk.actors.refs import Refs, group_refs
from muxk.kernel.actor import ActorSpec
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.device import Device, ElasticDevice
from muxk.kernel.devices.sim_gpu import SimGpu
from muxk.kernel.policy import PolicyBook
from muxk.kernel.work import PAGE_SIZE
from muxk.profiles.calibration import plan_probes

GENERATION = 1 << 32
"""Items and migrations of one generation of actors; those of the next have other numbers."""


@dataclass(frozen=True)
class Engine:
    """What the actors of every group are given."""

    backend: Backend
    book: PolicyBook
    policy_sha: str
    calibrate: bool
    max_queue: int | None

    @property
    def groups(self) -> tuple[Refs, ...]:
        """Addresses, by group."""
        cluster = self.backend.cluster
        return (Refs(),) if cluster is None else tuple(map(group_refs, range(len(cluster.devices))))

    def specs(self) -> list[ActorSpec]:
        """In the order in which they start."""
        backend, cluster = self.backend, self.backend.cluster
        if cluster is None:
            return self._group_specs(Refs(), backend.device, {0: range(1, backend.device.pages)}, None)
        specs = self._shared_specs(cluster)
        for refs, device in zip(self.groups, cluster.devices, strict=True):
            elastic = cluster.elastic[refs.group] if cluster.elastic else None
            specs += self._group_specs(refs, device, cluster.pages, elastic)
        return specs

    def _group_specs(
        self, refs: Refs, device: Device, pages: Mapping[int, range], elastic: ElasticDevice | None
    ) -> list[ActorSpec]:
        book, sha, end_ids = self.book, self.policy_sha, self.backend.tokenizer.end_ids
        # Where there are several devices placement knows the limit of the policy in force, and asks first.
        context = self.backend.group_context_tokens[-1]
        probes = []
        if self.calibrate:
            longest = min(self.backend.max_context_tokens, (device.pages - 1) * PAGE_SIZE)
            probes = plan_probes(device.units, device.splits(), device.layers, longest)
        profile = self.backend.profile
        estimator = partial(Estimator, refs, probes, device.layers, book, sha, profile)
        decode = partial(Decode, refs, book, sha, end_ids, isinstance(device, SimGpu))
        admission = partial(Admission, refs, book, sha, context, device.layers, self.max_queue)
        return [
            ActorSpec(refs.admission.name, admission, Admission),
            ActorSpec(refs.kv_pool.name, partial(KvPool, refs, pages), KvPool),
            ActorSpec(refs.prefill.name, partial(Prefill, refs, book, sha, end_ids), Prefill),
            ActorSpec(refs.decode.name, decode, Decode),
            ActorSpec(refs.arbiter.name, self._arbiter_maker(refs, device, elastic), Arbiter),
            ActorSpec(refs.estimator.name, estimator, Estimator),
        ]

    def _arbiter_maker(
        self, refs: Refs, device: Device, elastic: ElasticDevice | None
    ) -> Callable[[], Arbiter]:
        generations = itertools.count()
        foreseeing = device if isinstance(device, SimGpu) else None

        def new_arbiter() -> Arbiter:
            generation = next(generations)
            if generation:
                device.reset()
                if elastic is not None:
                    elastic.resize(1)  # whom it worked with is in its own group again
            first_item = 1 + generation * GENERATION
            return Arbiter(
                device,
                self.book,
                self.policy_sha,
                refs,
                first_item,
                elastic=elastic,
                foreseeing=foreseeing,
            )

        return new_arbiter

    def _shared_specs(self, cluster: Cluster) -> list[ActorSpec]:
        device, groups, link = self.backend.device, self.groups, cluster.link
        fleet = Fleet(
            units=device.units,
            layers=device.layers,
            elastic=bool(cluster.elastic),
            pages=device.pages - 1,
            context_tokens=self.backend.group_context_tokens,
            page_bytes=link.page_bytes,
            link_bytes_per_ns=link.bytes_per_ns,
        )
        generations = itertools.count()

        def new_migration() -> MigrationActor:
            generation = next(generations)
            if generation:
                link.reset()
            return MigrationActor(groups, link, 1 + generation * GENERATION)

        placement = partial(Placement, groups, self.book, self.policy_sha, fleet, self.max_queue)
        return [
            ActorSpec("placement", placement, Placement),
            ActorSpec("migration", new_migration, MigrationActor),
        ]
