"""How far an assumed constant of the card moves the times of what a system runs, from the cost model alone.

No run is needed for it: an item's time is a formula of the constants. A constant that moves no step and no
prompt of a system by as much as `MATTERS` is not run; one that is in no formula of them does nothing at all.

What an item costs the host is taken as if nothing of it were hidden behind the kernels that run meanwhile,
which is more than a run pays: what is found for launches and wake-ups is a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, quantiles

from muxk.actors.gpu_backend import parse_gpu
from muxk.client.paper_rows import Setting, System, device_of
from muxk.client.workload_names import Traffic, find_workload
from muxk.kernel.bandwidth import Sharing, rates_of_two
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.work import attention_pairs
from muxk.profiles.cost import RooflineCost, kv_pages
from muxk.profiles.gpu import GpuProfile, load_gpu
from muxk.profiles.operators import ModelShape, load_shape
from muxk.profiles.scaling import assumed_constants, scaled

FACTORS = (0.7, 1.3)
MATTERS = 0.05
"""Part of an item's time from which a constant is run."""
SAMPLED = 2000
"""Requests that a workload's means are taken of."""
REUSED: Mapping[str, int] = {"toolagent": 4905, "conversation": 4496, "openthoughts": 243}
"""Mean tokens of a prompt that are in the KV pool (table 1); 0 for others."""
BATCH_TOKENS = 512
"""Of a prefill of short prompts."""
DECODE_UNITS = (28, 60)
"""Of 108: what decode has in typical splits, prefill has the rest."""
ROUNDS = 20

Probes = Mapping[str, float]
"""ns, or pages, by what was asked."""


@dataclass(frozen=True)
class Lengths:
    """What a workload's requests look like, in tokens."""

    prompt: int
    long: int
    """The prompt that one in twenty is longer than."""
    reused: int
    output: int


def lengths_of(workload: str) -> Lengths:
    """Of a synthetic workload."""
    requests = islice(find_workload(workload, Traffic(1.0)).requests(), SAMPLED)
    sizes = [(request.prompt_tokens, request.output_tokens) for request in requests]
    prompts = [prompt for prompt, _ in sizes]
    long = quantiles(prompts, n=20)[-1]
    return Lengths(
        round(fmean(prompts)), round(long), REUSED.get(workload, 0), round(fmean(o for _, o in sizes))
    )


@dataclass(frozen=True)
class Subject:
    """A system in a setting at its goodput."""

    setting: Setting
    system: System
    rate: float
    budget: int = BATCH_TOKENS


def movable() -> list[str]:
    """All assumed constants of the paper's card."""
    return list(assumed_constants(load_gpu("a100")))


def effects(subject: Subject, constants: Sequence[str]) -> dict[str, float]:
    """By constant: the largest part by which times 0.7 or times 1.3 moves one of the subject's probes."""
    profile, shape = load_gpu("a100"), load_shape(subject.setting.model)
    lengths = lengths_of(subject.setting.workload)
    nominal = _probes(subject, profile, shape, lengths)
    found = {}
    for constant in constants:
        moved = [_probes(subject, scaled(profile, constant, factor), shape, lengths) for factor in FACTORS]
        found[constant] = max(abs(one[name] / nominal[name] - 1.0) for one in moved for name in nominal)
    return found


