"""`muxk tune`: the best values of a policy's params for a workload on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client import study_options as options
from muxk.client.options import FAILED, USAGE, Settings, die, parse_settings
from muxk.client.study_progress import opened_study
from muxk.client.terminal import plain_console
from muxk.client.tune_by import By
from muxk.client.turns import Turns
from muxk.client.written_files import check_files, write_files

if TYPE_CHECKING:
    from muxk.client.param_grid import Settings as Candidate
    from muxk.client.tune import Score, Tuning

REQUESTS_DEFAULT = 200
SEEDS_DEFAULT = 3


Params = Annotated[
    list[str],
    typer.Option(
        "--param",
        metavar="NAME=VALUES",
        help="Values to try: budget=128,256,512, budget=64..1024*2 or decode_share=10%..90%+20%. May be "
        "repeated: all combinations.",
    ),
]
Best = Annotated[By, typer.Option(help="What is best: the highest goodput, or the lowest P99 at --rate.")]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="R", help="Requests a second for a P99; where a search for a goodput starts, if given."
    ),
]
Halving = Annotated[
    bool, typer.Option("--halving", help="All in short runs first, the better third in longer ones.")
]
Write = Annotated[
    bool, typer.Option("--write", help="Print nothing but the best as options for `muxk run` and others.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")]


def tune(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A policy's file, or the name of one.")],
    params: Params,
    settings: Settings = None,
    workload: options.Workload = "sharegpt",
    by: Best = By.STRICT,
    rate: Rate = None,
    halving: Halving = False,
    device: options.Device = "sim:h200",
    model: options.Model = "qwen3-8b",
    seeds: options.Seeds = SEEDS_DEFAULT,
    requests: options.Requests = REQUESTS_DEFAULT,
    tbt: options.Tbt = None,
    ttft: options.Ttft = options.TTFT_DEFAULT,
    tolerance: options.Tolerance = 0.03,
    turns: options.TurnsOption = Turns.OPEN,
    kv_tokens: options.KvTokens = None,
    jobs: options.Jobs = None,
    cache: options.Cache = None,
    write: Write = False,
    json_file: JsonFile = None,
) -> None:
    """Find the best params of a policy: the chunk budget of chunked, the split of static_split."""
    from msgspec.structs import replace
    from muxk.client.tune import Tuning
    from muxk.client.tune import tune as run

    check_files(("--json", json_file))
    if rate is None and not by.is_goodput:
        die(f"--by {by.value} needs --rate: say how many requests come a second", USAGE)
    cell = replace(
        options.template(policy, model, requests, tbt, ttft),
        settings=tuple(parse_settings(settings).items()),
        device=device,
        workload=workload,
        turns=turns,
        kv_tokens=kv_tokens,
    )
    tuning = Tuning(cell, _candidates(params), by, rate, tuple(range(seeds)), tolerance, halving)
    _check(tuning)
    with opened_study(jobs, cache) as study:
        scores = run(study.lab, tuning, study.tell_plan)
    _report(tuning, scores, study.notes(), write, json_file)
    if not scores[0].is_found(by):
        raise typer.Exit(FAILED)


def _candidates(params: Sequence[str]) -> tuple[Candidate, ...]:
    from muxk.client.param_grid import GridError, parse_grid

    try:
        return tuple(parse_grid(params))
    except GridError as error:
        die(str(error), USAGE)


def _check(tuning: Tuning) -> None:
    """Every candidate, before the first run: a value out of bounds is a mistake of the command line."""
    from msgspec.structs import replace

    options.check_rates(tuning.rate)
    tried = dict(tuning.candidates[0])
    for name, value in tuning.cell.settings:
        if name in tried:
            die(
                f"--set {name}={value}: --param tries values of {name} already; leave one out",
                USAGE,
            )
    options.check_names(tuning.cell.policy)
    options.check_no_settings(tuning.cell.policy)
    for settings in tuning.candidates:
        options.check_policy(replace(tuning.cell, settings=(*tuning.cell.settings, *settings)))
    options.check_cell(replace(tuning.cell, settings=(*tuning.cell.settings, *tuning.candidates[0])))


def _report(
    tuning: Tuning, scores: list[Score], notes: Sequence[str], write: bool, json_file: Path | None
) -> None:
    from muxk.client import tune_report
    from muxk.policies.problems import visible

    written = write_files(("--json", json_file, tune_report.as_json(tuning, scores)))
    if not write:
        console = plain_console()
        console.print(tune_report.table(tuning, scores))
        for note in (*tune_report.notes(tuning, scores), *notes):
            console.print(visible(note), highlight=False)
    elif scores[0].is_found(tuning.by):
        typer.echo(tune_report.options_of(scores[0]))
    if not written:
        raise typer.Exit(USAGE)
