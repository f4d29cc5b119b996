"""What `muxk compare` says: tables for the terminal, and JSON that is the same whatever machine ran it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec
from muxk.actors.gpu_backend import parse_gpu
from muxk.client import first_look, paired
from muxk.client.cells import Bins, Goal, command_of
from muxk.client.compare import AtRate, Entry, Study
from muxk.client.experiments import CellFailed
from muxk.client.goodput import Goodput, Limit
from muxk.client.quantiles import pooled, quantile_ms
from muxk.policies.problems import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

VERSION = 1
"""Of the JSON's form."""
REQUESTS_FEW = 100
SECONDS_FEW = 30
"""Of traffic: in less a server that falls behind by a few per cent is not seen to."""
REASON_MAX = 300
"""Characters of a reason in a table."""


@dataclass(frozen=True)
class Origin:
    """Where results come from, so that they can be made again."""

    command: tuple[str, ...]
    muxk: str
    code: str
    """Digest of the code that ran."""

    @property
    def command_line(self) -> str:
        return shlex.join(self.command).encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Summary:
    """What one contender did at one rate, over all seeds."""

    ttft: Bins
    tbt: Bins
    residency: dict[str, float]
    """Share of the time by split, as `decode+prefill` units."""
    idle: dict[str, float]
    """Share of all unit time by cause; empty where it was not accounted for."""
    means: dict[str, float]
    """Of the other figures, over the seeds."""
    over_tbt: float
    """Of all gaps: those over the TBT SLO."""
    met: dict[Goal, int]
    """Seeds whose run met the objectives."""


MEANS = ("request_throughput", "request_goodput", "output_throughput", "kv_hit_rate")


def summary(at: AtRate) -> Summary | None:
    """None where a run came to nothing."""
    if at.error:
        return None
    figures = [outcome.figures for outcome in at.outcomes]
    gaps = [sum(values for _, values in outcome.tbt) for outcome in at.outcomes]
    over = [one["verdicts"]["gaps_over_share"] * count for one, count in zip(figures, gaps, strict=True)]
    return Summary(
        ttft=pooled(outcome.ttft for outcome in at.outcomes),
        tbt=pooled(outcome.tbt for outcome in at.outcomes),
        residency=_shares([one["split_residency_ms"] for one in figures]),
        idle=_idle(figures),
        means={name: sum(one[name] for one in figures) / len(figures) for name in MEANS},
        over_tbt=sum(over) / max(1, sum(gaps)),
        met={goal: sum(outcome.meets(goal) for outcome in at.outcomes) for goal in Goal},
    )


