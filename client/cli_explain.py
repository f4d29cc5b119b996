"""`muxk explain`: why requests wait, and what the policy decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from muxk.client.commands import ExplainQuestion
from muxk.client.options import (
    FAILED,
    USAGE,
    Admin,
    AsJson,
    Endpoint,
    RunDir,
    die,
    observer_client,
    readable_errors,
)

if TYPE_CHECKING:
    from muxk.client import protocol

COUNT = 20


def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST]", help="The name that its client gave a request. Default: all that are live."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="The decisions around this time since the start: 12.3s."),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, max=200, help="The last decisions, or at most so many.")
    ] = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="The last decisions in which the shadow policy differs.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Explain a run that `muxk run --record FILE` recorded; no server."),
    ] = None,
    endpoint: Endpoint = None,
    run_dir: RunDir = None,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
    """Say why requests wait, or which rules decided something, with the values that they saw.

    Without arguments: every request that waits or runs, with the reason. Only whoever may open the admin
    socket sees the requests of others.
    """
    question = _question(request, at, last, shadow)
    if record is not None:
        _explain_record(record, question, as_json)
        return
    with readable_errors(), observer_client(endpoint, run_dir, admin) as client:
        explained = client.explain(**question)
    if as_json:
        _print_json(explained)
        return
    _print_lines(_lines(explained, question["about"]))


def _lines(explained: protocol.Explained, about: str) -> Iterator[str]:
    from muxk.client import explain_view

    if about == "requests":
        yield from explain_view.live(explained)
        return
    if about == "request":
        yield from explain_view.requests(explained.requests)
        yield ""
    show = explain_view.differences if about == "differences" else explain_view.decisions
    yield from show(explained.decisions)
    if not explained.decisions:
        yield "no such decision is kept"
    if explained.left_out:
        yield f"... and {explained.left_out} earlier ones that do not fit; ask with --at"


def _question(request: str | None, at: str | None, last: int | None, shadow: bool) -> ExplainQuestion:
    """What is asked; ends the command when two things are."""
    chosen = [name for name, given in (("REQUEST", request), ("--at", at), ("--shadow", shadow)) if given]
    if len(chosen) > 1:
        die(f"give one of {' and '.join(chosen)}", USAGE)
    count = last or COUNT
    if request is not None:
        return {"about": "request", "request_id": request, "count": count}
    if at is not None:
        return {"about": "moment", "at": _seconds(at), "count": count}
    if shadow:
        return {"about": "differences", "count": count}
    return {"about": "requests" if last is None else "latest", "count": count}


def _seconds(text: str) -> float:
    from muxk.policies.units import UnitError, parse_duration

    try:
        return parse_duration(text) / 1e9
    except UnitError as error:
        hint = f"; {error.hint}" if error.hint else ""
        die(f"--at {text}: {error}{hint}", USAGE)


def _print_lines(lines: Iterable[str]) -> None:
    """Clients name their requests and classes: what they write must not command the operator's terminal."""
    from muxk.policies.problems import visible

    for line in lines:
        typer.echo(visible(line))


def _print_json(answer: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())


def _explain_record(path: Path, question: ExplainQuestion, as_json: bool) -> None:
    from muxk.client import explain_view
    from muxk.client.recorded import RecordError, explain_recorded

    try:
        recorded = explain_recorded(path, question)
    except RecordError as error:
        die(str(error), FAILED)
    if as_json:
        _print_json(recorded)
        return
    show = explain_view.differences if question["about"] == "differences" else explain_view.decisions
    _print_lines((*recorded.notes, *show(recorded.decisions)))
