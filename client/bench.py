"""`muxk bench`: the mixed load on a fresh server for every policy and run.

The server is a child process; the driver is this one, which does little else, because on a small machine both
share the cores. Policies take turns, so that a slow minute of the machine hits all of them.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import anyio
import msgspec
from muxk.client.aio import AsyncClient
from muxk.client.figures import PhaseFigures, RunRatios, phase_figures, run_ratios
from muxk.client.records import Phase, Record
from muxk.client.server_process import ServerProcess
from muxk.client.workload import Driver, MixedLoad

Tell = Callable[[str], None]
Choice = TypeVar("Choice")


class PolicyChoice(msgspec.Struct, frozen=True):
    """A policy with values of its params."""

    policy: str
    """A file or a shipped name."""
    settings: dict[str, str] = {}

    @property
    def label(self) -> str:
        """`chunked budget=64`: what the table calls it."""
        return " ".join([self.policy, *(f"{name}={value}" for name, value in self.settings.items())])

    @staticmethod
    def parse(text: str) -> PolicyChoice:
        """`chunked`, or `chunked:budget=64:other=1`."""
        policy, *settings = text.strip().split(":")
        pairs = [setting.partition("=") for setting in settings]
        return PolicyChoice(policy, {name.strip(): value.strip() for name, _, value in pairs})


@dataclass(frozen=True)
class BenchPlan:
    """What to measure."""

    policies: tuple[PolicyChoice, ...]
    runs: int
    load: MixedLoad
    slo_ms: float
    device: str = "auto"
    model: str | None = None
    dtype: str = "auto"


class RunResult(msgspec.Struct, frozen=True):
    """One policy, one run."""

    policy: str
    """As the table calls it."""
    run: int
    device: str
    model: str
    solo: PhaseFigures | None
    mixed: PhaseFigures | None
    ratios: RunRatios | None
    """None unless both phases were driven."""
    load_average: float
    """Of the machine when the run began."""
    server_state: dict[str, Any]
    """What the server said at the end."""
    details: dict[str, dict[str, Any]]
    """Lists of single times in seconds by phase, as `vllm bench serve --save-detailed` has them."""
    long_in: int = 0
    """Prompt tokens of the long requests; 0 without a mixed phase."""


def run_bench(plan: BenchPlan, tell: Tell) -> list[RunResult]:
    """All runs, in the order in which they were made. Raises ClientError when a server fails."""
    results = []
    for run in range(plan.runs):
        for policy in turn(plan.policies, run):
            tell(f"run {run + 1} of {plan.runs}, {policy.label}: starting a server")
            results += _one_run(plan, policy, run, tell)
    return results


def turn(policies: tuple[Choice, ...], run: int) -> tuple[Choice, ...]:
    """The policies in the order of one run: each run starts with another one."""
    first = run % len(policies)
    return policies[first:] + policies[:first]


def _one_run(plan: BenchPlan, policy: PolicyChoice, run: int, tell: Tell) -> list[RunResult]:
    """One result for each length of long prompts, or one without any."""
    load_average = os.getloadavg()[0]
    load = replace(plan.load, seed=plan.load.seed + run)
    with ServerProcess(
        policy.policy, settings=policy.settings, device=plan.device, model=plan.model, dtype=plan.dtype
    ) as server:
        endpoint = server.wait_ready()
        with _no_collections():
            return anyio.run(_measure, plan, load, policy.label, run, endpoint, load_average, tell)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage collections of the driver would be taken for stalls of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _measure(
    plan: BenchPlan, load: MixedLoad, policy: str, run: int, endpoint: str, load_average: float, tell: Tell
) -> list[RunResult]:
    async with AsyncClient(endpoint) as client:
        driver = Driver(client, load)
        phases = {phase.name: phase for phase in await driver.run(lambda text: tell(f"  {text} phase"))}
        state = await client.state()
        about = client.server
    figures = {name: phase_figures(driver.records, phase, plan.slo_ms) for name, phase in phases.items()}
    solo = figures.get("solo")
    results = []
    for longs in load.longs or (None,):
        mixed = None if longs is None else msgspec.structs.replace(figures[longs.phase], name="mixed")
        own = {"solo": "solo"} | ({} if longs is None else {"mixed": longs.phase})
        results.append(
            RunResult(
                policy=policy,
                run=run,
                device=about.device,
                model=about.model,
                solo=solo,
                mixed=mixed,
                ratios=run_ratios(solo, mixed) if solo is not None and mixed is not None else None,
                load_average=load_average,
                server_state=state,
                details={
                    name: details(driver.records, phases[phase])
                    for name, phase in own.items()
                    if phase in phases
                },
                long_in=0 if longs is None else longs.tokens,
            )
        )
    return results


def details(records: list[Record], phase: Phase) -> dict[str, Any]:
    """Single times in seconds of the requests that were submitted in a phase, cut at its end."""
    rows = [record for record in records if phase.holds(record.submitted_ns)]
    inside = [[at_ns for at_ns in record.arrivals_ns if phase.holds(at_ns)] for record in rows]
    return {
        "kinds": [record.kind for record in rows],
        "input_lens": [record.prompt_tokens for record in rows],
        "output_lens": [len(arrivals) for arrivals in inside],
        "ttfts": [
            (arrivals[0] - record.submitted_ns) / 1e9 if arrivals else None
            for record, arrivals in zip(rows, inside, strict=True)
        ],
        "itls": [
            [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(arrivals)]
            for arrivals in inside
        ],
        "latencies": [
            (record.ended_ns - record.submitted_ns) / 1e9 if phase.holds(record.ended_ns) else None
            for record in rows
        ],
        "errors": [record.error for record in rows],
    }
