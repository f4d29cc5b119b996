"""`python -m muxk.client.not_circular`: does the estimator work on a card that it was not measured on?

A profile is measured on a simulated card. The highest rate is found at which muxwise meets its TBT SLO there,
with a stable queue. Then the same profile is used on cards whose contention and efficiencies are off by 15 %
(and 30 %, reported only), at 0.9 times that rate: P99 of the gaps between tokens must still meet the SLO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.policy_files import OpenedPolicy
from muxk.actors.profiling import measure
from muxk.client.cells import WITH_TBT
from muxk.client.goodput import Search, search_rate
from muxk.client.sim_run import SimPlan, simulate
from muxk.client.workload_names import Traffic, find_workload
from muxk.kernel.estimates import Estimates
from muxk.kernel.policy import PolicyText
from muxk.policies.engine import compile_policy
from muxk.profiles.grid import FULL, QUICK
from muxk.profiles.perturbation import WORST

LOAD = 0.9
ASKED = 15
"""Percent by which a card may be off."""
REPORTED = 30
CARDS: tuple[int | str, ...] = (1, 2, 3, WORST)
"""Seeds of cards that are off; WORST is slower in everything."""


@dataclass(frozen=True)
class Setting:
    """What is served on what."""

    device: str
    model: str
    workload: str
    tbt: str
    requests: int
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """One run."""

    device: str
    rate: float
    p99_tbt_ms: float
    gaps_over_share: float
    kept: bool
    """At most 1 % of the gaps are over the SLO."""
    stable: bool
    """So is the queue."""


def run_at(setting: Setting, rate: float, estimates: Estimates, device: str) -> Result:
    """Serve on a card with the estimates of, perhaps, another."""
    text = WITH_TBT.format(name="muxwise", tbt=setting.tbt)
    opened = OpenedPolicy(compile_policy(text, "muxwise.yaml"), PolicyText(text, "muxwise.yaml"), None)
    gpu = replace(open_gpu_backend(device, setting.model, None, setting.seed), profile=estimates)
    workload = find_workload(setting.workload, Traffic(rate, seed=setting.seed))
    run = simulate(SimPlan(opened, gpu, workload, setting.requests, None, setting.seed))
    judged = run.measures.judge()
    return Result(
        device,
        rate,
        run.measures.figures()["p99_itl_ms"],
        judged.gaps_over_share,
        judged.gaps_over_share <= run.measures.objectives.gaps_over_max,
        judged.stable,
    )


def highest_rate(setting: Setting, estimates: Estimates, search: Search) -> float:
    """At which the SLO is met with a stable queue on the card that was measured; 0 if at none."""

    def met(rate: float, seed: int) -> bool:
        found = run_at(replace(setting, seed=seed), rate, estimates, setting.device)
        return found.kept and found.stable

    return search_rate(met, search, setting.seed).rate


def main(
    device: Annotated[str, typer.Option(help="The card that is measured.")] = "sim:a100",
    model: Annotated[str, typer.Option()] = "llama-3.1-8b",
    workload: Annotated[str, typer.Option()] = "toolagent",
    tbt: Annotated[str, typer.Option(help="The TBT SLO.")] = "50ms",
    requests: Annotated[int, typer.Option(min=20)] = 200,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, help="Where the SLO is known to be met; then nothing is searched."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A coarse profile.")] = False,
) -> None:
    """Print the rate, and P99 TBT on cards that are off. Exit code 1 when one that is off by 15 % is over."""
    setting = Setting(device, model, workload, tbt, requests)
    profile = measure(open_gpu_backend(device, model).backend, QUICK if quick else FULL)
    search = Search(start=2.0, lowest=0.125, highest=64.0, tolerance=0.1, runs_max=12, checks=())
    if rate is None:
        rate = highest_rate(setting, profile.estimates, search)
    print(f"{model} on {device}, {workload}, TBT SLO {tbt}: met up to {rate:.2f} requests/s", flush=True)
    if not rate:
        raise typer.Exit(1)
    results = []
    for card, is_asked in _cards(device):
        result = run_at(setting, LOAD * rate, profile.estimates, card)
        results.append(result.kept or not is_asked)
        print(_line(result), flush=True)
    if not all(results):
        raise typer.Exit(1)


def _cards(device: str) -> Iterator[tuple[str, bool]]:
    """Cards, and whether the SLO must be met there."""
    yield device, True
    for percent in (ASKED, REPORTED):
        yield from ((f"{device},off={percent}%:{seed}", percent == ASKED) for seed in CARDS)


def _line(result: Result) -> str:
    verdict = f"{'kept' if result.kept else 'OVER'}{'' if result.stable else ', the queue grows'}"
    return (
        f"{result.device:<28} {result.rate:6.2f} requests/s  P99 TBT {result.p99_tbt_ms:6.1f} ms  "
        f"over {result.gaps_over_share:6.2%}  {verdict}"
    )


if __name__ == "__main__":
    typer.run(main)
