"""`muxk sim`: a workload and a policy on a simulated GPU, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import FAILED, INTERRUPTED, USAGE, ProfileFile, Settings, die, parse_settings
from muxk.client.study_options import (
    Device,
    KvTokens,
    Model,
    Tbt,
    TurnsOption,
    check_names,
    check_no_settings,
    check_rates,
    opened_workload,
    rate_or_default,
    tbt_ms,
    ttft_slo,
)
from muxk.client.study_options import Workload as WorkloadOption
from muxk.client.terminal import described_tasks, error_console, plain_console
from muxk.client.turns import Turns
from muxk.client.written_files import check_files, write_files

if TYPE_CHECKING:
    from muxk.actors.gpu_backend import GpuBackend
    from muxk.actors.policy_files import OpenedPolicy
    from muxk.client import traffic
    from muxk.client.measures import Objectives
    from muxk.client.per_request import PerRequest
    from muxk.client.sim_run import Progress, Run, SimPlan

DURATION_MAX_S = 1e8
"""Three years."""
REQUESTS_DEFAULT = 200
OUTPUT_DEFAULT = 200_000
"""Tokens, so that a run of a workload with long answers ends within a minute as well."""


Rate = Annotated[
    float | None,
    typer.Option(
        metavar="R", help="Requests a second. Default: 1; of a trace with times, as it was recorded."
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"Requests in all. Default: {REQUESTS_DEFAULT}, or fewer that ask for {OUTPUT_DEFAULT:,} "
        "tokens of output together.",
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(metavar="S", help="Send what arrives within so many seconds, in place of --requests."),
]
OwnTtft = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="The TTFT SLO of the joint objective, as 1s + 1ms/token. Default: the policy's.",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write everything, with the keys of vllm bench serve."),
]
Detailed = Annotated[
    bool,
    typer.Option(
        "--detailed", help="With --json: every request by itself too, as vllm bench serve --save-detailed."
    ),
]
RecordFile = Annotated[
    Path | None,
    typer.Option("--record", metavar="FILE", help="Keep the decisions for `muxk explain --record`."),
]


def sim(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A policy's file, or the name of one.")],
    settings: Settings = None,
    device: Device = "sim:h200",
    model: Model = "qwen3-8b",
    workload: WorkloadOption = "conversation",
    rate: Rate = None,
    requests: Requests = None,
    duration: Duration = None,
    turns: TurnsOption = Turns.OPEN,
    tbt: Tbt = None,
    ttft: OwnTtft = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload and of the noise of the device.")] = 0,
    kv_tokens: KvTokens = None,
    profile: ProfileFile = None,
    json_file: JsonFile = None,
    detailed: Detailed = False,
    record: RecordFile = None,
) -> None:
    """Try a policy on a GPU that you do not have: what it serves, how fast, and whether it keeps its SLOs.

    Runs what `muxk run` runs, on a modelled GPU in virtual time. Needs no GPU and no model's weights. The
    same command gives the same figures.
    """
    from muxk.client.per_request import PerRequest
    from muxk.client.sim_run import S, SimPlan

    check_files(("--json", json_file), ("--record", record))
    if detailed and json_file is None:
        die("--detailed is for the file of --json: give one", USAGE)
    rows = PerRequest() if detailed else None
    check_names(policy, workload, model)
    check_rates(rate)
    check_no_settings(policy)
    duration_ns = None if duration is None else round(_seconds(duration) * S)
    output_max = None
    if requests is None and duration is None:
        requests, output_max = REQUESTS_DEFAULT, OUTPUT_DEFAULT
    opened = _open_policy(policy, parse_settings(settings), tbt_ms(tbt))
    gpu = _with_profile(_open_gpu(opened, device, model, kv_tokens, seed), profile)
    rate = rate_or_default(workload, rate)
    found = opened_workload(workload, rate, seed=seed)
    _check_some_come(found, duration_ns)
    plan = SimPlan(
        opened,
        gpu,
        found,
        requests,
        duration_ns,
        seed,
        record,
        output_max,
        _objectives(opened, tbt, ttft),
        turns,
    )
    if rows is not None:
        plan = replace(plan, each=rows.add)
    _report(plan, workload, rate, _simulated(plan), rows, json_file)


def _objectives(opened: OpenedPolicy, tbt: str | None, ttft: str | None) -> Objectives | None:
    """What the run is judged by; None: the SLOs of the policy."""
    from muxk.client.measures import MS, Objectives
    from muxk.client.sim_run import objectives_of

    if tbt is None and ttft is None:
        return None
    own = objectives_of(opened.policy)
    gap_ms = tbt_ms(tbt) or own.tbt_ms
    if ttft is None:
        return Objectives(gap_ms, own.ttft_ms, own.ttft_ms_per_prompt_token)
    slo = ttft_slo(ttft)
    return Objectives(gap_ms, max(1, slo.base_ns) / MS, slo.per_token_ns / MS)


def _seconds(duration: float) -> float:
    if not 0 < duration <= DURATION_MAX_S:
        die(f"--duration {duration:g}: expected seconds, more than 0 and at most {DURATION_MAX_S:g}", USAGE)
    return duration


def _check_some_come(workload: traffic.Workload, duration_ns: int | None) -> None:
    first = next(iter(workload.requests()), None)
    if duration_ns is not None and first is not None and first.arrival_ns >= duration_ns:
        comes = f"the first request comes after {first.arrival_ns / 1e9:.3g} s"
        die(f"--duration {duration_ns / 1e9:g}: {comes}; give more, or a higher --rate", USAGE)


def _open_policy(name: str, settings: dict[str, str], tbt: float | None) -> OpenedPolicy:
    from muxk.client.cells import Cell, opened_policy
    from muxk.policies.problems import PolicyError

    try:
        return opened_policy(Cell(name, tuple(settings.items()), tbt_ms=tbt))
    except PolicyError as error:
        die(str(error), USAGE)


def _open_gpu(opened: OpenedPolicy, device: str, model: str, kv_tokens: int | None, seed: int) -> GpuBackend:
    from muxk.actors.backends import StartupError
    from muxk.actors.gpu_backend import open_gpu_backend
    from muxk.client.cells import device_of

    try:
        return open_gpu_backend(device_of(opened, device), model, kv_tokens, seed)
    except StartupError as error:
        die(str(error), USAGE)


def _with_profile(gpu: GpuBackend, path: Path | None) -> GpuBackend:
    if path is None:
        return gpu
    from muxk.actors.profiling import profiled
    from muxk.profiles.profile_file import ProfileError

    try:
        return replace(gpu, profile=profiled(gpu.backend, path))
    except ProfileError as error:
        die(f"--profile: {error}", USAGE)


def _simulated(plan: SimPlan) -> Run:
    from muxk.client.errors import ClientError
    from muxk.client.sim_run import simulate
    from muxk.kernel.record_frames import NotARecording

    try:
        with _shown() as progress:
            return simulate(plan, progress)
    except KeyboardInterrupt:
        die("stopped", INTERRUPTED)
    except NotARecording as error:
        die(f"--record: {error}", USAGE)
    except ClientError as error:
        die(str(error), FAILED)


@contextmanager
def _shown() -> Iterator[Progress]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda share, now_s, ended: None
        return
    from rich.progress import BarColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (described_tasks(36), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=error_console(), transient=True) as bars:
        task = bars.add_task("calibrating", total=None)

        def show(share: float | None, now_s: float, ended: int) -> None:
            total = None if share is None else 1.0
            text = f"{ended:,} requests, {now_s:,.0f} s simulated"
            bars.update(task, total=total, completed=share or 0.0, description=text)

        yield show


def _report(
    plan: SimPlan,
    workload: str,
    rate: float | None,
    run: Run,
    rows: PerRequest | None,
    json_file: Path | None,
) -> None:
    """The file first: whatever becomes of the terminal, it is there."""
    import msgspec
    from muxk.client.sim_report import Asked, as_dict, table

    asked = Asked(workload, rate)
    made = as_dict(plan, asked, run) | (rows.arrays() if rows is not None else {})
    written = write_files(("--json", json_file, msgspec.json.format(msgspec.json.encode(made)) + b"\n"))
    plain_console().print(table(plan, asked, run))
    if not written:
        raise typer.Exit(USAGE)
