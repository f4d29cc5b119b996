"""Explanations of figures that are off, put to the test: the same runs with one thing changed.

A policy is changed in a copy, never in the one that ships.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from muxk.client.cells import Cell, Goal
from muxk.client.experiments import CellFailed, Sought
from muxk.client.goodput import Goodput, combine
from muxk.client.paper_extras import LOAD, idle_percent, p99_gap_ms, p99_ttft_per_token_ms
from muxk.client.paper_rows import (
    AGENT_8B,
    AGENT_70B,
    BUDGET_70B,
    LLAMA_8B,
    LLAMA_70B,
    SHAREGPT_8B,
    SHAREGPT_70B,
    THOUGHTS_70B,
    Setting,
    System,
    cell_of,
    device_of,
)
from muxk.client.paper_study import Found, Ratio, Study, near, paired

COPY = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {{name: {name}}}
spec:
  extends: {base}
  slo: {{tbt: {tbt}ms}}
  {change}
"""
ONE_THREAD = "limits: {backlog: 1, decode_ahead: 0}"
"""One host thread that launches nothing ahead: it learns of an end, then launches."""
SLOW_HOST = ",host.wakeup_ns*100,host.wakeup_ns*2.5"
"""20 us to 5 ms: what an engine spends between two steps."""
SHORT = 600
"""Requests of OpenThoughts that come for some ten to twenty minutes."""
EAGER = ",host.decode_launch_ns*60"
"""0.5 to 30 ms: a decode step whose kernels are launched one by one (80 layers of some 12)."""


@dataclass(frozen=True)
class Trial:
    """A goodput with something changed, beside the same ratio of the table."""

    name: str
    setting: Setting
    other: System
    """Over which the ratio is."""
    start: float
    other_start: float
    ours: Cell | None
    """None: MuxWise as in the table."""
    theirs: Cell | None
    seeds: tuple[int, ...]


def copy_of(folder: Path, base: str, name: str, change: str, tbt_ms: float) -> str:
    """The path of a copy of a shipped policy with one section of its own."""
    path = folder / f"{name}-{tbt_ms:g}.yaml"
    text = COPY.format(name=name, base=base, tbt=f"{tbt_ms:g}", change=change)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Bench:
    """What trials are made from."""

    folder: Path
    profiles: dict[str, str]
    """By device and model joined by a blank."""

    def cell(self, system: System, setting: Setting, budget: int | None = None, moved: str = "") -> Cell:
        profile = self.profiles.get(f"{device_of(system, setting, moved)} {setting.model}")
        return cell_of(system, setting, budget, profile, moved)

    def changed(self, cell: Cell, name: str, change: str) -> Cell:
        assert cell.tbt_ms is not None
        path = copy_of(self.folder, cell.policy, f"{cell.policy}-{name}", change, cell.tbt_ms)
        return msgspec.structs.replace(cell, policy=path)


