"""Idle time by cause, for each workload and policy at several loads: the page `docs/idle.md`.

    python -m muxk.client.idle_table [--requests 120] [--jobs 2] [--keep FOLDER] [--out docs/idle.md]

The load is a share of the goodput of muxwise with the worst-case guard of the MuxWise paper, whose profile is
measured first. All runs are `muxk sim` runs; results do not depend on --jobs. Needs SciPy (muxk[profile]).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.profiling import measure
from muxk.client.cell_store import CellStore, code_version
from muxk.client.cells import Cell, Outcome
from muxk.client.experiments import CellFailed, Lab, Sought
from muxk.client.goodput import Goodput, Search
from muxk.client.study_goals import Goal
from muxk.kernel.idle import Cause
from muxk.profiles.grid import FULL
from muxk.profiles.profile_file import write_profile

STARTS: Mapping[str, float] = {
    "conversation": 4.0,
    "toolagent": 4.0,
    "sharegpt": 20.0,
    "loogle": 1.0,
    "openthoughts": 4.0,
}
"""Requests a second where the search for the goodput of each workload starts."""
QUANTILE = "muxwise, quantile guard"
POLICIES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "muxwise": (),
    QUANTILE: (),
    "chunked": (("budget", "1024"),),
    "static_split": (("decode_share", "50%"),),
    "temporal": (),
}
"""With their settings: 1024 tokens of an 8B model are about the TBT SLO on an H200."""
OTHER_GUARD = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {{name: muxwise-quantile}}
spec:
  extends: muxwise
  slo: {{tbt: {tbt:g}ms}}
  estimator: {{guard: quantile}}
"""
LOADS = (0.3, 0.6, 1.0)
TBT_MS = 50.0
"""Of the MuxWise paper for models of 8B."""
OUTPUT_MAX = 400_000
"""Tokens a run asks for at most: 48 requests of openthoughts, whose queue fewer would not judge."""
SMALL_US, STEP_US = 1048.576, 33554.432
"""Bubbles under 2^20 and 2^25 ns: far under, and about, the time between two tokens."""
SHOWN = (Cause.OVER_RESERVED, Cause.UNASSIGNED, Cause.DRAIN, Cause.MERGE, Cause.LAUNCH, Cause.HOST)
REST = (Cause.PREEMPTION, Cause.NO_PAGES, Cause.UNEXPLAINED)
COLUMNS = (
    *("policy", "load", "requests/s", "TBT P50 / P99 ms", "idle"),
    *(cause.value for cause in SHOWN),
    *("other", "unexplained", "bubbles/s", "median", "in bubbles < 1 ms", "< 34 ms", "no work"),
)


@dataclass(frozen=True)
class Study:
    """What to run."""

    device: str
    model: str
    requests: int
    tolerance: float
    """Relative width of the bracket of a goodput."""
    seeds: tuple[int, ...]
    workloads: tuple[str, ...]
    jobs: int | None
    keep: Path | None


@dataclass(frozen=True)
class Row:
    """One run."""

    policy: str
    load: float
    rate: float
    outcome: Outcome

    @property
    def idle(self) -> dict[str, Any]:
        found: dict[str, Any] = self.outcome.figures["idle"]
        return found

    def share(self, cause: Cause) -> float:
        """Of the unit time with work."""
        return float(self.idle["causes"].get(cause.value, {"share": 0.0})["share"])

    def sizes(self) -> list[tuple[float, int, float]]:
        """(under so many us, bubbles, unit-seconds) of all that is idle while there is work, ascending."""
        bubbles = self.outcome.figures["idle_bubbles"]
        rows = [row for cause, found in bubbles.items() if cause != Cause.NO_WORK for row in found]
        return sorted((row["below_us"], row["bubbles"], row["unit_seconds"]) for row in rows)

    def share_below(self, us: float) -> float:
        """Of the unit time with work, what is idle in bubbles shorter than this."""
        idle_s = sum(unit_s for below_us, _, unit_s in self.sizes() if below_us <= us)
        causes = self.idle["causes"]
        without_s = causes.get(Cause.NO_WORK.value, {"unit_seconds": 0.0})["unit_seconds"]
        return idle_s / float(self.idle["unit_seconds"] - without_s)

    @property
    def count(self) -> int:
        return sum(count for _, count, _ in self.sizes())

    @property
    def median_us(self) -> float:
        """Half of the bubbles are shorter."""
        seen = 0
        for below_us, count, _ in self.sizes():
            seen += count
            if seen * 2 >= self.count:
                return below_us
        return 0.0

    @property
    def bubbles_per_s(self) -> float:
        return self.count / float(self.outcome.figures["simulated_seconds"])


