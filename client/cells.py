"""One run of a study as plain data: what is asked (`Cell`), what came of it (`Outcome`), and running it.

A cell says everything that a run depends on, so that it can be sent to another process, kept on disk, and
printed as the `muxk sim` command that repeats it.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from muxk.actors.backends import StartupError, device_for
from muxk.actors.gpu_backend import open_gpu_backend, parse_gpu
from muxk.actors.policy_files import OpenedPolicy, open_with_text
from muxk.actors.profiling import profiled
from muxk.client.errors import ClientError
from muxk.client.histogram import Histogram
from muxk.client.measures import MS, Objectives
from muxk.client.sim_report import Asked, as_dict
from muxk.client.sim_run import Progress, SimPlan, objectives_of, simulate
from muxk.client.study_goals import Goal as Goal
from muxk.client.turns import Turns
from muxk.client.workload_names import Traffic, find_workload
from muxk.kernel.policy import PolicyText
from muxk.policies.engine import compile_policy, shipped_policies
from muxk.policies.problems import PolicyError
from muxk.profiles.profile_file import ProfileError

REQUESTS = 200
"""Of a run by default: 5 % of them, which may wait at the end, are ten."""
WITH_TBT = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {{name: {name}}}
spec:
  extends: {name}
  slo: {{tbt: {tbt}}}
"""


class Cell(msgspec.Struct, frozen=True):
    """What to run. Lengths in tokens, rates in requests a second."""

    policy: str
    """The name of a policy, or the path of its file."""
    settings: tuple[tuple[str, str], ...] = ()
    """Values of its params."""
    device: str = "sim:h200"
    model: str = "qwen3-8b"
    """A name, or the path of a config.json."""
    workload: str = "sharegpt"
    """Names of synthetic ones joined by +, or the path of a trace."""
    rate: float | None = None
    """None: a trace as recorded."""
    seed: int = 0
    """Of the workload and of the device's noise."""
    requests: int | None = REQUESTS
    output_max: int | None = None
    """No more requests are sent after those that ask for so many tokens together."""
    tbt_ms: float | None = None
    """The TBT SLO that the run is judged by, and that a shipped policy is told; None: the policy's own."""
    ttft_ms: float = 1000.0
    ttft_ms_per_prompt_token: float = 1.0
    """The TTFT of the joint objective. Policies schedule by their own."""
    turns: Turns = Turns.OPEN
    kv_tokens: int | None = None
    profile: str | None = None
    """The path of what `muxk profile` measured; None: measured at the start of the run."""


Bins = tuple[tuple[float, int], ...]
"""(upper end in ns, values), ascending."""


class Outcome(msgspec.Struct, frozen=True):
    """What a run came to. All but `seconds` depends on the cell alone."""

    figures: dict[str, Any] = {}
    """As the JSON of `muxk sim`, without its `wall`."""
    ttft: Bins = ()
    tbt: Bins = ()
    error: str = ""
    """Why there are no figures; for the user."""
    seconds: float = 0.0
    """What it took."""

    def meets(self, goal: Goal) -> bool:
        """Whether it met the objectives at a rate that it keeps up with; a run that failed did not.

        A queue that grows misses every TTFT in the end, which a run of some hundred requests does not
        live to see: so the queue must be stable for the joint objective too.
        """
        verdicts = self.figures.get("verdicts")
        return verdicts is not None and bool(verdicts[goal.value] and verdicts["stable"])


def run_cell(cell: Cell, progress: Progress = lambda share, now_s, ended: None) -> Outcome:
    """Never raises: whatever is wrong is told in the outcome."""
    began = perf_counter()
    try:
        outcome = _run(cell, progress)
    except (PolicyError, StartupError, ClientError, ProfileError) as error:
        outcome = Outcome(error=str(error))
    except Exception as error:  # one cell must not take those of a long study with it
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    return msgspec.structs.replace(outcome, seconds=perf_counter() - began)