def _probes(subject: Subject, profile: GpuProfile, shape: ModelShape, lengths: Lengths) -> Probes:
    """Times of typical items of a system, and the pages of its pool."""
    choice = parse_gpu(device_of(subject.system, subject.setting))
    items = _Items(RooflineCost(profile, shape, choice.tp), profile, lengths)
    rows = items.rows(subject.rate / max(1, choice.devices // 2))
    found = {"pages": float(kv_pages(profile, shape, choice.tp))}
    match subject.system:
        case System.CHUNKED:
            chunk = max(1, subject.budget - rows)
            found.update(items.fused(chunk, rows, lengths.prompt), step=items.step(rows, items.whole))
            found.update({f"long {k}": v for k, v in items.fused(chunk, rows, lengths.long).items()})
        case System.MUXWISE:
            found.update(items.multiplexed(rows))
        case System.LOONGSERVE:
            found.update(items.apart(rows, 0))
        case System.STATIC | System.TEMPORAL:
            found.update(items.apart(rows, lengths.reused))
    return found


class _Items:
    """Times of items on one device."""

    def __init__(self, cost: RooflineCost, profile: GpuProfile, lengths: Lengths) -> None:
        self._cost, self._profile, self._lengths = cost, profile, lengths
        self.whole = cost.units
        co_run = profile.co_run
        bandwidth = profile.card.bandwidth * profile.gemm.bandwidth_efficiency
        self._sharing = Sharing(bandwidth, co_run.interference, co_run.slowdown_max)

    def rows(self, rate: float) -> int:
        """Rows that decode, by Little's law: rate x answer x step."""
        rows = 1
        for _ in range(ROUNDS):
            step_s = self._cost.total_ns(self._decode(rows), self.whole) / 1e9
            rows = max(1, round(rate * self._lengths.output * step_s))
        return rows

    def step(self, rows: int, units: int) -> float:
        return self._cost.total_ns(self._decode(rows), units) + self._host_of_step()

    def fused(self, chunk: int, rows: int, prompt: int) -> Probes:
        """A step of decode with a chunk that ends a prompt."""
        new = min(chunk, prompt)
        load, decode = self._prompt(new, prompt - new), self._decode(rows)
        both = ItemLoad(
            load.layers,
            rows,
            decode.decode_context,
            1,
            new,
            load.chunk_pairs,
            load.chunk_context,
            rows + new,
            rows + 1,
        )
        return {"fused": self._with_launches(self._cost.total_ns(both, self.whole))}

    def apart(self, rows: int, reused: int) -> Probes:
        """A step and prompts, each on a whole device."""
        found = {"step": self.step(rows, self.whole)}
        for name, load in self._prompts(reused):
            found[name] = self._with_launches(self._cost.total_ns(load, self.whole))
        return found

    def multiplexed(self, rows: int) -> Probes:
        """A step and prompts beside each other, and alone."""
        found = dict(self.apart(rows, self._lengths.reused))
        for units in DECODE_UNITS:
            for name, load in self._prompts(self._lengths.reused):
                step, prompt = self._beside(self._decode(rows), units, load, self.whole - units)
                found[f"step@{units} beside {name}"] = step + self._host_of_step()
                found[f"{name} beside step@{units}"] = self._with_launches(prompt)
        return found

    def _beside(self, decode: ItemLoad, units: int, prompt: ItemLoad, others: int) -> tuple[float, float]:
        """Times of both when each has the other beside it all the time, phase by phase."""
        step, chunk = self._cost.phases(decode, units), self._cost.phases(prompt, others)
        step_ns, chunk_ns = sum(phase.ns for phase in step), sum(phase.ns for phase in chunk)
        slowed = [0.0, 0.0]
        for one in step:
            for two in chunk:
                speeds = rates_of_two(
                    one.bytes / one.ns, two.bytes / two.ns, one.waits, two.waits, self._sharing
                )
                slowed[0] += one.ns * two.ns / chunk_ns / speeds[0]
                slowed[1] += two.ns * one.ns / step_ns / speeds[1]
        return slowed[0], slowed[1]

    def _prompts(self, reused: int) -> Iterator[tuple[str, ItemLoad]]:
        lengths = self._lengths
        if lengths.prompt < BATCH_TOKENS:
            yield "prompts", self._prompt(BATCH_TOKENS, 0)
            return
        for name, tokens in (("prompt", lengths.prompt), ("long prompt", lengths.long)):
            yield name, self._prompt(tokens - reused, reused)

    def _prompt(self, new: int, reused: int) -> ItemLoad:
        pairs = attention_pairs((new,), (reused,))
        return ItemLoad(self._cost.layers, 0, 0, 1, new, pairs, new + reused, new, 1)

    def _decode(self, rows: int) -> ItemLoad:
        context = self._lengths.prompt + self._lengths.output // 2
        return ItemLoad(self._cost.layers, rows, rows * context, 0, 0, 0, 0, rows, rows)

    def _host_of_step(self) -> float:
        host = self._profile.host
        return host.decode_launch_ns + host.wakeup_ns + host.switch_ns

    def _with_launches(self, ns: float) -> float:
        """Layers are launched one by one while the first run: the longer of the two, and the first launch."""
        host, layers = self._profile.host, self._cost.layers
        launches = host.prefill_layer_launch_ns * layers
        return (
            max(ns + host.prefill_layer_launch_ns, launches + ns / layers) + host.wakeup_ns + host.switch_ns
        )
