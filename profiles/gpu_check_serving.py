"""Stage 5: the same load on the same server under one policy after the other, and what the simulator
predicts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import anyio
import msgspec
from muxk.actors.backends import StartupError
from muxk.actors.gpu_backend import GpuBackend
from muxk.actors.policy_files import open_with_text
from muxk.client.aio import AsyncClient
from muxk.client.bench import PolicyChoice
from muxk.client.errors import ClientError, RequestError
from muxk.client.measures import Measures, Served
from muxk.client.sim_run import SimPlan, objectives_of, simulate
from muxk.client.traffic import TrafficRequest, Workload, token_ids
from muxk.kernel.devices.cuda_streams import first_line
from muxk.kernel.devices.sim_gpu import SimGpu
from muxk.kernel.work import Split
from muxk.policies.problems import PolicyError
from muxk.profiles.cost import DoesNotFit, RooflineCost, gpu_options, kv_pages
from muxk.profiles.gpu import GpuError, known_gpus, load_gpu
from muxk.profiles.gpu_check_load import DRY_LOAD, FULL_LOAD
from muxk.profiles.gpu_check_rig import Rig, TimeBox
from muxk.profiles.operators import ShapeError, load_shape

S = 1_000_000_000
LOAD_S = (12.0, 60.0)
"""Least and most of one run: what is left of the stage is shared out."""
DRY_LOAD_S = 0.6
DRAIN_S = 6.0
"""After the last arrival: what has not ended then is aborted and counts as not completed."""
SIMULATING_S = 30.0
"""Kept for the simulator after the runs."""
TEXTS = 1_000_000
"""Texts that a run may use, none of which another run uses: the server keeps prefixes."""
SIMULATED_MODEL = "llama-3.1-8b"


@dataclass(frozen=True)
class ServerProcess:
    """The server, and where it listens."""

    endpoint: str
    admin: str
    ready_s: float


def check_serving(rig: Rig, box: TimeBox) -> dict[str, Any]:
    """One run a policy, as many as the time allows, in the order of importance; then the simulator's."""
    load = DRY_LOAD if rig.dry else FULL_LOAD
    found, runs = box.found, list[dict[str, Any]]()
    choices, splits = _choices(rig), rig.partitions.splits()
    rig.close()  # the card is the server's now
    with _server(rig) as server:
        seconds = DRY_LOAD_S if rig.dry else _seconds(box.left_s, len(choices))
        found |= {"load": load.name, "seconds": seconds, "runs": runs, "server_ready_s": server.ready_s}
        for number, choice in enumerate(choices):
            if box.left_s < seconds + DRAIN_S and runs:
                found["left_out"] = [choice.label for choice in choices[len(runs) :]]
                break
            box.save()
            runs.append(_run(server, choice, replace(load, texts_from=number * TEXTS), seconds))
    if rig.dry:
        choices = choices[:1]  # one is enough to see that it works
    for run, choice in zip(runs, choices, strict=False):
        box.save()
        if box.left_s <= 0:
            run["simulated"] = {"left_out": "the time of the stage was over"}
        else:
            run["simulated"] = _simulated(rig, choice, load, seconds, splits, _pages(run))
    return found


def _seconds(left_s: float, runs: int) -> float:
    """Of each run, so that all of them and the simulator fit."""
    least, most = LOAD_S
    return max(least, min(most, (left_s - SIMULATING_S) / runs - DRAIN_S))


def _pages(run: Mapping[str, Any]) -> int | None:
    """KV pages that the server had."""
    pages = ((run.get("device_state") or {}).get("memory") or {}).get("kv_pages")
    return pages if isinstance(pages, int) else None


