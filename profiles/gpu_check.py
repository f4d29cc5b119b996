"""`python -m muxk.profiles.gpu_check`: what a card does, in five stages within ten minutes.

1  partitions: what the driver gives, SM ids of both lanes (disjoint?), events between lanes, a graph that is
   replayed from another lane's stream, times to create and to switch, bytes of a context
2  operators: copies, products and decode attention by SM count, alone and beside the other lane
3  parity: operators against torch's, a small random model against transformers under forced tokens
4  decode of a model of the size of Llama 3.1 8B with random weights, 64 rows: time of a step, of its launch,
   share of the measured copy bandwidth
5  serving: a mixed load under muxwise, chunked at three budgets and three static splits, on one server with
   random weights: TTFT and TBT, idle time by cause, and the simulator's prediction of each run

Each stage is a process of its own with a time of its own; one that fails does not stop the next. Each writes
`stage-N.json` as it goes on, with date, card and driver, fit to be committed under profiles/: what it has
found is there also when it fails or is ended. At the end `constants.yaml` holds what was measured in the form
of profiles/gpus/h200.yaml: it is to replace the groups there that say `assumed: true`. Nothing is downloaded.
With --dry-run no card is used: every line that needs none runs on sizes that take no time, and no figure
means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muxk.kernel.devices.cuda_streams import first_line

BUILD_S = 150.0
"""FlashInfer's kernels are compiled by one process beside the first stage; what is not there after so long is
done without, by Triton's."""
BOXES_S: Mapping[int, float] = {1: 45.0, 2: 75.0, 3: 75.0, 4: 50.0, 5: 225.0}
"""With the build less than ten minutes. What is left over goes to the last stage."""
TOTAL_S = 570.0
"""Of all stages and the build."""
GRACE_S = 15.0
"""After its time a stage is ended."""
NAMES: Mapping[int, str] = {1: "partitions", 2: "operators", 3: "parity", 4: "decode", 5: "serving"}


@dataclass(frozen=True)
class Arguments:
    out: Path
    stages: tuple[int, ...]
    dry_run: bool
    index: int
    only: int | None
    box: float | None
    """Time of `only`, in seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every stage ended by itself."""
    arguments = _parsed(argv)
    if arguments.only is not None:
        box_s = BOXES_S[arguments.only] if arguments.box is None else arguments.box
        _write(arguments, arguments.only, _in_process(arguments, arguments.only, box_s))
        return 0
    began_all = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    reports: dict[int, Mapping[str, Any]] = {}
    build = None if arguments.dry_run else Build(arguments)
    for stage in arguments.stages:
        if build is not None and stage > 1:
            build.settle()
        began = time.monotonic()
        box_s = BOXES_S[stage]
        if stage == max(BOXES_S):
            box_s = max(box_s, TOTAL_S - GRACE_S - (began - began_all))
        print(f"stage {stage}, {NAMES[stage]}: at most {box_s:.0f} s", flush=True)
        reports[stage] = _run(arguments, stage, box_s)
        told = reports[stage].get("failed", "done")
        print(f"  {told}, {time.monotonic() - began:.1f} s", flush=True)
    if build is not None:
        build.settle()
    _write_constants(arguments, reports)
    return int(any("failed" in report for report in reports.values()))


