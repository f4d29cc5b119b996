"""`muxk policy list`: which policies have a name on this machine, and who brought them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import AsJson

if TYPE_CHECKING:
    from muxk.policies.registry import Listing

SHA_CHARS = 12

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Only policies of this name.")]


def list_policies(name: Name = None, as_json: AsJson = False) -> None:
    """List the policies that can be run by name here: the shipped ones, and those of other packages.

    A policy that can not be used is listed with the reason. A server on another machine has its own list.
    """
    from muxk.policies.registry import list_policies as installed

    rows = [row for row in installed() if name is None or row.name == name]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    if not rows:
        typer.echo(f"no policy named '{name}' is installed here", err=True)
        raise typer.Exit(1)
    typer.echo(_table(rows))


def _table(rows: list[Listing]) -> str:
    """Columns of name, origin, version and description; problems below the row that they are about."""
    cells = [("POLICY", "ORIGIN", "VERSION", "SHA", "DESCRIPTION")]
    cells += [
        (row.name, row.origin, row.version or "-", row.sha[:SHA_CHARS], row.description) for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines: list[str] = []
    for line, problem in zip(cells, ["", *(row.problem for row in rows)], strict=True):
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        lines.append("  ".join([*padded, line[-1]]).rstrip())
        lines += [f"    {part}" for part in problem.splitlines()]
    return "\n".join(lines)