def goodputs(lab: Lab, cells: Mapping[str, Cell], plan: Study) -> dict[str, Goodput]:
    """Of muxwise on each workload, without those where no rate met the SLO. Raises CellFailed."""
    sought = [
        Sought(cell, Goal.STRICT, Search(STARTS[name], 0.01, 1000.0, plan.tolerance, 16, ()), plan.seeds)
        for name, cell in cells.items()
    ]
    found = {}
    for name, result in zip(cells, lab.goodputs(sought), strict=True):
        if isinstance(result, CellFailed):
            raise result
        if result.rate:
            found[name] = result
    return found


def study(plan: Study, folder: Path) -> tuple[dict[str, Goodput], dict[str, list[Row]]]:
    """The goodput of muxwise and the rows of each workload; files that runs read are written to a folder."""
    profile, other_guard = folder / "profile.json", folder / "muxwise-quantile.yaml"
    write_profile(profile, measure(open_gpu_backend(plan.device, plan.model).backend, FULL))
    other_guard.write_text(OTHER_GUARD.format(tbt=TBT_MS), "utf-8")
    base = Cell(
        "muxwise",
        device=plan.device,
        model=plan.model,
        requests=plan.requests,
        output_max=OUTPUT_MAX,
        tbt_ms=TBT_MS,
        profile=str(profile),
        seed=plan.seeds[0],
    )
    store = None if plan.keep is None else CellStore(plan.keep, code_version())
    with Lab(plan.jobs, store, _told) as lab:
        cells = {name: msgspec.structs.replace(base, workload=name) for name in plan.workloads}
        rates = goodputs(lab, cells, plan)
        files = {QUANTILE: str(other_guard)}
        runs = [
            (name, policy, load, _at(cells[name], files.get(policy, policy), settings, found.rate * load))
            for name, found in rates.items()
            for policy, settings in POLICIES.items()
            for load in LOADS
        ]
        outcomes = lab.run([cell for _, _, _, cell in runs])
    if store is not None and store.lost:
        print(f"{store.lost} runs were not kept in {plan.keep}: {store.lost_why}", file=sys.stderr)
    rows: dict[str, list[Row]] = {name: [] for name in rates}
    for (name, policy, load, cell), outcome in zip(runs, outcomes, strict=True):
        if outcome.error:
            raise CellFailed(f"{policy} on {name}: {outcome.error}")
        rows[name].append(Row(policy, load, cell.rate or 0.0, outcome))
    return rates, rows


def _at(cell: Cell, policy: str, settings: tuple[tuple[str, str], ...], rate: float) -> Cell:
    return msgspec.structs.replace(cell, policy=policy, settings=settings, rate=rate)


def _told(cell: Cell, outcome: Outcome) -> None:
    print(f"{cell.workload} {cell.policy} {cell.rate or 0:.3g}/s: {outcome.seconds:.0f} s", file=sys.stderr)


# --- the page ---


def page(plan: Study, rates: Mapping[str, Goodput], rows: Mapping[str, Sequence[Row]]) -> str:
    return "\n".join(_lines(plan, rates, rows))


