"""`muxk doctor`: what this machine has, and what that means for serving on it."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import typer
from muxk.client.options import AsJson

if TYPE_CHECKING:
    from muxk.client.doctor import Finding, Report, State

MARKS: Mapping[State, str] = {"good": "+", "note": "!", "missing": "-"}
WIDTH_MAX = 100


def doctor(as_json: AsJson = False) -> None:
    """Tell what muxk finds here: cores, cards, drivers, packages, the embedded model; and what each means.

    It changes nothing, and needs nothing that is not installed with muxk itself.
    """
    from muxk.client.doctor import examine

    report = examine()
    typer.echo(_json(report) if as_json else _text(report))


def _json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def _text(report: Report) -> str:
    """Marks: + good, ! worth knowing, - missing."""
    width = min(WIDTH_MAX, shutil.get_terminal_size().columns)
    column = max(len(finding.topic) for finding in report.findings)
    lines = [line for finding in report.findings for line in _lines(finding, column, width)]
    return "\n".join([*lines, "", *textwrap.wrap(_verdict(report), width)])


def _lines(finding: Finding, column: int, width: int) -> list[str]:
    """`+ topic  what was found`, and below it what that means."""
    first = f"{MARKS[finding.state]} {finding.topic:<{column}}  "
    rest = " " * len(first)
    return [
        *textwrap.wrap(finding.found, width, initial_indent=first, subsequent_indent=rest),
        *textwrap.wrap(finding.meaning, width, initial_indent=rest, subsequent_indent=rest),
    ]


def _verdict(report: Report) -> str:
    if report.device is None:
        return (
            "muxk run needs a device: install what is missing above, or simulate one with --device sim:8 or "
            "sim:h200"
        )
    return f"muxk run takes {report.reason}"
