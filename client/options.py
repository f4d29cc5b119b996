"""Options that several commands share, and how errors leave the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

FAILED = 1
"""Exit code: the server refused, or something went wrong on the way."""
USAGE = 2
"""Exit code: the command line makes no sense, or the server can not start."""

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="ENDPOINT",
        help="Where the server listens, e.g. tcp://127.0.0.1:5555. Default: the server you started.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter of the policy; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def die(message: str, code: int = FAILED) -> NoReturn:
    """End the command with a message on stderr."""
    typer.echo(f"muxk: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def readable_errors() -> Iterator[None]:
    """What goes wrong between client and server ends the command with one block of text."""
    from muxk.client.errors import ClientError

    try:
        yield
    except ClientError as error:
        die(str(error))


def parse_settings(given: list[str] | None) -> dict[str, str]:
    """`["slo.tbt=40ms"]` -> `{"slo.tbt": "40ms"}`; ends the command when there is no `=`."""
    settings: dict[str, str] = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            die(f"--set {text}: expected KEY=VALUE, for example --set slo.tbt=40ms", USAGE)
        settings[key.strip()] = value.strip()
    return settings
