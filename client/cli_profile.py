"""`muxk profile`: measures a device with a model on it, for estimates that need no time at start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import FAILED, INTERRUPTED, USAGE, die
from muxk.client.progress import terminal_display
from muxk.client.terminal import plain_console

if TYPE_CHECKING:
    from muxk.actors.backends import Backend
    from muxk.actors.profiling import Tell
    from muxk.profiles.grid import Size
    from muxk.profiles.profile_file import Profile

PARTIAL_SUFFIX = ".partial"
CPU_BATCH_MAX = 64
"""Rows of a decode step on the CPU device when nothing is said: larger batches take seconds a step there."""


def profile(
    device: Annotated[
        str, typer.Option(help="auto, cpu, cpu:N, or a simulated GPU: sim:a100, sim:h100, sim:h200[,tp=N].")
    ] = "auto",
    model: Annotated[
        str, typer.Option(help="As for `muxk run`; for a simulated GPU as for `muxk sim`.")
    ] = "smollm2-135m-instruct",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: profiles/<device>_<model>.json in this folder."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A coarse grid: about a tenth of the time.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew, whatever an earlier run has measured.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Measure shapes that the fit did not see; exit code 1 if it is far off."
        ),
    ] = False,
    max_batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"Most rows of a step. Default: 512, on cpu {CPU_BATCH_MAX}."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="As for `muxk run`.")] = "auto",
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Size of the KV cache in tokens. Default: fits the device.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise of a simulated GPU.")] = 0,
) -> None:
    """Measure what prefill and decode take on every split of a device, alone and beside each other.

    MuxWise's estimator, offline: a minute for a simulated GPU, up to hours for a real one. What was measured
    is on disk at once, so a run that was stopped goes on where it was. Then: muxk run POLICY --profile FILE.
    Needs SciPy: pip install 'muxk[profile]'.
    """
    from muxk.profiles.predictor import MissingSciPy
    from muxk.profiles.profile_file import ProfileError

    backend = _open(device, model, dtype, kv_tokens, seed)
    try:
        path, found = _profile(backend, out, quick, fresh, check, _batch(backend, max_batch))
        _report(found, path)
        if check:
            backend.close()
            _check(_open(device, model, dtype, kv_tokens, seed + 1), found)
    except (ProfileError, MissingSciPy) as error:
        die(str(error), FAILED)
    except KeyboardInterrupt:
        die("stopped; the same command goes on from here", INTERRUPTED)
    finally:
        backend.close()


def _open(device: str, model: str, dtype: str, kv_tokens: int | None, seed: int) -> Backend:
    from muxk.actors.backends import StartupError, open_backend
    from muxk.actors.gpu_backend import open_gpu_backend
    from muxk.profiles.gpu import known_gpus

    try:
        with terminal_display() as display:
            if device.removeprefix("sim:").partition(",")[0] in known_gpus():
                return open_gpu_backend(device, model, kv_tokens, seed).backend
            return open_backend(device, model, dtype, kv_tokens, display.progress)
    except StartupError as error:
        die(str(error), USAGE)


def _batch(backend: Backend, asked: int | None) -> int:
    from muxk.profiles.grid import BATCH_MAX

    if asked is not None:
        return asked
    return CPU_BATCH_MAX if backend.device.name.startswith("cpu") else BATCH_MAX


def _profile(
    backend: Backend, out: Path | None, quick: bool, fresh: bool, check: bool, batch_max: int
) -> tuple[Path, Profile]:
    """Measured now; with --check one that is there will do."""
    from muxk.actors.profiling import key_of
    from muxk.profiles.grid import FULL, QUICK
    from muxk.profiles.predictor import check_scipy
    from muxk.profiles.profile_file import default_path, holds_something_else, load_profile

    check_scipy()
    key = key_of(backend)
    path = out or default_path(key)
    if path.is_dir() or not path.name:
        die(f"--out {path}: that is a folder; name the file, as {default_path(key).name}", USAGE)
    if path.is_file() and holds_something_else(path):
        die(f"--out {path}: the file is there and is no profile; give another name, or remove it", USAGE)
    if check and not fresh and path.is_file():
        return path, load_profile(path, key)
    return path, _measured(backend, QUICK if quick else FULL, path, fresh, batch_max)


def _measured(backend: Backend, size: Size, path: Path, fresh: bool, batch_max: int) -> Profile:
    from muxk.actors.profiling import key_of, plan_profile, run_profile
    from muxk.profiles.profile_file import Partial, PartialHeader, write_profile

    header = PartialHeader(key_of(backend), size.name)
    partial = Partial(path.with_name(path.name + PARTIAL_SUFFIX), header, fresh=fresh)
    try:
        profiling = plan_profile(backend, size, batch_max, partial.found, partial.add)
        if profiling.share:
            typer.echo(f"going on with {partial.path}: {profiling.share:.0%} was measured", err=True)
        with terminal_display() as display:
            found = run_profile(profiling, _named(display.progress, backend.device.name), partial.flush)
    finally:
        partial.close()
    write_profile(path, found)
    partial.remove()
    return found


def _named(tell: Tell, device: str) -> Tell:
    return lambda what, share: tell(f"measuring {device} {what}", share)


def _report(found: Profile, path: Path) -> None:
    typer.echo(f"{path}: {found.key.model} on {found.key.device}, {found.grid} grid")
    for what, fit in (("decode", found.decode), ("prefill", found.prefill)):
        typer.echo(
            f"  {what:<8} {fit.samples:>6,} shapes; the fit is off by {fit.median:.1%} (median), "
            f"{fit.largest:.1%} at most"
        )
    typer.echo(
        f"  beside   {found.co_runs:>6,} co-runs; the largest slowdown is {found.largest_slowdown:.2f}"
    )
    if found.cut_short:
        typer.echo(f"  {found.cut_short:,} co-runs outlasted the prefill beside them: lower bounds", err=True)


def _check(backend: Backend, found: Profile) -> None:
    """A table of errors on held-out shapes; exit code 1 when one is over what the paper reports."""
    from muxk.actors.profile_check import REPEATS, check_profile
    from rich.table import Table

    try:
        with terminal_display() as display:
            rows = check_profile(backend, found.estimates, display.progress)
    finally:
        backend.close()
    table = Table("held out", "shapes", "median", "largest", "MuxWise", "", box=None)
    for row in rows:
        allowed = "" if row.allowed is None else f"{row.allowed:.1%}"
        verdict = "" if row.allowed is None else "within" if row.kept else "over"
        table.add_row(
            row.name, f"{len(row.errors):,}", f"{row.median:.1%}", f"{row.largest:.1%}", allowed, verdict
        )
    console = plain_console()
    console.print(table)
    console.print(f"Predicted against the median of {REPEATS} measurements, on every number of units.")
    if not all(row.kept for row in rows):
        raise typer.Exit(FAILED)
