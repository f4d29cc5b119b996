"""Options that `muxk sim`, `compare`, `tune` and `diff` share, and what they mean."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import USAGE, die
from muxk.client.terminal import described_tasks, error_console
from muxk.client.turns import Turns

if TYPE_CHECKING:
    from muxk.client import traffic
    from muxk.client.cells import Cell
    from muxk.client.sim_run import Progress
    from muxk.policies.units import TtftSlo

Device = Annotated[
    str,
    typer.Option(
        metavar="sim:GPU[,tp=N][,devices=N]",
        help="sim:a100, sim:h100 or sim:h200; tp GPUs as one device, several such devices.",
    ),
]
Model = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="A model by name, or the config.json of any other.")
]
WORKLOAD_HELP = (
    "sharegpt, loogle, openthoughts, conversation, toolagent, some of them joined by +, or a trace: "
    "Mooncake, Azure or BurstGPT, or pairs of lengths."
)
Tbt = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="The TBT SLO that all are judged by, and that shipped policies are told. Default: the policy's.",
    ),
]
Ttft = Annotated[
    str, typer.Option(metavar="TIME", help="The TTFT SLO of the joint objective, as 1s + 1ms/token.")
]
Requests = Annotated[int, typer.Option(min=1, metavar="N", help="Requests of each run.")]
Seeds = Annotated[
    int, typer.Option(min=1, max=100, metavar="N", help="Runs of everything, with seeds 0 to N - 1.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, max=256, metavar="N", help="Processes. Default: one for each core. Changes no figure."
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens in the KV pool, if less than what fits. Default: what fits."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Keep runs there, and take them from there: a study that was stopped goes on."
    ),
]
TTFT_DEFAULT = "1s + 1ms/token"


Workload = Annotated[str, typer.Option(metavar="NAME|FILE", help=WORKLOAD_HELP)]
Tolerance = Annotated[
    float, typer.Option(min=0.001, max=0.5, help="Relative width to which a goodput is searched.")
]
TurnsOption = Annotated[
    Turns,
    typer.Option(
        "--turns",
        help="When later turns of a conversation come: open, at times made ahead; closed, a think time after "
        "the answer before.",
    ),
]


def template(policy: str, model: str, requests: int, tbt: str | None, ttft: str) -> Cell:
    """What all cells of a study share; ends the command for an SLO that is none."""
    from muxk.client.cells import Cell

    slo = ttft_slo(ttft)
    return Cell(
        policy,
        model=model,
        requests=requests,
        tbt_ms=tbt_ms(tbt),
        ttft_ms=max(slo.base_ns, 1) / 1e6,
        ttft_ms_per_prompt_token=slo.per_token_ns / 1e6,
    )


def tbt_ms(text: str | None) -> float | None:
    """`--tbt`; ends the command for what is no time."""
    from muxk.policies.units import UnitError, parse_duration

    if text is None:
        return None
    try:
        return parse_duration(text) / 1e6
    except UnitError as error:
        die(f"--tbt {text}: {error}{_hint(error.hint)}", USAGE)


def ttft_slo(text: str) -> TtftSlo:
    """`--ttft`; ends the command for what is none."""
    from muxk.policies.units import UnitError, parse_ttft

    try:
        return parse_ttft(text)
    except UnitError as error:
        die(f"--ttft {text}: {error}{_hint(error.hint)}", USAGE)


def _hint(hint: str) -> str:
    return f"; {hint}" if hint else ""


def check_names(*names: str) -> None:
    """End the command for an empty name, or one with bytes that are no text: it could stand in no report."""
    for name in names:
        if not name.strip():
            die(
                "an empty name: a policy, a workload and a model are each a name or the path of a file", USAGE
            )
        if not name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in name):
            shown = name.encode("utf-8", "backslashreplace").decode()
            die(f"{shown}: the name is no UTF-8 text; rename the file", USAGE)


def check_no_settings(policy: str) -> None:
    """End the command for `chunked:budget=512`, as `muxk compare` takes it, where --set is for that."""
    from muxk.policies.engine import shipped_policies

    name, colon, listed = policy.partition(":")
    if colon and name in shipped_policies():
        given = " ".join(f"--set {part}" for part in listed.split(","))
        die(f"{policy}: here settings have an option of their own: {name} {given}", USAGE)


def check_policy(cell: Cell, label: str = "") -> None:
    """End the command for a policy that can not be opened, a setting that it does not take, or too few
    devices for it. `label` says which of several policies does not take a setting."""
    from muxk.actors.backends import StartupError
    from muxk.client.cells import device_of, opened_policy
    from muxk.policies.problems import PolicyError

    try:
        device_of(opened_policy(cell), cell.device)
    except (PolicyError, StartupError) as error:
        said = str(error)
        die(f"{label}: {said}" if label and said.startswith("--set:") else said, USAGE)


def check_cell(cell: Cell, option: str = "--workload") -> None:
    """End the command for a policy, a device or a workload that makes no sense whatever else is asked.

    A model that does not fit a device is not among that: others may be compared on others.
    """
    check_names(cell.policy, cell.workload, cell.model, *(text for pair in cell.settings for text in pair))
    check_policy(cell)
    opened_workload(cell.workload, cell.rate or 1.0, option)


def opened_workload(
    name: str, rate: float | None, option: str = "--workload", seed: int = 0
) -> traffic.Workload:
    """End the command for one that is none, with the option that named it."""
    from muxk.client.errors import ClientError
    from muxk.client.workload_names import Traffic, find_workload

    try:
        return find_workload(name, Traffic(rate, seed=seed))
    except ClientError as error:
        said = str(error)  # of a file it begins with its path and line
        die(f"{option} {said}" if said.startswith(name) else f"{option} {name}: {said}", USAGE)


def check_rates(*rates: float | None) -> None:
    """End the command for a rate at which no run would end, or that is none."""
    from muxk.client.arrivals import check_rate
    from muxk.client.errors import ClientError

    try:
        for rate in rates:
            if rate is not None:
                check_rate(rate)
    except ClientError as error:
        die(f"--rate: {error}", USAGE)


def rate_or_default(workload: str, rate: float | None) -> float | None:
    """1 request a second for a workload that has no rate of its own."""
    from muxk.client.synthetic import NAMES

    return 1.0 if rate is None and all(part in NAMES for part in workload.split("+")) else rate


@contextmanager
def run_bar() -> Iterator[Callable[[str], Progress]]:
    """A bar for each run of a few, by its label; on a terminal."""
    if not sys.stderr.isatty():
        yield lambda label: lambda share, now_s, ended: None
        return
    from rich.progress import BarColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (described_tasks(44), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=error_console(), transient=True) as bars:

        def of_run(label: str) -> Progress:
            task = bars.add_task(label, total=None)

            def show(share: float | None, now_s: float, ended: int) -> None:
                total = None if share is None else 1.0
                text = f"{label}: {ended:,} requests, {now_s:,.0f} s simulated"
                bars.update(task, total=total, completed=share or 0.0, description=text)

            return show

        yield of_run
