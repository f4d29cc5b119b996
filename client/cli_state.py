"""`muxk state`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from muxk.client.options import Admin, AsJson, Endpoint, RunDir, observer_client, readable_errors

LINE_MAX = 100
"""Characters of nested values on one line."""


def state(
    endpoint: Endpoint = None, run_dir: RunDir = None, admin: Admin = None, as_json: AsJson = False
) -> None:
    """Show what the running server is doing: requests, queues, KV pages, split, latencies."""
    with readable_errors(), observer_client(endpoint, run_dir, admin) as client:
        snapshot = client.state()
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(snapshot)).decode())
        return
    for name, part in sorted(snapshot.items(), key=lambda item: (item[0] != "server", item[0])):
        typer.echo(name)
        for line in _lines(part):
            typer.echo(f"  {line}")


def _lines(part: Any) -> Iterator[str]:
    """`key value`, aligned; nested values on one line, unless that is long."""
    if not isinstance(part, dict):
        yield _short(part)
        return
    width = max((len(str(key)) for key in part), default=0)
    for key, value in part.items():
        shown = _short(value)
        if isinstance(value, dict) and len(shown) > LINE_MAX:
            yield str(key)
            yield from (f"  {line}" for line in _lines(value))
        elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
            yield str(key)
            yield from (f"  {place}  {_short(inner)}" for place, inner in enumerate(value))
        else:
            yield f"{key!s:<{width}}  {shown}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key}={_short(inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
