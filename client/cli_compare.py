"""`muxk compare`: several policies on the same requests, and the rate that each of them can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client import study_options as options
from muxk.client.options import FAILED, USAGE, Settings, die, parse_settings
from muxk.client.study_goals import Goal
from muxk.client.study_progress import opened_study
from muxk.client.terminal import plain_console
from muxk.client.turns import Turns
from muxk.client.written_files import check_files, write_files

if TYPE_CHECKING:
    from muxk.client import traffic
    from muxk.client.compare import Entry, Study
    from muxk.client.contenders import Contender
    from muxk.client.first_look import Cut

REQUESTS_DEFAULT = 200
SEEDS_DEFAULT = 3
TOLERANCE_DEFAULT = 0.03
QUICK: Mapping[str, float] = {"requests": 60, "seeds": 1, "tolerance": 0.2}
"""What --quick puts in place of defaults."""


Policies = Annotated[
    list[str],
    typer.Argument(
        metavar="POLICY[:KEY=VALUE,...][@DEVICE]...",
        help="Policies by name or file, each with settings and a device of its own if it has some: "
        "chunked:budget=512, splitwise@sim:h200,devices=2.",
    ),
]
Workloads = Annotated[
    list[str],
    typer.Option("--workload", metavar="NAME|FILE", help=f"{options.WORKLOAD_HELP} May be repeated."),
]
Rates = Annotated[
    list[float] | None,
    typer.Option(
        "--rate",
        metavar="R",
        help="Requests a second at which figures are taken; may be repeated. Default: 30, 60 and 100 % of "
        "what the first policy can take.",
    ),
]
Goals = Annotated[list[Goal], typer.Option("--goal", help="Which goodput to search for; may be repeated.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a report: one page that needs no network.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every figure of every run at a rate.")
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="A first look in minutes: one seed, runs of 60 requests, or fewer where answers are long, "
        "goodputs to 20 %. What you give yourself of --seeds, --requests and --tolerance counts.",
    ),
]


def compare(
    context: typer.Context,
    policies: Policies,
    settings: Settings = None,
    workloads: Workloads = ["sharegpt"],  # noqa: B006 - Typer reads it and changes nothing
    rates: Rates = None,
    goals: Goals = [Goal.STRICT, Goal.JOINT],  # noqa: B006
    device: options.Device = "sim:h200",
    model: options.Model = "qwen3-8b",
    seeds: options.Seeds = SEEDS_DEFAULT,
    requests: options.Requests = REQUESTS_DEFAULT,
    tbt: options.Tbt = None,
    ttft: options.Ttft = options.TTFT_DEFAULT,
    tolerance: options.Tolerance = TOLERANCE_DEFAULT,
    quick: Quick = False,
    turns: options.TurnsOption = Turns.OPEN,
    kv_tokens: options.KvTokens = None,
    jobs: options.Jobs = None,
    cache: options.Cache = None,
    html: Html = None,
    json_file: JsonFile = None,
) -> None:
    """Compare policies on simulated GPUs: goodput by bisection, and what each does at given rates.

    All get the same requests. Nothing depends on --jobs. What fails is reported in its place; the exit code
    is 1 only when everything failed.
    """
    import dataclasses

    from msgspec.structs import replace
    from muxk.client.compare import Study
    from muxk.client.compare import compare as run

    check_files(("--html", html), ("--json", json_file))
    if quick:
        few, one, coarse = (_quick(context, name) for name in ("requests", "seeds", "tolerance"))
        requests, seeds, tolerance = int(few), int(one), coarse
    shared = options.template(policies[0], model, requests, tbt, ttft)
    study = Study(
        tuple(_contenders(policies, device, parse_settings(settings))),
        tuple(dict.fromkeys(workloads)),
        tuple(dict.fromkeys(rates or ())),
        replace(shared, turns=turns, kv_tokens=kv_tokens),
        tuple(range(seeds)),
        tuple(dict.fromkeys(goals)),
        tolerance,
        quick,
    )
    workloads_found = _check(study)
    if quick and not _is_given(context, "requests"):
        study = dataclasses.replace(study, cuts=_cuts(workloads_found, requests))
    with opened_study(jobs, cache) as opened:
        entries = run(opened.lab, study, opened.tell_plan)
    _report(study, entries, opened.notes(), html, json_file)
    if all(entry.error for entry in entries):
        raise typer.Exit(FAILED)


def _quick(context: typer.Context, name: str) -> float:
    """The value of an option under --quick: that of the command line if it is there."""
    return float(context.params[name]) if _is_given(context, name) else QUICK[name]


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has the option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _contenders(texts: list[str], device: str, settings: dict[str, str]) -> list[Contender]:
    from muxk.client.contenders import ContenderError, distinct, parse_contender

    try:
        found = [parse_contender(text, device, settings) for text in texts]
        distinct(found)
        return found
    except ContenderError as error:
        die(str(error), USAGE)


def _check(study: Study) -> dict[str, traffic.Workload]:
    """The workloads, by name; ends the command for what makes no sense."""
    options.check_rates(*study.rates)
    for contender in study.contenders:
        cell = study.cell(contender, study.workloads[0])
        options.check_names(cell.policy, cell.model, *study.workloads)
        options.check_policy(cell, contender.label)
    return {name: options.opened_workload(name, 1.0) for name in study.workloads}


def _cuts(workloads: Mapping[str, traffic.Workload], requests: int) -> dict[str, Cut]:
    """Workloads whose answers are too long for a first look of so many requests."""
    from muxk.client.first_look import cut_of

    cuts = {name: cut_of(workload, requests) for name, workload in workloads.items()}
    return {name: cut for name, cut in cuts.items() if cut is not None}


def _report(
    study: Study, entries: list[Entry], notes: Sequence[str], html: Path | None, json_file: Path | None
) -> None:
    """The files first: whatever becomes of the terminal, they are there."""
    import sys

    import msgspec
    from muxk.actors.system import installed_version
    from muxk.client import compare_html, compare_report
    from muxk.client.cell_store import code_version
    from muxk.policies.problems import visible

    origin = compare_report.Origin(("muxk", *sys.argv[1:]), installed_version(), code_version())
    said = (*compare_report.notes(study, entries), *notes)
    made = compare_report.as_dict(study, entries, said, origin)
    written = write_files(
        ("--json", json_file, msgspec.json.format(msgspec.json.encode(made)) + b"\n"),
        ("--html", html, compare_html.page(study, entries, said, origin).encode()),
    )
    console = plain_console()
    for table in compare_report.tables(study, entries, console):
        console.print(table)
    for note in said:
        console.print(visible(note), highlight=False)
    if not written:
        raise typer.Exit(USAGE)