def _run(cell: Cell, progress: Progress) -> Outcome:
    plan = plan_of(cell)
    run = simulate(plan, progress)
    figures = as_dict(plan, Asked(cell.workload, cell.rate), run)
    del figures["wall"]
    totals = run.measures.totals
    # Through JSON once, so that figures are the same whether or not they came from another process.
    return msgspec.json.decode(
        msgspec.json.encode(Outcome(figures, _bins(totals.ttft), _bins(totals.tbt))), type=Outcome
    )


def _bins(times: Histogram) -> Bins:
    return tuple((round(end, 3), values) for end, values in times.bins())


def plan_of(cell: Cell) -> SimPlan:
    """Raises PolicyError, StartupError, ProfileError, or a ClientError for a workload."""
    opened = opened_policy(cell)
    own = objectives_of(opened.policy)
    objectives = Objectives(cell.tbt_ms or own.tbt_ms, cell.ttft_ms, cell.ttft_ms_per_prompt_token)
    gpu = open_gpu_backend(device_of(opened, cell.device), cell.model, cell.kv_tokens, cell.seed)
    if cell.profile is not None:
        gpu = replace(gpu, profile=profiled(gpu.backend, Path(cell.profile)))
    return SimPlan(
        opened,
        gpu,
        find_workload(cell.workload, Traffic(cell.rate, seed=cell.seed)),
        cell.requests,
        None,
        cell.seed,
        output_max=cell.output_max,
        objectives=objectives,
        turns=cell.turns,
    )


def opened_policy(cell: Cell) -> OpenedPolicy:
    """Its policy, told the cell's TBT SLO where it is a shipped one. Raises PolicyError.

    A policy of one's own keeps the SLO of its file: there it may be part of what the rules say.
    """
    settings = dict(cell.settings)
    if cell.tbt_ms is None or cell.policy not in shipped_policies():
        return open_with_text(cell.policy, settings)
    source = WITH_TBT.format(name=cell.policy, tbt=f"{round(cell.tbt_ms * MS)}ns")
    filename = f"{cell.policy}.yaml"
    return OpenedPolicy(
        compile_policy(source, filename, settings), PolicyText(source, filename, settings), None
    )


def device_of(opened: OpenedPolicy, device: str) -> str:
    """A simulated one, if it has as many of them as the policy needs. Raises StartupError."""
    parse_gpu(device)
    return device_for(device, opened.policy.name, opened.policy.devices_min)


def command_of(cell: Cell) -> str:
    """The `muxk sim` command that repeats the run."""
    words = ["muxk", "sim", cell.policy]
    for key, value in cell.settings:
        words += ["--set", f"{key}={value}"]
    words += ["--device", cell.device, "--model", cell.model, "--workload", cell.workload]
    words += [] if cell.rate is None else ["--rate", f"{cell.rate:g}"]
    words += [] if cell.requests is None else ["--requests", str(cell.requests)]
    words += [] if cell.tbt_ms is None else ["--tbt", f"{_decimal(cell.tbt_ms)}ms"]
    words += ["--ttft", " + ".join(_ttft_terms(cell))]
    words += [] if cell.profile is None else ["--profile", cell.profile]
    words += [] if cell.turns is Turns.OPEN else ["--turns", cell.turns.value]
    words += [] if cell.kv_tokens is None else ["--kv-tokens", str(cell.kv_tokens)]
    return shlex.join([*words, "--seed", str(cell.seed)])


def _ttft_terms(cell: Cell) -> list[str]:
    base, slope = _decimal(cell.ttft_ms), _decimal(cell.ttft_ms_per_prompt_token)
    terms = [f"{base}ms"] if base != "0" or slope == "0" else []
    return [*terms, f"{slope}ms/token"] if slope != "0" else terms


def _decimal(value: float) -> str:
    """To a microsecond, as files of policies write numbers."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def simulated_seconds(outcome: Outcome) -> float:
    """Virtual time of a run that went well."""
    return float(outcome.figures.get("duration", 0.0))
