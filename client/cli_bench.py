"""`muxk bench`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from muxk.client.options import USAGE, die, readable_errors


def bench(
    policies: Annotated[
        str, typer.Option(metavar="NAME,...", help="Policies to compare: files or shipped names.")
    ] = "muxwise,inflight",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each policy, each on a fresh server.")] = 3,
    seconds: Annotated[float, typer.Option(min=0, help="Length of the phase with long prompts.")] = 90.0,
    solo_seconds: Annotated[
        float, typer.Option(min=0, help="Length of the phase before it, without long prompts; 0: no ratios.")
    ] = 30.0,
    warmup_seconds: Annotated[float, typer.Option(min=0, help="Not measured, before both.")] = 5.0,
    streams: Annotated[int, typer.Option(min=1, help="Streams that decode all the time.")] = 4,
    short_in: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request on a stream.")] = 32,
    short_out: Annotated[int, typer.Option(min=1, help="Output tokens of a request on a stream.")] = 128,
    long_in: Annotated[int, typer.Option(min=1, help="Prompt tokens of a long request.")] = 1500,
    long_out: Annotated[int, typer.Option(min=1, help="Output tokens of a long request.")] = 8,
    long_every: Annotated[float, typer.Option(min=0.1, help="Seconds from one long to the next.")] = 10.0,
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
    from muxk.client.bench import BenchPlan, run_bench
    from muxk.client.report import as_json, table
    from muxk.client.workload import MixedLoad
    from rich.console import Console

    names = tuple(name.strip() for name in policies.split(",") if name.strip())
    if not names or not seconds + solo_seconds:
        die("nothing to measure: give at least one policy and one phase", USAGE)
    _check_policies(names)
    load = MixedLoad(
        streams=streams,
        short_in=short_in,
        short_out=short_out,
        long_in=long_in,
        long_out=long_out,
        long_every_s=long_every,
        warmup_s=warmup_seconds,
        solo_s=solo_seconds,
        mixed_s=seconds,
        seed=seed,
    )
    plan = BenchPlan(names, runs, load, parse_ms(slo), device, model, dtype)
    with readable_errors():
        results = run_bench(plan, lambda text: typer.echo(text, err=True))
    Console().print(table(results, plan.slo_ms))
    if json_file is not None:
        json_file.write_bytes(as_json(plan, results, shlex.join(["muxk", *sys.argv[1:]])))


def _check_policies(names: tuple[str, ...]) -> None:
    """A mistake in the last policy must not show after an hour."""
    from muxk.policies.engine import load_policy
    from muxk.policies.problems import PolicyError

    for name in names:
        try:
            load_policy(name)
        except PolicyError as error:
            die(str(error), USAGE)


def parse_ms(text: str) -> float:
    """`100ms`, `0.1s` or `250us` in milliseconds; ends the command for anything else."""
    value = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", text)
    if value is None or float(value[1]) == 0:
        die(f"--slo {text}: expected a time with a unit, such as 100ms", USAGE)
    return float(value[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[value[2]]