def _choices(rig: Rig) -> tuple[PolicyChoice, ...]:
    """muxwise, then chunked with three budgets and three splits that the card has, the middle ones first."""
    units, total = [split.decode_units for split in rig.splits(3)], rig.partitions.units
    static = [
        PolicyChoice("static_split", {"decode_share": f"{100 * count / total:.2f}%"}) for count in units
    ]
    if rig.dry:
        return (PolicyChoice("muxwise"), *static[:1])
    chunked = [PolicyChoice("chunked", {"budget": str(budget)}) for budget in (512, 1024, 2048)]
    middle, low, high = (static[place] for place in (len(static) // 2, 0, -1))
    ordered = (PolicyChoice("muxwise"), chunked[1], middle, chunked[0], low, chunked[2], high)
    return tuple({choice.label: choice for choice in ordered}.values())


# --- the server ---


@contextmanager
def _server(rig: Rig) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="muxk-") as folder:
        Path(folder).chmod(0o700)
        command = [sys.executable, "-m", "muxk.profiles.gpu_check_server", "--directory", folder]
        command += ["--index", str(rig.index), *(["--dry-run"] if rig.dry else [])]
        errors = (Path(folder) / "stderr").open("w+b")
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            said = _until_ready(process, Path(folder) / "stderr")
            yield ServerProcess(said["ready"], said["admin"], time.monotonic() - began)
        finally:
            _stop(process)
            errors.close()


def _until_ready(process: subprocess.Popen[bytes], errors: Path) -> Mapping[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        if "ready" in said:
            return dict(said)
    words = errors.read_text(errors="replace").strip().splitlines()
    raise RuntimeError(f"the server did not start: {words[-1] if words else 'it said nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The first SIGTERM drains, the second stops; then it is killed."""
    for _ in range(2):
        process.terminate()
        try:
            process.wait(3.0)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


# --- a run ---


def _run(server: ServerProcess, choice: PolicyChoice, load: Workload, seconds: float) -> dict[str, Any]:
    try:
        return anyio.run(_drive, server, choice, load, seconds)
    except (ClientError, RequestError, PolicyError) as error:
        return {"policy": choice.label, "failed": first_line(error)}


async def _drive(
    server: ServerProcess, choice: PolicyChoice, load: Workload, seconds: float
) -> dict[str, Any]:
    opened = open_with_text(choice.policy, choice.settings)
    measures = Measures(objectives_of(opened.policy))
    async with AsyncClient(server.endpoint, admin=server.admin) as client:
        await client.swap(choice.policy, choice.settings)
        before = await client.state()
        driver = _Driver(client, measures, time.perf_counter_ns())
        await driver.run(load, seconds)
        after = await client.state()
    arbiter = after["arbiter"]
    return {
        "policy": choice.label,
        "sent": driver.sent,
        "figures": measures.figures(),
        "judged": _judged(measures),
        "errors": driver.errors,
        "split_residency_ms": _grown(before, after, "split_residency_ms"),
        "counts": _grown(before, after, "counts"),
        "idle_before": before["arbiter"].get("idle"),
        "idle_after": arbiter.get("idle"),
        "device_state": arbiter.get("device_state"),
    }


def _judged(measures: Measures) -> dict[str, Any]:
    judged: dict[str, Any] = msgspec.to_builtins(measures.judge())
    return judged


def _grown(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> dict[str, int]:
    """Counts of this run alone: the server has served others before."""
    earlier = before["arbiter"][name]
    return {key: value - earlier.get(key, 0) for key, value in after["arbiter"][name].items()}


class _Driver:
    """Sends requests when they are due and notes when their tokens come."""

    def __init__(self, client: AsyncClient, measures: Measures, start_ns: int) -> None:
        self._client = client
        self._measures = measures
        self._start_ns = start_ns
        self._vocabulary = client.server.vocabulary_size
        self.sent = 0
        self.errors: dict[str, int] = {}

    async def run(self, load: Workload, seconds: float) -> None:
        due = takewhile(lambda request: request.arrival_ns < seconds * S, load.requests())
        with anyio.move_on_after(seconds + DRAIN_S):
            async with anyio.create_task_group() as tasks:
                for request in due:
                    await anyio.sleep((self._start_ns + request.arrival_ns - time.perf_counter_ns()) / S)
                    self.sent += 1
                    tasks.start_soon(self._follow, request)

    async def _follow(self, request: TrafficRequest) -> None:
        """What was sent and did not end in time counts too, as not completed."""
        tokens: list[int] = []
        completed = False
        try:
            prompt = token_ids(request.prompt, self._vocabulary).tolist()
            stream = await self._client.submit(
                token_ids=prompt, max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True
            )
            while deltas := await stream.deltas():
                for delta in deltas:
                    tokens += [delta.arrived_ns - self._start_ns] * len(delta.token_ids)
            completed = True
        except RequestError as error:
            self.errors[str(error)] = self.errors.get(str(error), 0) + 1
        finally:
            served = Served(request.arrival_ns, request.prompt_tokens, tokens, completed)
            self._measures.add(served)


# --- the simulator ---


def _simulated(
    rig: Rig,
    choice: PolicyChoice,
    load: Workload,
    seconds: float,
    splits: Sequence[Split],
    pages: int | None,
) -> dict[str, Any]:
    """The same requests under the same policy on the modelled card with the real one's splits and KV pool, as
    it is known before this run."""
    name = "h200" if rig.dry else _profile_of(str(rig.header()["card"]))
    if name is None:
        return {"left_out": f"no profile of this card: there are {', '.join(known_gpus())}"}
    began = time.perf_counter()
    try:
        plan = SimPlan(
            opened=open_with_text(choice.policy, choice.settings),
            gpu=_modelled(name, splits, None if rig.dry else pages),
            workload=load,
            requests_max=None,
            duration_ns=round(seconds * S),
        )
        run = simulate(plan)
    except (ClientError, StartupError, PolicyError, GpuError, ShapeError, DoesNotFit) as error:
        return {"failed": first_line(error)}
    return {
        "gpu": name,
        "took_s": round(time.perf_counter() - began, 3),
        "figures": run.measures.figures(),
        "judged": _judged(run.measures),
        "split_residency_ms": run.residency_ms,
        "counts": run.counts,
    }


def _modelled(name: str, splits: Sequence[Split], pages: int | None) -> GpuBackend:
    profile, shape = load_gpu(name), load_shape(SIMULATED_MODEL)
    fitting = kv_pages(profile, shape, 1)
    options = gpu_options(profile, shape, 1, fitting if pages is None else min(fitting, pages), seed=0)
    cost = RooflineCost(profile, shape, 1)
    same = all(split.decode_units + split.prefill_units == cost.units for split in splits)
    menu = tuple(splits) if same else ()  # a part of a card is not what its profile is of
    return GpuBackend(SimGpu(cost, msgspec.structs.replace(options, menu=menu)), shape, 1)


def _profile_of(card: str) -> str | None:
    """`NVIDIA H200` -> `h200`, where there is such a profile."""
    return next((name for name in known_gpus() if name in card.lower().split()), None)