def trials(bench: Bench) -> Iterator[Trial]:
    """All of them."""
    small = "chunked prefill with the budget of 256 tokens that the paper prints for 70B"
    large = "chunked prefill of 70B with a budget of 512 tokens"
    for name, setting, budget, start, other in (
        (small, SHAREGPT_8B, BUDGET_70B, 24.0, 19.0),
        (small, AGENT_8B, BUDGET_70B, 9.0, 4.0),
        (large, SHAREGPT_70B, 512, 20.0, 18.5),
        (large, AGENT_70B, 512, 1.66, 0.9),
    ):
        theirs = bench.cell(System.CHUNKED, setting, budget)
        yield Trial(name, setting, System.CHUNKED, start, other, None, theirs, (0, 1))
    slow = "both engines launch nothing ahead and spend 5 ms of the host between two items"
    for setting, budget, start, other in ((AGENT_8B, 1024, 8.0, 6.0), (AGENT_70B, BUDGET_70B, 1.5, 0.75)):
        ours = bench.changed(bench.cell(System.MUXWISE, setting, moved=SLOW_HOST), "one-thread", ONE_THREAD)
        theirs = bench.cell(System.CHUNKED, setting, budget, SLOW_HOST)
        theirs = bench.changed(theirs, "one-thread", ONE_THREAD)
        yield Trial(slow, setting, System.CHUNKED, start, other, ours, theirs, (0, 1))
    eager = "LoongServe launches nothing ahead and each decode step costs its host 30 ms (no CUDA graphs)"
    for setting, other, seeds in ((SHAREGPT_70B, 9.0, (0, 1)), (THOUGHTS_70B, 0.2, (0,))):
        theirs = bench.cell(System.LOONGSERVE, setting, moved=EAGER)
        theirs = bench.changed(theirs, "eager", "limits: {backlog: 1, decode_ahead: 0, decode_floor: 60s}")
        yield Trial(eager, setting, System.LOONGSERVE, 20.0, other, None, theirs, seeds)
    short = f"{SHORT} requests a run, so that it ends before the KV pool is full"
    ours, theirs = (
        msgspec.structs.replace(bench.cell(system, THOUGHTS_70B, budget), requests=SHORT)
        for system, budget in ((System.MUXWISE, None), (System.CHUNKED, BUDGET_70B))
    )
    yield Trial(short, THOUGHTS_70B, System.CHUNKED, 0.8, 0.5, ours, theirs, (0,))


MIX_70B = Setting(LLAMA_70B, "sharegpt+loogle", 100.0, requests=300)
MIX_8B = Setting(LLAMA_8B, "sharegpt+loogle", 50.0, requests=300)
GOODPUT: Mapping[str, float] = {"8B": 10.5, "70B": 1.39}
"""MuxWise's in Tool & Agent as two seeds found it once: requests a second, of which loads here are parts."""
IDLE, GAP, PER_TOKEN = "idle", "p99 gap", "p99 TTFT a token"


@dataclass(frozen=True)
class Single:
    """A figure of one run, or its difference to or ratio over another's."""

    name: str
    figure: str
    cell: Cell
    than: Cell | None = None


def singles(bench: Bench) -> Iterator[Single]:
    """Tests of the figures that are no goodput."""
    base = {
        size: msgspec.structs.replace(bench.cell(System.MUXWISE, setting), rate=LOAD * GOODPUT[size])
        for size, setting in (("8B", AGENT_8B), ("70B", AGENT_70B))
    }
    off = ("layers", "false"), ("polling", "false")
    nothing_ahead = "nothing launched ahead (one host thread)"
    thread = {size: bench.changed(cell, "one-thread", ONE_THREAD) for size, cell in base.items()}
    chunked = msgspec.structs.replace(
        bench.cell(System.CHUNKED, AGENT_70B, BUDGET_70B), rate=base["70B"].rate
    )
    chunked_slow = msgspec.structs.replace(chunked, device=chunked.device + SLOW_HOST)
    yield Single(f"idle, MuxWise, 70B: {nothing_ahead}", IDLE, thread["70B"])
    for rate in (0.66, 1.0):
        cell = msgspec.structs.replace(base["70B"], rate=rate)
        yield Single(f"idle, MuxWise, 70B, {rate / GOODPUT['70B']:.0%} of its goodput", IDLE, cell)
    yield Single(
        f"idle, chunked, 70B: {nothing_ahead}", IDLE, bench.changed(chunked, "one-thread", ONE_THREAD)
    )
    slow = bench.changed(chunked_slow, "one-thread", ONE_THREAD)
    yield Single("idle, chunked, 70B: nothing launched ahead, 5 ms of the host between two steps", IDLE, slow)
    for size, cell in thread.items():
        without = msgspec.structs.replace(cell, settings=off[:1])
        yield Single(f"no layer split, {size}: {nothing_ahead}", GAP, without, cell)
    for size, rate in (("8B", 3.6), ("70B", 0.66)):
        cell = msgspec.structs.replace(base[size], rate=rate, settings=off[:1])
        without = msgspec.structs.replace(cell, settings=off)
        share = f"{rate / GOODPUT[size]:.0%}"
        yield Single(f"nor polling, {size}, {share} of MuxWise's goodput", GAP, without, cell)
    for setting, rate in ((MIX_70B, 0.1), (MIX_70B, 0.2), (MIX_8B, 0.5), (MIX_8B, 1.0)):
        cell = msgspec.structs.replace(bench.cell(System.MUXWISE, setting), rate=rate)
        without = msgspec.structs.replace(cell, settings=(("preemption", "false"),))
        size = "70B" if setting is MIX_70B else "8B"
        yield Single(f"preemption, {size} at {rate:g} requests a second", PER_TOKEN, without, cell)


