"""`muxk diff`: what a change of a policy changes, decision by decision and in its figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from muxk.client import study_options as options
from muxk.client.options import INTERRUPTED, USAGE, Settings, die, parse_settings
from muxk.client.study_goals import Goal
from muxk.client.study_progress import opened_store, opened_study
from muxk.client.terminal import plain_console
from muxk.client.turns import Turns
from muxk.client.written_files import check_files, write_files

if TYPE_CHECKING:
    from muxk.client.cells import Cell
    from muxk.client.experiments import CellFailed
    from muxk.client.goodput import Goodput
    from muxk.client.policy_diff import PolicyDiff

    Goodputs = dict[Goal, tuple[Goodput | CellFailed, Goodput | CellFailed]]

CHANGED = 1
"""Exit code, as of diff(1): 0 nothing, 1 something, 2 trouble."""
REQUESTS_DEFAULT = 200
OUTPUT_DEFAULT = 200_000


def diff(
    old: Annotated[str, typer.Argument(metavar="OLD[:KEY=VALUE,...]", help="The policy in force.")],
    new: Annotated[str, typer.Argument(metavar="NEW[:KEY=VALUE,...]", help="The one to replace it.")],
    settings: Settings = None,
    workload: Annotated[
        str, typer.Option("--trace", "--workload", metavar="NAME|FILE", help=options.WORKLOAD_HELP)
    ] = "conversation",
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="Requests a second. Default: 1; of a trace with times, as it was recorded."
        ),
    ] = None,
    device: options.Device = "sim:h200",
    model: options.Model = "qwen3-8b",
    requests: options.Requests = REQUESTS_DEFAULT,
    first: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="Differences that are explained: the first N.")
    ] = 10,
    goals: Annotated[
        list[Goal] | None,
        typer.Option("--goodput", help="Search for this goodput of both as well; may be repeated."),
    ] = None,
    seeds: options.Seeds = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the runs that are compared.")] = 0,
    tbt: options.Tbt = None,
    ttft: options.Ttft = options.TTFT_DEFAULT,
    turns: Annotated[
        Turns, typer.Option(help="When later turns of a conversation come, see `muxk sim`.")
    ] = Turns.OPEN,
    kv_tokens: options.KvTokens = None,
    jobs: options.Jobs = None,
    cache: options.Cache = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
    ] = None,
) -> None:
    """Say what changes when NEW replaces OLD: the decisions that differ, and the figures of a run of each.

    The exit code is that of diff(1): 0 when nothing changes, 1 when something does, 2 in case of trouble.
    """
    from muxk.client.cells import Cell

    check_files(("--json", json_file))
    options.check_rates(rate)
    slo = options.ttft_slo(ttft)
    template = Cell(
        old,
        device=device,
        model=model,
        workload=workload,
        rate=options.rate_or_default(workload, rate),
        seed=seed,
        requests=requests,
        output_max=OUTPUT_DEFAULT,
        tbt_ms=options.tbt_ms(tbt),
        ttft_ms=max(slo.base_ns, 1) / 1e6,
        ttft_ms_per_prompt_token=slo.per_token_ns / 1e6,
        turns=turns,
        kv_tokens=kv_tokens,
    )
    cells = [_cell(text, template, parse_settings(settings)) for text in (old, new)]
    if goals:
        opened_store(cache)
    found = _diff(cells[0], cells[1], first)
    if not (found.before["completed"] or found.after["completed"]):
        die(f"neither completed a request; the first was told: {found.after['first_refusal']}", USAGE)
    goodputs = _goodputs(cells, goals or [], seeds, jobs, cache)
    _report(found, (old, new), goodputs, json_file)
    raise typer.Exit(CHANGED if found.changed else 0)


def _cell(text: str, template: Cell, settings: dict[str, str]) -> Cell:
    from msgspec.structs import replace
    from muxk.client.contenders import ContenderError, parse_contender

    try:
        one = parse_contender(text, template.device, settings)
    except ContenderError as error:
        die(str(error), USAGE)
    if one.device != template.device:
        die(f"{text}: both are compared on the same device; give it with --device", USAGE)
    cell = replace(template, policy=one.policy, settings=one.settings)
    options.check_cell(cell, "--trace")
    return cell


def _diff(old: Cell, new: Cell, first: int) -> PolicyDiff:
    from muxk.actors.backends import StartupError
    from muxk.client.errors import ClientError
    from muxk.client.policy_diff import policy_diff

    try:
        with options.run_bar() as bar:
            return policy_diff(old, new, first, bar)
    except (StartupError, ClientError) as error:
        die(str(error), USAGE)
    except KeyboardInterrupt:
        die("stopped", INTERRUPTED)


def _goodputs(
    cells: list[Cell], goals: list[Goal], seeds: int, jobs: int | None, cache: Path | None
) -> Goodputs:
    """Before and after, by goal."""
    if not goals:
        return {}
    from msgspec.structs import replace
    from muxk.client.experiments import Sought, around

    rate = next((cell.rate for cell in cells if cell.rate), 1.0)
    full = [replace(cell, output_max=None) for cell in cells]
    wanted = list(dict.fromkeys(goals))
    sought = [Sought(cell, goal, around(rate), tuple(range(seeds))) for goal in wanted for cell in full]
    with opened_study(jobs, cache) as study:
        study.begin()
        found = study.lab.goodputs(sought)
    return {goal: (found[2 * place], found[2 * place + 1]) for place, goal in enumerate(wanted)}


def _report(found: PolicyDiff, labels: tuple[str, str], goodputs: Goodputs, json_file: Path | None) -> None:
    import msgspec
    from muxk.policies.problems import visible

    made = msgspec.json.format(msgspec.json.encode(_as_dict(found, labels, goodputs))) + b"\n"
    written = write_files(("--json", json_file, made))
    console = plain_console()
    for line in _lines(found, labels, goodputs):
        console.print(visible(line), soft_wrap=True, highlight=False)
    if not written:
        raise typer.Exit(USAGE)


def _lines(found: PolicyDiff, labels: tuple[str, str], goodputs: Goodputs) -> Iterator[str]:
    from muxk.client.compare_report import goodput_in_words
    from muxk.client.diff_view import difference, figures, judged_by, point_counts

    if not found.changed:
        yield f"{labels[1]} does the same as {labels[0]} here: every decision and every figure"
        return
    yield "decisions that differ, with OLD in force and NEW asked the same:"
    yield from point_counts(found)
    for error, count in found.errors.items():
        yield f"  NEW raised, {count} times: {error}"
    for explanation in found.first:
        yield ""
        yield from difference(explanation)
    yield ""
    yield "a run of each on the same requests:"
    yield from figures(found)
    yield from judged_by(found)
    for goal, (before, after) in goodputs.items():
        yield (
            f"{goal.value} goodput, requests/s: {goodput_in_words(before)} -> {goodput_in_words(after)}"
            f"{_told_apart(before, after)}"
        )


def _told_apart(before: Goodput | CellFailed, after: Goodput | CellFailed) -> str:
    from muxk.client.goodput import Goodput

    if not (isinstance(before, Goodput) and isinstance(after, Goodput)):
        return ""
    apart = before.high < after.low or after.high < before.low
    return "" if apart else "; the intervals overlap"


def _as_dict(found: PolicyDiff, labels: tuple[str, str], goodputs: Goodputs) -> dict[str, Any]:
    import msgspec
    from muxk.client.goodput import Goodput

    return {
        "version": 1,
        "old": labels[0],
        "new": labels[1],
        "changed": found.changed,
        "points": {one.point: {"asked": one.asked, "differed": one.differed} for one in found.points},
        "errors": dict(found.errors),
        "first": msgspec.to_builtins(found.first),
        "before": dict(found.before),
        "after": dict(found.after),
        "goodput": {
            goal.value: [
                msgspec.to_builtins(one) if isinstance(one, Goodput) else {"error": str(one)} for one in pair
            ]
            for goal, pair in goodputs.items()
        },
    }
