"""`muxk bench`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import USAGE, die, readable_errors
from muxk.client.terminal import plain_console

if TYPE_CHECKING:
    from muxk.client.bench import PolicyChoice
    from muxk.client.workload import LongPrompts


def bench(
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Policies to compare: files or shipped names, with params as in chunked:budget=64.",
        ),
    ] = "muxwise,inflight",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each policy, each on a fresh server.")] = 3,
    seconds: Annotated[
        str, typer.Option(metavar="S,...", help="Length of the phase with long prompts, for each --long-in.")
    ] = "90",
    solo_seconds: Annotated[
        float, typer.Option(min=0, help="Length of the phase before it, without long prompts; 0: no ratios.")
    ] = 30.0,
    warmup_seconds: Annotated[float, typer.Option(min=0, help="Not measured, before both.")] = 5.0,
    streams: Annotated[int, typer.Option(min=1, help="Streams that decode all the time.")] = 4,
    short_in: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request on a stream.")] = 32,
    short_out: Annotated[int, typer.Option(min=1, help="Output tokens of a request on a stream.")] = 128,
    long_in: Annotated[
        str,
        typer.Option(
            metavar="N,...", help="Prompt tokens of a long request; several numbers make as many phases."
        ),
    ] = "1500",
    long_out: Annotated[int, typer.Option(min=1, help="Output tokens of a long request.")] = 8,
    long_every: Annotated[
        str, typer.Option(metavar="S,...", help="Seconds from one long to the next, for each --long-in.")
    ] = "10",
    slo: Annotated[str, typer.Option(help="The longest gap between two tokens that is good.")] = "100ms",
    seed: Annotated[int, typer.Option(min=0, help="Of the random prompts.")] = 0,
    device: Annotated[str, typer.Option(help="As for muxk run.")] = "auto",
    model: Annotated[str | None, typer.Option(help="As for muxk run.")] = None,
    dtype: Annotated[str, typer.Option(help="As for muxk run.")] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything to this file.")
    ] = None,
) -> None:
    """Compare policies under a mixed load: streams that decode while long prompts arrive.

    Shows how long streams wait for their next token, how long prompts wait for their first one, and how much
    is decoded, as medians of the runs with the least and the most. Takes runs x policies x about two minutes.
    """
    from muxk.client.bench import BenchPlan, PolicyChoice, run_bench
    from muxk.client.report import as_json, table
    from muxk.client.workload import MixedLoad

    choices = tuple(PolicyChoice.parse(name) for name in policies.split(",") if name.strip())
    longs = parse_longs(long_in, long_every, seconds)
    if not choices or not (longs or solo_seconds):
        die("nothing to measure: give at least one policy and one phase", USAGE)
    _check_policies(choices)
    load = MixedLoad(
        streams=streams,
        short_in=short_in,
        short_out=short_out,
        longs=longs,
        long_out=long_out,
        warmup_s=warmup_seconds,
        solo_s=solo_seconds,
        seed=seed,
    )
    plan = BenchPlan(choices, runs, load, parse_ms(slo), device, model, dtype)
    with readable_errors():
        results = run_bench(plan, lambda text: typer.echo(text, err=True))
    for tokens in dict.fromkeys(result.long_in for result in results):
        plain_console().print(table([result for result in results if result.long_in == tokens], plan.slo_ms))
    if json_file is not None:
        json_file.write_bytes(as_json(plan, results, shlex.join(["muxk", *sys.argv[1:]])))


def parse_longs(lengths: str, every: str, seconds: str) -> tuple[LongPrompts, ...]:
    """The phases with long prompts; one interval or duration serves all lengths. 0 seconds: no phase."""
    from muxk.client.workload import LongPrompts

    tokens = [round(value) for value in _numbers("--long-in", lengths, least=1)]
    every_s = _numbers("--long-every", every, least=0.1)
    seconds_s = _numbers("--seconds", seconds, least=0)
    for option, values in (("--long-every", every_s), ("--seconds", seconds_s)):
        if len(values) not in (1, len(tokens)):
            die(f"{option} has {len(values)} numbers, --long-in {len(tokens)}: give one, or as many", USAGE)
    phases = zip(
        tokens,
        every_s * (len(tokens) if len(every_s) == 1 else 1),
        seconds_s * (len(tokens) if len(seconds_s) == 1 else 1),
        strict=True,
    )
    return tuple(LongPrompts(*phase) for phase in phases if phase[2])


def _numbers(option: str, text: str, least: float) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        die(f"{option} {text}: expected numbers with commas between them", USAGE)
    for value in values:
        if not least <= value <= 1e9:
            die(f"{option} {text}: {value:g} is not a number of at least {least:g}", USAGE)
    return values


def _check_policies(choices: tuple[PolicyChoice, ...]) -> None:
    """A mistake in the last policy must not show after an hour."""
    from muxk.policies.problems import PolicyError
    from muxk.policies.registry import open_policy

    for choice in choices:
        try:
            open_policy(choice.policy, choice.settings)
        except PolicyError as error:
            die(str(error), USAGE)


def parse_ms(text: str) -> float:
    """`100ms`, `0.1s` or `250us` in milliseconds; ends the command for anything else."""
    value = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", text)
    if value is None or float(value[1]) == 0:
        die(f"--slo {text}: expected a time with a unit, such as 100ms", USAGE)
    return float(value[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[value[2]]
