"""`muxk tune`: the best values of a policy's params for a workload on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client import study_options as options
from muxk.client.options import FAILED, USAGE, Settings, die, parse_settings
from muxk.client.tune_by import By
from muxk.client.turns import Turns

if TYPE_CHECKING:
    from muxk.client.param_grid import Settings as Candidate
    from muxk.client.tune import Score, Tuning

REQUESTS_DEFAULT = 200
SEEDS_DEFAULT = 3


def tune(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A policy's file, or the name of one.")],
    params: Annotated[
        list[str],
        typer.Option(
            "--param",
            metavar="NAME=VALUES",
            help="Values to try: budget=128,256,512, budget=64..1024*2 or decode_share=10%..90%+20%. May be "
            "repeated: all combinations.",
        ),
    ],
    settings: Settings = None,
    workload: Annotated[str, typer.Option(metavar="NAME|FILE", help=options.WORKLOAD_HELP)] = "sharegpt",
    by: Annotated[
        By, typer.Option(help="What is best: the highest goodput, or the lowest P99 at --rate.")
    ] = By.STRICT,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="Requests a second for a P99; where a search for a goodput starts, if given."
        ),
    ] = None,
    halving: Annotated[
        bool, typer.Option("--halving", help="All in short runs first, the better third in longer ones.")
    ] = False,
    device: options.Device = "sim:h200",
    model: options.Model = "qwen3-8b",
    seeds: options.Seeds = SEEDS_DEFAULT,
    requests: options.Requests = REQUESTS_DEFAULT,
    tbt: options.Tbt = None,
    ttft: options.Ttft = options.TTFT_DEFAULT,
    tolerance: Annotated[
        float, typer.Option(min=0.001, max=0.5, help="Relative width to which a goodput is searched.")
    ] = 0.03,
    turns: Annotated[
        Turns, typer.Option(help="When later turns of a conversation come, see `muxk sim`.")
    ] = Turns.OPEN,
    kv_tokens: options.KvTokens = None,
    jobs: options.Jobs = None,
    cache: options.Cache = None,
    write: Annotated[
        bool, typer.Option("--write", help="Print nothing but the best as options for `muxk run` and others.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")
    ] = None,
) -> None:
    """Find the best params of a policy: the chunk budget of chunked, the split of static_split."""
    from muxk.client.cells import Cell
    from muxk.client.tune import Tuning
    from muxk.client.tune import tune as run

    options.check_files(("--json", json_file))
    if rate is None and not by.is_goodput:
        die(f"--by {by.value} needs --rate: say how many requests come a second", USAGE)
    slo = options.ttft_slo(ttft)
    cell = Cell(
        policy,
        tuple(parse_settings(settings).items()),
        device,
        model,
        workload,
        requests=requests,
        tbt_ms=options.tbt_ms(tbt),
        ttft_ms=max(slo.base_ns, 1) / 1e6,
        ttft_ms_per_prompt_token=slo.per_token_ns / 1e6,
        turns=turns,
        kv_tokens=kv_tokens,
    )
    tuning = Tuning(cell, _candidates(params), by, rate, tuple(range(seeds)), tolerance, halving)
    _check(tuning)
    with options.opened_lab(jobs, cache) as lab:
        scores = run(lab, tuning, options.tell_plan)
    _report(tuning, scores, write, json_file)
    if scores[0].error:
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
    from muxk.client.arrivals import positive
    from muxk.client.errors import ClientError

    try:
        if tuning.rate is not None:
            positive("rate", tuning.rate, "requests a second")
    except ClientError as error:
        die(f"--rate: {error}", USAGE)
    for settings in tuning.candidates:
        options.check_policy(replace(tuning.cell, settings=(*tuning.cell.settings, *settings)))
    options.check_cell(replace(tuning.cell, settings=(*tuning.cell.settings, *tuning.candidates[0])))


def _report(tuning: Tuning, scores: list[Score], write: bool, json_file: Path | None) -> None:
    from muxk.client import tune_report
    from rich.console import Console

    if json_file is not None:
        options.write_file("--json", json_file, tune_report.as_json(tuning, scores))
    if write:
        if not scores[0].error:
            typer.echo(tune_report.options_of(scores[0]))
        return
    console = Console()
    console.print(tune_report.table(tuning, scores))
    for note in tune_report.notes(tuning, scores):
        console.print(note, markup=False, highlight=False)
