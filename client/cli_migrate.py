"""`muxk migrate`: policy files of earlier versions of the language, rewritten for the current one."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import FAILED, USAGE, die

if TYPE_CHECKING:
    from muxk.policies.migrations import Migrated

STDIN = "-"


def migrate(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files of policies, or - to convert stdin to stdout."),
    ],
    write: Annotated[bool, typer.Option("--write", help="Rewrite the files in place.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Say which files would change; exit code 1 when there is one.")
    ] = False,
) -> None:
    """Rewrite policies of an earlier version of the language. Prints what would change, and changes nothing.

    Comments, quotes and layout stay. The policy means the same as before.
    """
    if write and check:
        die("--write and --check do not go together", USAGE)
    refused = changed = 0
    for name in files:
        text = _read(name)
        migrated = _migrated(name, text)
        if migrated is None:
            refused += 1
        elif name == STDIN:
            sys.stdout.write(migrated.text)
        elif migrated.text != text:
            changed += 1
            _tell(name, text, migrated.text, write, check)
    if refused or (check and changed):
        raise typer.Exit(FAILED)


def _migrated(name: str, text: str) -> Migrated | None:
    """The text in the current version, or None with the reasons on stderr."""
    from muxk.policies.migrations import CURRENT, MIGRATIONS, migrate_file
    from muxk.policies.problems import Report

    report = Report()
    migrated = migrate_file(text, name, report)
    known = (CURRENT, *(migration.old for migration in MIGRATIONS))
    unknown = [version for version in migrated.versions if version not in known]
    for problem in report.problems:
        typer.echo(str(problem), err=True)
    for version in unknown:
        what = (
            f"{version!r} is no apiVersion that this muxk knows"
            if version
            else "a document has no apiVersion"
        )
        typer.echo(f"{name}: {what}", err=True)
    return None if report or unknown else migrated


def _tell(name: str, before: str, after: str, write: bool, check: bool) -> None:
    if write:
        _replace(Path(name), after)
        typer.echo(f"{name}: rewritten")
    elif check:
        typer.echo(f"{name}: would be rewritten")
    else:
        lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
        for line in difflib.unified_diff(*lines, fromfile=name, tofile=name):
            typer.echo(line.rstrip("\r\n"))


def _read(name: str) -> str:
    from muxk.policies.policy_choice import read_text
    from muxk.policies.problems import PolicyError

    if name == STDIN:
        return sys.stdin.read()
    try:
        return read_text(Path(name))
    except PolicyError as error:
        die(str(error), USAGE)


def _replace(path: Path, text: str) -> None:
    """Write a file so that it holds the old text or the new one, whatever happens."""
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_bytes(text.encode("utf-8"))
        shutil.copymode(target, beside)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        die(f"{path}: {error.strerror or error}")