@dataclass(frozen=True)
class TrialFound:
    """The ratio with the change, and with the same seeds without it."""

    trial: Trial
    changed: Ratio | None
    unchanged: Ratio | None
    never: bool = False
    """With the change the other one meets its SLO at no rate."""


@dataclass(frozen=True)
class SingleFound:
    """What a run came to; None where one failed."""

    single: Single
    value: float | None


def bench_of(study: Study) -> Bench:
    settings = (AGENT_8B, AGENT_70B, SHAREGPT_8B)
    devices = [(setting, "") for setting in settings]
    devices += [(setting, SLOW_HOST) for setting in settings[:2]]
    named = [(device_of(System.MUXWISE, setting, moved), setting.model) for setting, moved in devices]
    profiles = {f"{device} {model}": study.profile_of(device, model) for device, model in named}
    return Bench(study.folder, profiles)


def run_trials(study: Study, found: Found, bench: Bench) -> list[TrialFound]:
    """Goodputs with something changed, in settings of the study."""
    asked = [trial for trial in trials(bench) if trial.setting in study.settings]
    sought = [
        Sought(cell, Goal.STRICT, near(start, study.tolerance_of(trial.setting)), trial.seeds)
        for trial in asked
        for cell, start in ((trial.ours, trial.start), (trial.theirs, trial.other_start))
        if cell is not None
    ]
    goodputs = iter(study.lab.goodputs(sought))
    results = []
    for trial in asked:
        nominal = [found.goodputs.get((trial.setting, each)) for each in (System.MUXWISE, trial.other)]
        ours = next(goodputs) if trial.ours is not None else nominal[0]
        theirs = next(goodputs) if trial.theirs is not None else nominal[1]
        unchanged = paired(_only(nominal[0], trial.seeds), nominal[1])
        changed = paired(_only(ours, trial.seeds), theirs)
        never = isinstance(theirs, Goodput) and not any(one.rate for one in theirs.seeds)
        results.append(TrialFound(trial, changed, unchanged, never))
    return results


def _only(goodput: Goodput | CellFailed | None, seeds: Sequence[int]) -> Goodput | CellFailed | None:
    if not isinstance(goodput, Goodput):
        return goodput
    return combine([one for one in goodput.seeds if one.seed in seeds])


def run_singles(study: Study, bench: Bench) -> list[SingleFound]:
    """Figures of single runs."""
    asked = list(singles(bench))
    cells = list(dict.fromkeys(cell for one in asked for cell in (one.cell, one.than) if cell is not None))
    outcomes = dict(zip(cells, study.outcomes(cells), strict=True))

    def figure(cell: Cell, of: str) -> float | None:
        outcome = outcomes[cell]
        if outcome.error:
            return None
        return _FIGURES[of](outcome.figures)

    def value(one: Single) -> float | None:
        own = figure(one.cell, one.figure)
        if one.than is None or own is None:
            return own
        other = figure(one.than, one.figure)
        if other is None:
            return None
        return own - other if one.figure == GAP else own / other

    return [SingleFound(one, value(one)) for one in asked]


_FIGURES: Mapping[str, Callable[[dict[str, Any]], float]] = {
    IDLE: idle_percent,
    GAP: p99_gap_ms,
    PER_TOKEN: p99_ttft_per_token_ms,
}