def _parsed(argv: Sequence[str] | None) -> Arguments:
    parser = argparse.ArgumentParser(
        prog="python -m muxk.profiles.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="a folder for the JSON files")
    parser.add_argument("--stages", default="1,2,3,4,5", help="which, as 1,3; all of them by default")
    parser.add_argument("--index", type=int, default=0, help="which card, as CUDA counts them")
    parser.add_argument("--dry-run", action="store_true", help="without a card, as far as that goes")
    parser.add_argument("--only", type=int, choices=tuple(BOXES_S), help=argparse.SUPPRESS)
    parser.add_argument("--box", type=float, help=argparse.SUPPRESS)
    values = vars(parser.parse_args(argv))
    parts = [part.strip() for part in values["stages"].split(",") if part.strip()]
    wrong = [part for part in parts if part not in map(str, BOXES_S)]
    if wrong or not parts:
        parser.error(f"--stages {values['stages']!r}: stages are {', '.join(map(str, BOXES_S))}")
    values["stages"] = tuple(sorted(dict.fromkeys(map(int, parts))))
    return Arguments(**values)


def _path(arguments: Arguments, stage: int) -> Path:
    return arguments.out / f"stage-{stage}.json"


def _run(arguments: Arguments, stage: int, box_s: float) -> Mapping[str, Any]:
    """In a process of its own, so that an error that sticks to the card's context ends with it."""
    if arguments.dry_run:
        report = _in_process(arguments, stage, box_s)
        _write(arguments, stage, report)
        return report
    path = _path(arguments, stage)
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "muxk.profiles.gpu_check", "--only", str(stage), "--box", f"{box_s:.1f}"]
    command += ["--out", str(arguments.out), "--index", str(arguments.index)]
    with (arguments.out / f"stage-{stage}.log").open("wb") as log:
        code = _ended(subprocess.Popen(command, stderr=log, start_new_session=True), box_s + GRACE_S)
    if code is None:
        failed = f"it was ended after {box_s + GRACE_S:.0f} s"
    else:
        failed = f"its process ended with code {code}: {_last_words(arguments.out / f'stage-{stage}.log')}"
    if code != 0 or not path.exists():
        found = _read(path) if path.exists() else {"stage": NAMES[stage]}
        _write(arguments, stage, {**found, "failed": failed})
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_text("utf-8"))
    assert isinstance(report, dict)
    return report


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The code of a process; None when it, and all that it started, had to be killed."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        process.wait()
        return None


def _last_words(path: Path) -> str:
    return path.read_text("utf-8", errors="replace").strip()[-2000:]


class Build:
    """Compiles attention in a process of its own, and tells the stages to do without where that fails."""

    def __init__(self, arguments: Arguments) -> None:
        self._began = time.monotonic()
        self._log = arguments.out / "build.log"
        command = [sys.executable, "-m", "muxk.profiles.gpu_check_build", "--index", str(arguments.index)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._settled = False

    def settle(self) -> None:
        """Wait for it, once, until its time is over."""
        if self._settled:
            return
        self._settled = True
        code = _ended(self._process, max(1.0, self._began + BUILD_S - time.monotonic()))
        took, words = time.monotonic() - self._began, _last_words(self._log).splitlines()[-1:]
        if code == 0:
            print(f"attention is built, {took:.0f} s: {' '.join(words)}", flush=True)
            return
        os.environ["MUXK_FLASHINFER"] = "0"
        why = "was killed" if code is None else f"ended with {code}: {' '.join(words)}"
        print(f"attention is Triton's: the build of FlashInfer's {why}, {took:.0f} s", flush=True)


def _in_process(arguments: Arguments, stage: int, box_s: float) -> dict[str, Any]:
    """The report of a stage; what it raises is in it, beside what it had found."""
    from muxk.profiles.gpu_check_rig import Rig, TimeBox

    began = time.monotonic()
    report: dict[str, Any] = {"stage": NAMES[stage]}
    found: dict[str, Any] = {}
    rig = None
    try:
        rig = Rig(dry=arguments.dry_run, index=arguments.index)
        report |= rig.header()
        box = TimeBox.of(box_s, found, lambda: _write(arguments, stage, report | found))
        report |= _stage(stage)(rig, box)
    except Exception as error:
        report |= found | {"failed": first_line(error)}
    report["took_s"] = round(time.monotonic() - began, 3)
    try:
        if rig is not None:
            rig.close()
    except Exception as error:  # after a failure that sticks to the context every call fails
        report["not_closed"] = first_line(error)
    return report


def _stage(stage: int) -> Callable[[Any, Any], Mapping[str, Any]]:
    """Imported when it runs: a module that fails is the failure of its own stage."""
    if stage == 1:
        from muxk.profiles.gpu_check_partitions import check_partitions as check
    elif stage == 2:
        from muxk.profiles.gpu_check_operators import check_operators as check
    elif stage == 3:
        from muxk.profiles.gpu_check_parity import check_parity as check
    elif stage == 4:
        from muxk.profiles.gpu_check_decode import check_decode as check
    else:
        from muxk.profiles.gpu_check_serving import check_serving as check
    return check


def _write(arguments: Arguments, stage: int, report: Mapping[str, Any]) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    _path(arguments, stage).write_text(json.dumps(report, indent=1, default=str) + "\n", "utf-8")


def _write_constants(arguments: Arguments, reports: Mapping[int, Mapping[str, Any]]) -> None:
    from muxk.profiles.gpu_check_constants import suggested

    text = suggested(reports)
    if text is not None:
        (arguments.out / "constants.yaml").write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
