"""The files that a command writes at its end: tried before its work, so that none of it is lost."""

from __future__ import annotations

from pathlib import Path

import typer
from muxk.client.options import USAGE, die


def check_files(*files: tuple[str, Path | None]) -> None:
    """A mistake in where to write must not show after the run; by the option and the path of each."""
    seen: dict[Path, str] = {}
    for option, path in files:
        if path is None:
            continue
        if not path.parent.is_dir():
            die(f"{option} {path}: there is no folder {path.parent}", USAGE)
        if path.is_dir():
            die(f"{option} {path}: that is a folder", USAGE)
        _try(option, path)
        if path.resolve() in seen and (path.is_file() or not path.exists()):
            die(f"{option} {path}: {seen[path.resolve()]} is the same file", USAGE)
        seen[path.resolve()] = option


def _try(option: str, path: Path) -> None:
    """Open it as it would be to write, without a change. What is a pipe or a device is taken as it is."""
    existed = path.exists()
    if existed and not path.is_file():
        return
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        die(f"{option} {path}: it can not be written: {error.strerror or error}", USAGE)


def write_files(*files: tuple[str, Path | None, bytes]) -> bool:
    """Write each that was asked for, and say on stderr of each that failed; whether all were written."""
    failed = 0
    for option, path, content in files:
        try:
            if path is not None:
                path.write_bytes(content)
        except OSError as error:
            typer.echo(f"muxk: {option} {path}: {error.strerror or error}", err=True)
            failed += 1
    return not failed
