"""`muxk profile` without its command line: measures a device through the production arbiter, fits, and says
what it found. Simulated GPUs run in virtual time, all else in real time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Protocol

import anyio
from muxk.actors.backends import Backend
from muxk.actors.profiler import Measurement, Profiler, ProfilingWatch
from muxk.actors.refs import Refs
from muxk.kernel.actor import ActorSpec
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.devices.sim_gpu import SimGpu
from muxk.kernel.estimates import Estimates
from muxk.kernel.policy import PolicyBook
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.supervisor import CrashReport
from muxk.kernel.trace import Trace
from muxk.kernel.virtual import VirtualRuntime
from muxk.kernel.work import Phase
from muxk.policies.engine import load_policy
from muxk.profiles.contention import contention_of
from muxk.profiles.grid import (
    BESIDE_MAX,
    OVERLAP,
    OVERLAP_NS,
    PROBE_LAYERS,
    Limits,
    Shape,
    Size,
    co_run_shapes,
    decode_sample,
    levels,
    prefill_sample,
    solo_shapes,
)
from muxk.profiles.predictor import fit_decode, fit_prefill
from muxk.profiles.profile_file import (
    Accuracy,
    PartialLine,
    Profile,
    ProfileError,
    ProfileKey,
    load_profile,
    make_key,
)

STEP_NS = 10_000_000_000
"""Of virtual time between two looks at the progress."""
LOOK_S = 0.5
"""The same of real time."""
TRACE_RECORDS = 64

Tell = Callable[[str, float], None]
"""(what is measured, share done from 0 to 1)."""


def key_of(backend: Backend) -> ProfileKey:
    """What a profile must say to be of this device and model."""
    device, identity = backend.device, backend.identity
    return make_key(
        device.name.partition("#")[0],  # one of several that are alike
        device.units,
        device.splits(),
        backend.model,
        device.layers,
        identity.dims,
        identity.dtype,
        identity.fingerprint,
    )


def profiled(backend: Backend, path: Path) -> Estimates:
    """The tables of a profile of this device and model. Raises ProfileError."""
    return load_profile(path, key_of(backend)).estimates


class Campaign(Protocol):
    """Measurements that belong together."""

    backend: Backend
    finished: bool

    @property
    def label(self) -> str:
        """What is measured now."""

    @property
    def share(self) -> float:
        """Done, from 0 to 1."""

    def next_stage(self) -> Sequence[Measurement]: ...

    def take(self, measured: Measurement, ns: int, covered: bool) -> None: ...


@dataclass
class Profiling:
    """One run: what is measured, what was found, and how far it is."""

    backend: Backend
    size: Size
    found: Mapping[str, Sequence[PartialLine]]
    """By the key of a shape: earlier measurements, and those of this run as `keep` adds them."""
    keep: Callable[[PartialLine], None]
    limits: Limits
    solo: list[Shape] = field(init=False)
    co_runs: list[Shape] = field(init=False)
    finished: bool = False
    label: str = "alone"
    _wanted: int = 0
    _stage: int = 0
    _fitted: Estimates | None = None

    def __post_init__(self) -> None:
        self.grid = levels(self.limits, self.size)
        self.solo = solo_shapes(self.limits, self.size)
        self.co_runs = co_run_shapes(self.limits, self.grid)
        self._wanted = len(self.solo) * self.size.repeats + len(self.co_runs)
        self._done = sum(len(lines) for lines in self.found.values())

    @property
    def share(self) -> float:
        return min(1.0, self._done / self._wanted)

    @property
    def measurements(self) -> int:
        """In all, those of earlier runs included."""
        return self._wanted

    def next_stage(self) -> Sequence[Measurement]:
        """Everything alone, repeat by repeat; then, sized by what was fitted to that, the co-runs."""
        self._stage += 1
        if self._stage == 1:
            return [
                Measurement(shape, self._layers(shape))
                for repeat in range(self.size.repeats)
                for shape in self.solo
                if len(self.found.get(shape.key, ())) <= repeat
            ]
        if self._stage == 2:
            self.label = "beside each other"
            missing = [shape for shape in self.co_runs if not self.found.get(shape.key)]
            return [self._sized(shape) for shape in missing]
        return []

    def _layers(self, shape: Shape) -> int:
        layers = self.limits.layers
        return layers if shape.phase is Phase.DECODE else min(layers, PROBE_LAYERS)

    def _sized(self, shape: Shape) -> Measurement:
        """With as many prefill layers beside it as it takes to outlast the step."""
        solo = self.fitted()
        step_ns = solo.decode_ns(shape.units, shape.rows, shape.total_context)
        beside = shape.beside(0)
        pairs = Shape(Phase.PREFILL, beside.units, 1, beside.new_tokens, beside.context_tokens).pairs
        layer_ns = max(1.0, solo.prefill_layer_ns(beside.units, beside.new_tokens, pairs))
        layers = max(1, math.ceil((OVERLAP * step_ns + OVERLAP_NS) / layer_ns))
        each = min(self.limits.layers, layers)
        return Measurement(shape, self.limits.layers, min(BESIDE_MAX, math.ceil(layers / each)), each)

    def take(self, measured: Measurement, ns: int, covered: bool) -> None:
        self._done += 1
        self.keep(PartialLine(measured.shape.key, ns, covered))

    # --- what came out ---

    def fitted(self) -> Estimates:
        """Solo times. Raises ProfileError, MissingSciPy."""
        if self._fitted is None:
            decode = [shape for shape in self._measured_solo() if shape.phase is Phase.DECODE]
            prefill = [shape for shape in self._measured_solo() if shape.phase is Phase.PREFILL]
            if not decode or not prefill:
                raise ProfileError(f"all probes on {self.backend.device.name} failed; its log says why")
            self._fitted = Estimates(
                self.limits.layers,
                fit_decode([decode_sample(shape, self._ns(shape)) for shape in decode]),
                fit_prefill(
                    [prefill_sample(shape, self._layers(shape), self._ns(shape)) for shape in prefill]
                ),
            )
        return self._fitted

    def _measured_solo(self) -> list[Shape]:
        return [shape for shape in self.solo if self._ns(shape) > 0]

    def _ns(self, shape: Shape) -> float:
        """Median of what did not fail; 0 if all did."""
        times = [line.ns for line in self.found.get(shape.key, ()) if line.ns > 0]
        return float(median(times)) if times else 0.0

    def profile(self) -> Profile:
        """Raises ProfileError, MissingSciPy."""
        solo = self.fitted()
        co_runs = {shape: self._ns(shape) for shape in self.co_runs}
        co_runs = {shape: ns for shape, ns in co_runs.items() if ns > 0}
        table = contention_of(co_runs, solo.decode, self.limits, self.grid)
        slowest = max(
            (ns / solo.decode_ns(s.units, s.rows, s.total_context) for s, ns in co_runs.items()), default=1.0
        )
        lines = chain.from_iterable(self.found.get(shape.key, ()) for shape in co_runs)
        return Profile(
            key_of(self.backend),
            self.size.name,
            Estimates(solo.layers, solo.decode, solo.prefill, table),
            self._accuracy(Phase.DECODE),
            self._accuracy(Phase.PREFILL),
            len(co_runs),
            round(slowest, 4),
            sum(not line.covered for line in lines),
        )

    def _accuracy(self, phase: Phase) -> Accuracy:
        solo = self.fitted()
        errors = []
        for shape in self._measured_solo():
            if shape.phase is phase is Phase.DECODE:
                predicted = solo.decode_ns(shape.units, shape.rows, shape.total_context)
            elif shape.phase is phase:
                tokens = shape.rows * shape.new_tokens
                predicted = solo.prefill_layer_ns(shape.units, tokens, shape.pairs) * self._layers(shape)
            else:
                continue
            errors.append(abs(predicted / self._ns(shape) - 1.0))
        return Accuracy(len(errors), round(median(errors), 4), round(max(errors), 4))


def plan_profile(
    backend: Backend,
    size: Size,
    batch_max: int,
    found: Mapping[str, Sequence[PartialLine]],
    keep: Callable[[PartialLine], None],
) -> Profiling:
    """What is to be measured; `found` is read again and again, so `keep` has to add to it."""
    limits = Limits.of(backend.device, backend.max_context_tokens, batch_max)
    return Profiling(backend, size, found, keep, limits)


def run_profile(profiling: Profiling, tell: Tell, flush: Callable[[], None]) -> Profile:
    """Measure what is missing, and fit. Raises ProfileError, MissingSciPy."""
    run_campaign(profiling, tell, flush)
    return profiling.profile()


def run_campaign(campaign: Campaign, tell: Tell, flush: Callable[[], None]) -> None:
    """Measure everything; `flush` is called now and then. Raises ProfileError."""
    if isinstance(campaign.backend.device, SimGpu):
        _run_virtual(campaign, tell, flush)
    else:
        anyio.run(_run_real, campaign, tell, flush)


def measure(backend: Backend, size: Size, batch_max: int = 512) -> Profile:
    """A profile that is kept nowhere."""
    found: dict[str, list[PartialLine]] = {}
    profiling = plan_profile(
        backend, size, batch_max, found, lambda line: found.setdefault(line.shape, []).append(line)
    )
    return run_profile(profiling, lambda what, share: None, lambda: None)


def _specs(campaign: Campaign, finished: Callable[[], None]) -> list[ActorSpec]:
    refs, book = Refs(), PolicyBook()
    sha = book.add(load_policy("inflight"))
    profiler = partial(Profiler, refs, campaign.next_stage, campaign.take, finished)
    return [
        ActorSpec(refs.gateway.name, ProfilingWatch, ProfilingWatch, permanent=True),
        ActorSpec(refs.arbiter.name, partial(Arbiter, campaign.backend.device, book, sha, refs), Arbiter),
        ActorSpec(refs.estimator.name, profiler, Profiler),
    ]


@dataclass
class _Ending:
    """Why a run ends."""

    campaign: Campaign
    crash: str = ""

    def finished(self) -> None:
        self.campaign.finished = True

    def crashed(self, report: CrashReport) -> None:
        self.crash = self.crash or f"{report.actor} crashed: {report.reason}"

    def check(self, stop_reason: str | None) -> None:
        """Raises ProfileError when the run can not go on."""
        if self.crash or (stop_reason and not self.campaign.finished):
            name = self.campaign.backend.device.name
            raise ProfileError(f"measuring {name} failed: {self.crash or stop_reason}")


def _run_virtual(campaign: Campaign, tell: Tell, flush: Callable[[], None]) -> None:
    ending = _Ending(campaign)
    runtime = VirtualRuntime(
        _specs(campaign, ending.finished),
        trace=Trace(TRACE_RECORDS),
        encode_every=1 << 62,
        report=ending.crashed,
    )
    campaign.backend.device.start(runtime.port("arbiter"))
    while not campaign.finished:
        runtime.run_until(runtime.now_ns() + STEP_NS)
        ending.check(runtime.stop_reason)
        flush()
        tell(campaign.label, campaign.share)
    runtime.request_stop("all is measured")


async def _run_real(campaign: Campaign, tell: Tell, flush: Callable[[], None]) -> None:
    ending = _Ending(campaign)

    def finished() -> None:
        ending.finished()
        runtime.request_stop("all is measured")

    runtime = RealtimeRuntime(_specs(campaign, finished), trace=Trace(), report=ending.crashed)
    campaign.backend.device.start(runtime.port("arbiter"))

    async def look() -> None:
        while True:
            await anyio.sleep(LOOK_S)
            flush()
            tell(campaign.label, campaign.share)

    reason = ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        reason = await runtime.run()
        tasks.cancel_scope.cancel()
    flush()
    ending.check(reason)
