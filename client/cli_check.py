"""`muxk check`: every mistake of policy files and tests, and what is odd about them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import FAILED, USAGE, AsJson, Settings, die, parse_settings

if TYPE_CHECKING:
    from muxk.policies.checking import CheckedFile

STDIN = "-"


def check(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Files of policies or tests, names of shipped policies, or - for stdin."
        ),
    ],
    settings: Settings = None,
    as_json: AsJson = False,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Also write a SARIF 2.1.0 report, for CI.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
) -> None:
    """Check files of policies and tests: mistakes, and warnings such as rules that can never be reached.

    Each is shown as file:line:column, with a remedy. Needs no server. Exit code 1 when there is a mistake.
    """
    from muxk.client.check_report import as_data, as_sarif, count, summary

    values = parse_settings(settings)
    files = [_checked(name, values) for name in policies]
    if as_json:
        typer.echo(json.dumps(as_data(files), indent=2))
    else:
        for file in files:
            _print(file, summary(file))
        typer.echo(count(files), err=True)
    if sarif is not None:
        try:
            sarif.write_text(json.dumps(as_sarif(files), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            die(f"--sarif {sarif}: {error.strerror or error}", USAGE)
    data = as_data(files)
    if data["errors"] or (strict and data["warnings"]):
        raise typer.Exit(FAILED)


def _print(file: CheckedFile, summary: str) -> None:
    for problem in file.problems:
        typer.echo(str(problem), err=True)
    if summary:
        typer.echo(summary)


def _checked(name: str, values: dict[str, str]) -> CheckedFile:
    from muxk.policies.checking import CheckedFile, check_file
    from muxk.policies.problems import PolicyError

    try:
        if name != STDIN and not Path(name).exists():
            return _installed(name, values)
        text, filename, directory = _text(name)
    except PolicyError as error:
        return CheckedFile(name, (), (), error.problems)
    checked = check_file(text, filename, values, directory)
    return CheckedFile(name, checked.policies, checked.tests, checked.problems)


def _installed(name: str, values: dict[str, str]) -> CheckedFile:
    """A policy that is known by name: a shipped one, or one of another package, which may be in Python."""
    from muxk.policies.checking import CheckedFile, check_file
    from muxk.policies.engine import CompiledPolicy, shipped_policies
    from muxk.policies.policy_choice import open_choice
    from muxk.policies.shipped_files import shipped_text

    if name in shipped_policies():
        checked = check_file(shipped_text(name), f"{name}.yaml", values)
        return CheckedFile(name, checked.policies, checked.tests, checked.problems)
    policy = open_choice(name, values).policy
    if isinstance(policy, CompiledPolicy):
        return CheckedFile(name, (policy,), (), policy.warnings)
    return CheckedFile(name, (), (), (), in_python=True)


def _text(name: str) -> tuple[str, str, Path]:
    """Text of a file, its name in messages, and the folder that it stands in. Raises PolicyError."""
    from muxk.policies.policy_choice import read_text
    from muxk.policies.problems import PolicyError, Problem

    if name == STDIN:
        try:
            return sys.stdin.read(), "<stdin>", Path()
        except UnicodeDecodeError as error:
            message = f"is not UTF-8 text: byte {error.start}"
            raise PolicyError([Problem("<stdin>", 1, 1, message, "", "")]) from None
    return read_text(Path(name)), name, Path(name).parent
