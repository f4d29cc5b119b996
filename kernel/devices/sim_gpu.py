"""A simulated GPU: a cost model's times on lanes of SMs that share the memory bandwidth, in the runtime's
time.

A launched item waits in its lane's queue, which can not be recalled, until the host has launched it and the
items that it comes after have ended. While it runs it passes through phases (its GEMMs, its attention, …),
each with the time it takes alone and the bytes it moves; lanes share the bandwidth (`kernel/timeline.py`).
A launch is the only thing that can change what was foreseen: then completions that moved are taken back and
posted anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from muxk.kernel.actor import Timer
from muxk.kernel.bandwidth import Sharing
from muxk.kernel.device import DevicePort, ItemDone, Lane, StepsAhead
from muxk.kernel.devices.sim_gpu_load import ItemLoad, Spread, load_of
from muxk.kernel.devices.sim_gpu_steps import SimSteps, StepParts
from muxk.kernel.noise import Noise, mixed
from muxk.kernel.timeline import Job, PhaseCost, Timeline
from muxk.kernel.token_pool import TokenPool
from muxk.kernel.work import (
    DECODE,
    DecodeWork,
    Item,
    Phase,
    ProbeWork,
    RowPages,
    Split,
    StepOutput,
)


class CostModel(Protocol):
    """Times of a model on a GPU, or on one of the GPUs that it is spread over."""

    @property
    def units(self) -> int: ...

    @property
    def layers(self) -> int: ...

    def phases(self, load: ItemLoad, units: int) -> Sequence[PhaseCost]:
        """What an item goes through on so many units when it runs alone; no phase takes 0 ns."""


class HostTimes(msgspec.Struct, frozen=True):
    """Of the one thread that launches."""

    decode_launch_ns: int
    prefill_layer_launch_ns: int
    wakeup_ns: int
    """From the end of an item to the host knowing it."""
    switch_ns: int
    """On top of the wait for an item on another lane."""


class SimGpuOptions(msgspec.Struct, frozen=True):
    """What a simulated GPU is beside its cost model."""

    name: str
    pages: int
    sharing: Sharing
    host: HostTimes
    granularity: int = 16
    """Units of a prefill lane come in steps of this; decode gets the rest."""
    menu: tuple[Split, ...] = ()
    """All splits, where a card has others than the steps make."""
    noise: float = 0.0
    """Sigma of an item's log-normal factor on its time alone."""
    seed: int = 0
    chunk_tokens_max: int = 1 << 20
    parked_bytes_per_token: int = 8192
    end_every: int | None = None
    """One sampled token in so many ends its sequence; None: outputs run to their limits."""


@dataclass(frozen=True, slots=True)
class GpuLane:
    """A queue on a fixed set of SMs."""

    name: str
    units: range
    number: int


class _Posted(msgspec.Struct, eq=False, gc=False):
    """A completion that was foreseen."""

    started_ns: int
    ended_ns: int
    timer: Timer


