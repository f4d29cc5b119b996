"""`make paper`: the paper's table on simulated GPUs, written to `docs/paper.md`.

    python -m muxk.client.paper [--out docs/paper.md] [--rows 1,2] [--folder build/paper] [--seeds 4]

Outcomes are kept in the folder: what was run is not run again while the code is the same, so that a study
that was stopped goes on. `--no-moves` and `--no-trials` leave out the parts that take most of the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from muxk.client.cell_store import CellStore, code_version
from muxk.client.cells import Cell, Outcome
from muxk.client.experiments import Lab
from muxk.client.paper_effects import movable
from muxk.client.paper_extras import extras, moved_extras
from muxk.client.paper_report import off_figures, report
from muxk.client.paper_rows import FIGURES
from muxk.client.paper_study import Study
from muxk.client.paper_trials import bench_of, run_singles, run_trials

TOLD_EVERY_S = 20.0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The MuxWise paper's figures beside the simulator's.")
    parser.add_argument("--out", type=Path, default=Path("docs/paper.md"))
    parser.add_argument("--folder", type=Path, default=Path("build/paper"), help="outcomes and profiles")
    parser.add_argument("--rows", default="", help="numbers of rows, joined by commas; all without it")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=0.08)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--version", default=code_version(), help="of the code, for kept outcomes")
    parser.add_argument("--no-moves", action="store_true", help="do not move the assumed constants")
    parser.add_argument("--no-trials", action="store_true", help="do not put explanations to the test")
    parser.add_argument("--constants", default="", help="assumed constants to move, by commas; all without")
    return parser


def main() -> None:
    given = arguments().parse_args()
    rows = {int(row) for row in given.rows.split(",")} if given.rows else {f.row for f in FIGURES}
    given.folder.mkdir(parents=True, exist_ok=True)
    settings = tuple(dict.fromkeys(figure.setting for figure in FIGURES if figure.row in rows))
    store = CellStore(given.folder, given.version)
    with Lab(given.jobs, store, teller()) as lab:
        study = Study(lab, given.folder, tuple(range(given.seeds)), given.tolerance, say, settings)
        found = study.run()
        more = extras(study, found)
        bench = bench_of(study)
        tried = [] if given.no_trials else run_trials(study, found, bench)
        single = [] if given.no_trials else run_singles(study, bench)
        given.out.write_text(report(study, found, more, tried, single, given.version), encoding="utf-8")
        say(f"wrote {given.out}")
        if not given.no_moves:
            constants = given.constants.split(",") if given.constants else movable()
            study.move_constants(found, off_figures(found), constants)
            ranges = moved_extras(study, found, constants)
            text = report(study, found, more, tried, single, given.version, ranges)
            given.out.write_text(text, encoding="utf-8")
            say(f"wrote {given.out} again, with how far figures move")
    if store.lost:
        say(f"{store.lost} runs were not kept in {given.folder}: {store.lost_why}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def teller() -> Callable[[Cell, Outcome], None]:
    """Says now and then how many runs have ended."""
    began = time.monotonic()
    told = [began, 0.0]

    def tell(cell: Cell, outcome: Outcome) -> None:
        told[1] += 1
        now = time.monotonic()
        if outcome.error:
            say(f"{cell.policy} at {cell.rate}: {outcome.error}")
        if now - told[0] > TOLD_EVERY_S:
            told[0] = now
            last = f"{cell.policy}, {cell.workload}, {cell.rate:g}/s"
            say(f"{told[1]:.0f} runs in {now - began:.0f} s; last: {last}")

    return tell


if __name__ == "__main__":
    main()