def _lines(plan: Study, rates: Mapping[str, Goodput], rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    yield INTRODUCTION.format(
        device=plan.device,
        model=plan.model,
        requests=plan.requests,
        output=OUTPUT_MAX,
        tbt=f"{TBT_MS:g}",
        seeds=", ".join(map(str, plan.seeds)),
    )
    yield from _answer(rows)
    for name, of_workload in rows.items():
        yield f"\n## {name}\n"
        yield f"muxwise with the worst-case guard keeps its SLO up to {rates[name].rate:.3g} requests/s.\n"
        yield "| " + " | ".join(COLUMNS) + " |"
        yield "|" + "---|" * len(COLUMNS)
        yield from map(_table_row, of_workload)
    missing = [name for name in plan.workloads if name not in rows]
    if missing:
        yield f"\nNo rate that was tried meets the SLO on {', '.join(missing)}."
    yield ""


def _answer(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """What the figures say to the question, workload by workload."""
    for name, of_workload in rows.items():
        at = {(row.policy, row.load): row for row in of_workload}
        low, mid, high = (at["muxwise", load] for load in LOADS)
        kept = [cause for cause in Cause if cause is not Cause.NO_WORK and high.share(cause) >= 0.0005]
        causes = ", ".join(
            f"{cause.value} {high.share(cause):.1%}" for cause in sorted(kept, key=high.share, reverse=True)
        )
        loads = ", ".join(f"{row.idle['idle_share']:.1%}" for row in (low, mid, high))
        quantile, chunked = (at[policy, 1.0].idle["idle_share"] for policy in (QUANTILE, "chunked"))
        gap_ms = high.outcome.figures["median_itl_ms"]
        yield (
            f"- **{name}**: at 30 %, 60 % and 100 % of its goodput muxwise leaves {loads} of the unit time "
            f"with work idle; at 100 % that is {causes or 'no cause over 0.05 %'}. Bubbles under 1 ms make "
            f"up {high.share_below(SMALL_US):.2%}, those under 34 ms {high.share_below(STEP_US):.1%}. At the "
            f"same load it leaves {quantile:.1%} with the quantile guard, and chunked prefill {chunked:.1%}. "
            f"Half of muxwise's tokens come within {gap_ms:.0f} ms of the one before; the SLO allows "
            f"{TBT_MS:g} ms."
        )


def _table_row(row: Row) -> str:
    figures = row.outcome.figures
    met = "" if row.outcome.meets(Goal.STRICT) else " (SLO missed)"
    cells = [
        f"{row.policy}{met}",
        f"{row.load:.0%}",
        f"{row.rate:.3g}",
        f"{figures['median_itl_ms']:.1f} / {figures['p99_itl_ms']:.1f}",
        f"**{row.idle['idle_share']:.2%}**",
        *(f"{row.share(cause):.2%}" for cause in SHOWN),
        f"{sum(row.share(cause) for cause in REST[:2]):.2%}",
        f"{row.share(Cause.UNEXPLAINED):.2%}",
        f"{row.bubbles_per_s:.1f}",
        f"{row.median_us / 1000:.2f} ms",
        f"{row.share_below(SMALL_US):.3%}",
        f"{row.share_below(STEP_US):.2%}",
        f"{row.idle['no_work_share']:.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


INTRODUCTION = """# Where the units wait

`make idle` writes this page: simulated {device}, {model}, {requests} requests a run (or fewer that ask for
{output:,} tokens of output), a TBT SLO of {tbt} ms, seed {seeds}. What a real card does is not shown by it.
Rates are what such short runs sustain: those of openthoughts, whose answers are longer than all its arrivals,
say nothing of a steady state.

A unit is idle when it has no kernel while there is work for it. The arbiter books each idle unit-nanosecond
to one cause when the device has told the times of its items (`kernel/idle.py`); none is what the others
leave, and busy and idle time add up exactly. Shares are of the unit time with work; `no work` is apart, and
of all.

| cause | the unit has no kernel because |
|---|---|
| over-reservation | the split keeps it for a phase with nothing to do, while the other one has work |
| unassigned | the split gives it to no phase, while one has work (decode alone, as fast on fewer) |
| drain | after a change of the split, items of the old one still run: what comes next waits for them |
| merge wait | a step is held for rows that come, or units wait for the rows of a prompt that runs |
| launch | the host has launched the next item, and it has not begun |
| host | an item has ended, and the host has not noticed or answered yet |
| other | preemption (from parking a batch to the next one's first item), or prompts that wait for pages |

The open question about MuxWise: a worst-case guard that over-estimates leaves decode more units than it
needs, decode ends early, and many small bubbles take the place of few large ones. A bubble is a stretch of
time and units with one cause. muxk queues the next decode step behind the one that runs, so a decode lane
that is too large does not wait: its tokens come early instead, which no measure of idle time sees. The
column of TBT beside its SLO is where to look for that, and the rows of muxwise with the quantile guard, which
follows what is measured instead of the worst that was, show what the worst case costs.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="sim:h200")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--requests", type=int, default=120, help="of each run")
    parser.add_argument("--tolerance", type=float, default=0.1, help="relative width of a goodput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workloads", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--jobs", type=int, default=None, help="runs at once; default: one a core")
    parser.add_argument("--keep", type=Path, help="keep results here, and go on from them")
    parser.add_argument("--out", type=Path, help="default: print")
    asked = parser.parse_args()
    plan = Study(
        asked.device,
        asked.model,
        asked.requests,
        asked.tolerance,
        (asked.seed,),
        tuple(asked.workloads),
        asked.jobs,
        asked.keep,
    )
    with tempfile.TemporaryDirectory() as folder:
        text = page(plan, *study(plan, plan.keep or Path(folder)))
    if asked.out is None:
        print(text)
    else:
        asked.out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