class SimGpu:
    """Implements `kernel.device.Device` in the runtime's own time."""

    def __init__(
        self,
        cost: CostModel,
        options: SimGpuOptions,
        pool: TokenPool | None = None,
        widen: Callable[[int], CostModel] | None = None,
        pages_of_one: int | None = None,
    ) -> None:
        """`pool` is one that several devices share, each with the next `pages_of_one` numbers; `widen` gives
        the cost of items on so many devices that work as one."""
        self.name = options.name
        self.units = cost.units
        self.layers = cost.layers
        self.pages = options.pages
        self.chunk_tokens_max = options.chunk_tokens_max
        self.parked_bytes_per_token = options.parked_bytes_per_token
        self.decode_ahead = 1
        self._cost = cost
        self.options = options
        self._pool = TokenPool(options.pages, options.end_every) if pool is None else pool
        self._widen = widen
        self._spread = None if pages_of_one is None else Spread(pages_of_one)
        self.width = 1
        self._timeline = Timeline(options.sharing, options.host.switch_ns)
        self._wakeup_ns = options.host.wakeup_ns
        self._lanes: dict[tuple[Phase, int], GpuLane] = {}
        self._outputs: dict[int, tuple[StepOutput, StepOutput | None]] = {}
        self._posted: dict[int, _Posted] = {}
        self._host_free_ns = 0
        self._noise = Noise(options.noise, mixed(options.seed))
        self._port: DevicePort | None = None

    def splits(self) -> tuple[Split, ...]:
        """Prefill in steps of the granularity, decode on the rest if that is half a step or more."""
        if self.options.menu:
            return self.options.menu
        step = self.options.granularity
        least = max(1, step // 2)
        prefill = range(step * ((self.units - least) // step), 0, -step)
        return tuple(Split(self.units - units, units) for units in prefill)

    def start(self, port: DevicePort) -> None:
        self._port = port

    def resize(self, width: int) -> None:
        """See `kernel.device.ElasticDevice`."""
        assert self._widen is not None, "only a device of an elastic server works with others"
        self.width = width
        self._cost = self._widen(width)

    def lane(self, phase: Phase, units: int) -> GpuLane:
        if units == self.units:
            phase = DECODE
        lane = self._lanes.get((phase, units))
        if lane is None:
            lane = self._lanes[phase, units] = self._make_lane(phase, units)
        return lane

    def _make_lane(self, phase: Phase, units: int) -> GpuLane:
        number = len(self._lanes)
        if units == self.units:
            return GpuLane("whole", range(units), number)
        if phase is DECODE:
            return GpuLane(f"decode@{units}", range(units), number)
        return GpuLane(f"prefill@{units}", range(self.units - units, self.units), number)

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        assert isinstance(lane, GpuLane)
        assert self._port is not None, "start the device before launching"
        now_ns = self._port.now_ns()
        for foreseen in self._plan(lane, item, after, now_ns):
            self._post(foreseen, now_ns)

    def steps_behind(self, lane: Lane, item_id: int, work: DecodeWork, pages: RowPages | None) -> SimSteps:
        """See `kernel.device.ForeseeingDevice`."""
        assert self._port is not None
        return SimSteps(
            StepParts(self._cost, self._pool, self._timeline, self._noise, self.options.host, self.layers),
            self._timeline.job(item_id),
            self._outputs[item_id][0].tokens,
            work,
            pages,
            self._host_free_ns,
            len(lane.units),
            self._port.quiet_until_ns(self._posted[item_id].timer),
        )

    def commit(self, steps: StepsAhead) -> None:
        """As if each of them had been launched when its time had come."""
        assert isinstance(steps, SimSteps)
        assert self._port is not None
        self._host_free_ns = steps.host_free_ns
        jobs = {job.job_id: job for job in steps.committed()}
        for item_id in [item_id for item_id in self._posted if item_id not in jobs]:
            self._port.cancel(self._posted.pop(item_id).timer)
        launched = {item_id: (StepOutput(tokens), None) for item_id, tokens in steps.outputs().items()}
        self._outputs = {item_id: launched.get(item_id) or self._outputs[item_id] for item_id in jobs}
        for job in jobs.values():
            self._post(job, self._port.now_ns())

    def _plan(self, lane: GpuLane, item: Item, after: Sequence[int], now_ns: int) -> list[Job]:
        """Launch an item; all whose ends are known now or have moved."""
        for ended in self._timeline.forget(now_ns):
            del self._outputs[ended]
            self._posted.pop(ended, None)
        load = load_of(item, self.layers)
        if self.width > 1 and self._spread is not None:
            load = self._spread.of(item, load)
        factor = self._noise.factor(item.item_id)
        alone = self._cost.phases(load, len(lane.units))
        phases = [(ns * factor, moved, waits) for ns, moved, waits in alone]
        ready_ns, launched_ns = self._host_launch(load, now_ns)
        decode = None if item.decode is None else self._pool.decode(item.decode)
        self._outputs[item.item_id] = (self._run(item), decode)
        job = Job(item.item_id, lane.number, phases, ready_ns, launched_ns, tuple(after))
        return self._timeline.add(job, now_ns)

    def discard(self, batch_id: int) -> None:
        """Nothing is parked here."""

    def reset(self) -> None:
        """Take back all completions: what was in flight is forgotten."""
        if self._port is not None:
            for posted in self._posted.values():
                self._port.cancel(posted.timer)
        self._posted.clear()
        self._outputs.clear()
        self._timeline.clear()
        self._pool.forget_steps()

    def describe(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        self._lanes.clear()

    def _host_launch(self, load: ItemLoad, now_ns: int) -> tuple[int, int]:
        """When its first kernel may start, and when the host has launched all of it.

        A decode step is one graph. Prefill layers are launched one by one, and the first runs meanwhile.
        """
        host = self.options.host
        begins_ns = now_ns if now_ns > self._host_free_ns else self._host_free_ns
        if load.chunk_tokens:
            ready_ns = begins_ns + host.prefill_layer_launch_ns
            self._host_free_ns = begins_ns + host.prefill_layer_launch_ns * load.layers
        else:
            ready_ns = self._host_free_ns = begins_ns + host.decode_launch_ns
        return ready_ns, self._host_free_ns

    def _run(self, item: Item) -> StepOutput:
        """Outputs are computed at the launch: no later one can change the pages that an item reads."""
        work = item.work
        if isinstance(work, DecodeWork):
            return self._pool.decode(work)
        if isinstance(work, ProbeWork) or not item.is_last:
            return StepOutput()
        return self._pool.prefill(work, range(item.first_token, item.last_token))

    def _post(self, job: Job, now_ns: int) -> None:
        """Foresee a completion; one that was foreseen at another time is taken back."""
        assert self._port is not None
        posted = self._posted.get(job.job_id)
        if posted is not None:
            if posted.started_ns == job.start_ns and posted.ended_ns == job.end_ns:
                return
            self._port.cancel(posted.timer)
        done = self._done(job)
        timer = self._port.post_after(done.ended_ns + self._wakeup_ns - now_ns, done)
        self._posted[done.item_id] = _Posted(done.started_ns, done.ended_ns, timer)

    def _done(self, job: Job) -> ItemDone:
        assert job.start_ns is not None
        assert job.end_ns is not None
        output, decode = self._outputs[job.job_id]
        return ItemDone(
            job.job_id,
            job.start_ns,
            job.end_ns,
            output.tokens,
            output.logprobs,
            output.prompt_logprobs,
            decode,
        )