def _shares(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    whole = sum(totals.values())
    return {name: value / whole for name, value in totals.items()} if whole else {}


def _idle(figures: Sequence[dict[str, Any]]) -> dict[str, float]:
    accounts = [one.get("idle") for one in figures]
    if not all(accounts):
        return {}
    whole = sum(one["unit_seconds"] for one in accounts if one)
    causes: dict[str, float] = {}
    for one in accounts:
        for cause, account in (one or {}).get("causes", {}).items():
            causes[cause] = causes.get(cause, 0.0) + account["unit_seconds"]
    return {cause: seconds / whole for cause, seconds in causes.items()} if whole else {}


def gpus_of(entry: Entry) -> int:
    """GPUs that a contender uses."""
    choice = parse_gpu(entry.contender.device)
    return choice.tp * choice.devices


def goodput_in_words(found: Goodput | CellFailed | None) -> str:
    """`3.2 (3.0-3.4)`, with what it lacks."""
    if found is None:
        return "-"
    if isinstance(found, CellFailed):
        return f"failed: {_cut(str(found))}"
    if all(one.limit is Limit.BELOW_LOWEST for one in found.seeds):
        return "never met"
    if all(one.limit is Limit.ABOVE_HIGHEST for one in found.seeds):
        return f"over {found.rate:.3g}: met at every rate"
    interval = f" ({found.low:.3g}-{found.high:.3g})" if len(found.seeds) > 1 else ""
    notes = ("" if found.exact else " ?") + ("" if found.monotone else " *")
    return f"{found.rate:.3g}{interval}{notes}"


def _cut(text: str) -> str:
    shown = " ".join(visible(text).split())
    return shown if len(shown) <= REASON_MAX else f"{shown[: REASON_MAX - 3]}..."


def tables(study: Study, entries: Sequence[Entry], console: Console) -> Iterator[Table]:
    """For each workload: goodput, and what was measured at the rates."""
    from rich.table import Table

    for workload in study.workloads:
        of_workload = [entry for entry in entries if entry.workload == workload]
        title = f"{visible(workload)}, {study.template.model}: goodput in requests/s"
        made = Table(title=title, title_justify="left")
        for column in ("policy", "GPUs", *(goal.value for goal in study.goals)):
            made.add_column(column)
        for entry in of_workload:
            found = [entry.goodputs.get(goal) for goal in study.goals]
            words = [goodput_in_words(one) for one in found]
            if entry.error:
                words = [f"failed: {_cut(entry.error)}", *([""] * (len(study.goals) - 1))]
            made.add_row(visible(entry.contender.label), str(gpus_of(entry)), *words)
        if study.goals:
            yield made
        yield from _rates_tables(workload, of_workload, console)


WIDE = 10_000
"""Characters: more than any table takes."""
COLUMNS = ("TTFT P50", "P99", "TBT P50", "P99", "max", "over SLO", "KV hits", "idle", "strict", "joint")


def _rates_tables(workload: str, entries: Sequence[Entry], console: Console) -> Iterator[Table]:
    """One; where the console is too narrow for it, one for each rate, with a line for each figure; none where
    nothing was measured."""
    from rich.measure import Measurement

    if not any(entry.at for entry in entries):
        return

    wide = _rates_table(workload, entries)
    if Measurement.get(console, console.options.update(width=WIDE), wide).maximum <= console.width:
        yield wide
        return
    for rate in dict.fromkeys(at.rate for entry in entries for at in entry.at):
        yield _table_at(rate, workload, entries)


def _rates_table(workload: str, entries: Sequence[Entry]) -> Table:
    from rich.table import Table

    made = Table(title=f"{visible(workload)}: at given rates", title_justify="left")
    for column in ("rate", "policy", *COLUMNS):
        made.add_column(column)
    for rate in dict.fromkeys(at.rate for entry in entries for at in entry.at):
        for entry in entries:
            for at in entry.at:
                if at.rate == rate:
                    made.add_row(f"{rate:g}", visible(entry.contender.label), *cells_of(at))
        made.add_section()
    return made


def _table_at(rate: float, workload: str, entries: Sequence[Entry]) -> Table:
    """A column for each contender, whose name folds."""
    from rich.table import Table

    made = Table(title=f"{visible(workload)}: at {rate:g}/s", title_justify="left")
    found = [(entry, at) for entry in entries for at in entry.at if at.rate == rate]
    made.add_column("")
    for entry, _ in found:
        made.add_column(visible(entry.contender.label), overflow="fold")
    for name, *values in zip_longest(COLUMNS, *(cells_of(at) for _, at in found), fillvalue=""):
        made.add_row(name, *values)
    return made


def cells_of(at: AtRate) -> tuple[str, ...]:
    """The values of COLUMNS."""
    made = summary(at)
    if made is None:
        return (f"failed: {_cut(at.error)}",)
    idle = sum(share for cause, share in made.idle.items() if cause != "no work")
    return (
        ms(quantile_ms(made.ttft, 0.5)),
        ms(quantile_ms(made.ttft, 0.99)),
        ms(quantile_ms(made.tbt, 0.5)),
        ms(quantile_ms(made.tbt, 0.99)),
        ms(quantile_ms(made.tbt, 1.0)),
        f"{made.over_tbt:.2%}",
        f"{made.means['kv_hit_rate']:.0%}",
        f"{idle:.1%}" if made.idle else "-",
        *(f"{made.met[goal]} of {len(at.outcomes)}" for goal in Goal),
    )


def ms(value: float) -> str:
    """A time as people write it."""
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def notes(study: Study, entries: Sequence[Entry]) -> Iterator[str]:
    """What whoever reads the tables must know; nothing where there are no figures."""
    if all(entry.error for entry in entries):
        return
    template = study.template
    if study.quick:
        yield (
            "COARSE (--quick): few and short runs, goodputs beyond which nothing was tried. It tells apart "
            "what differs by half or more; run without --quick before you rely on it."
        )
    tbt = "the policy's own TBT SLO" if template.tbt_ms is None else f"a TBT of {template.tbt_ms:g} ms"
    yield (
        f"strict: at most 1 % of all token gaps over {tbt}, and the queue is stable. joint: 90 % of requests "
        f"with a TTFT within {template.ttft_ms:g} ms + {template.ttft_ms_per_prompt_token:g} ms/token and "
        "that TBT as TPOT, and the queue is stable."
    )
    yield from _own_slos(entries)
    requests = template.requests or 0
    fewer = ", or fewer" if study.cuts else ""
    yield (
        f"Means over {len(study.seeds)} seeds with the 95 % interval of Student's t; each found by bisection "
        f"to {study.tolerance:.0%}, in runs of {requests} requests{fewer}."
        if len(study.seeds) > 1
        else f"One seed: no interval. Found by bisection to {study.tolerance:.0%}, in runs of "
        f"{requests} requests{fewer}."
    )
    for workload in study.workloads:
        of_workload = [entry for entry in entries if entry.workload == workload]
        for goal in study.goals:
            yield from paired.in_words(of_workload, goal)
    for workload, cut in study.cuts.items():
        yield first_look.in_words(workload, cut, requests)
    if len(study.cuts) < len(study.workloads):
        yield from few_requests(requests)
    goodputs = [found for entry in entries for found in entry.goodputs.values() if isinstance(found, Goodput)]
    whole = [entry for entry in entries if entry.workload not in study.cuts]
    rates = [one.rate for entry in whole for one in entry.goodputs.values() if isinstance(one, Goodput)]
    fastest = max(rates, default=0.0)
    if fastest and requests and requests / fastest < SECONDS_FEW:
        yield (
            f"At {fastest:.3g}/s {requests} requests are {requests / fastest:.1f} s of traffic: a queue that "
            f"grows slowly is not seen to. --requests {ceil(SECONDS_FEW * fastest)} would be {SECONDS_FEW} s."
        )
    if any(" ?" in goodput_in_words(found) for found in goodputs):
        yield "?: with some seed the search ended at one of its limits."
    if not all(found.monotone for found in goodputs):
        yield "*: with some seed a rate above one that was not met was met again; the lower one counts."


def few_requests(requests: int) -> Iterator[str]:
    """A warning where so few say little."""
    if 0 < requests < REQUESTS_FEW:
        yield (
            f"runs of {requests} requests say little of a queue: {max(1, requests // 20)} that wait decide "
            "whether it counts as stable. Give more --requests."
        )


def _own_slos(entries: Sequence[Entry]) -> Iterator[str]:
    """Where not all are judged by one TBT SLO: who by which."""
    slos = {
        visible(entry.contender.label): outcome.figures["slo"]["tbt_ms"]
        for entry in entries
        for at in entry.at
        for outcome in at.outcomes
        if not outcome.error
    }
    if len(frozenset(slos.values())) > 1:
        listed = ", ".join(f"{label} {tbt_ms:g} ms" for label, tbt_ms in slos.items())
        yield f"Not all are judged by the same TBT SLO: {listed}. --tbt judges all by one."


def as_dict(study: Study, entries: Sequence[Entry], said: Sequence[str], origin: Origin) -> dict[str, Any]:
    """Nothing in it depends on the machine, the time or the number of processes."""
    return {
        "version": VERSION,
        "muxk": origin.muxk,
        "code": origin.code,
        "command": origin.command_line,
        "model": study.template.model,
        "seeds": list(study.seeds),
        "requests": study.template.requests,
        "tolerance": study.tolerance,
        "interval": "95 % of Student's t over the seeds",
        "tbt_ms": study.template.tbt_ms,
        "ttft_ms": study.template.ttft_ms,
        "ttft_ms_per_prompt_token": study.template.ttft_ms_per_prompt_token,
        "turns": study.template.turns.value,
        "quick": study.quick,
        "notes": list(said),
        "entries": [_entry(entry, _first_of(entry.workload, entries)) for entry in entries],
    }


def _first_of(workload: str, entries: Sequence[Entry]) -> Entry:
    return next(entry for entry in entries if entry.workload == workload)


def _entry(entry: Entry, first: Entry) -> dict[str, Any]:
    return {
        "label": entry.contender.label,
        "policy": entry.contender.policy,
        "settings": dict(entry.contender.settings),
        "device": entry.contender.device,
        "gpus": gpus_of(entry),
        "workload": entry.workload,
        "requests": entry.cell.requests,
        "error": entry.error,
        "capacity": entry.capacity,
        "goodput": {goal.value: _goodput(found) for goal, found in entry.goodputs.items()},
        "share_of_first": {
            goal.value: msgspec.to_builtins(paired.paired_ratio(found, first.goodputs.get(goal)))
            for goal, found in entry.goodputs.items()
        },
        "rates": [_rate(entry, at) for at in entry.at],
    }


def _goodput(found: Goodput | CellFailed) -> dict[str, Any]:
    if isinstance(found, CellFailed):
        return {"error": str(found)}
    made: dict[str, Any] = msgspec.to_builtins(found)
    return made


def _rate(entry: Entry, at: AtRate) -> dict[str, Any]:
    made = summary(at)
    pooled_figures = (
        {
            f"p{share * 100:g}_{name}_ms": quantile_ms(bins, share)
            for name, bins in (("ttft", made.ttft), ("itl", made.tbt))
            for share in (0.5, 0.9, 0.99)
        }
        if made
        else {}
    )
    return {
        "request_rate": at.rate,
        "error": at.error,
        "command": command_of(msgspec.structs.replace(entry.cell, rate=at.rate)),
        "pooled": pooled_figures,
        "idle_share": made.idle if made else {},
        "split_share": made.residency if made else {},
        "seeds": [outcome.figures for outcome in at.outcomes],
    }
