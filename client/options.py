"""Options that several commands share, and how errors leave the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from muxk.client.client import Client

FAILED = 1
"""Exit code: the server refused, or something went wrong on the way."""
USAGE = 2
"""Exit code: the command line makes no sense, or the server can not start."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="ENDPOINT",
        help="Where the server listens, e.g. tcp://127.0.0.1:5555. Default: the server you started. "
        "If it wants keys, MUXK_SERVER_KEY and MUXK_KEYS name the files that `muxk keys` made.",
    ),
]
Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        metavar="PATH",
        envvar="MUXK_ADMIN",
        help="The server's admin socket. Default: the one beside its endpoint, or in the run directory.",
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        envvar="MUXK_RUN_DIR",
        help="The run directory of the server. Default: the one that servers of yours use.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter of the policy; may be repeated."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Times that `muxk profile` measured on this device and model. Default: measured at start.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def die(message: str, code: int = FAILED) -> NoReturn:
    """End the command with a message on stderr."""
    typer.echo(f"muxk: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def readable_errors() -> Iterator[None]:
    """What goes wrong between client and server ends the command with one block of text."""
    from muxk.client.errors import ClientError, PolicyRefused

    try:
        yield
    except PolicyRefused as error:
        typer.echo(error.report, err=True)  # each line begins with its place, for editors
        die("the server did not take the policy, and the one in force goes on")
    except ClientError as error:
        die(str(error))


def operator_client(endpoint: str | None, run_dir: Path | None, admin: str | None) -> Client:
    """A connection to the admin socket of a server. Raises ConnectError when it is not there."""
    from muxk.client.address import find
    from muxk.client.client import Client

    address = find(endpoint, admin=admin, run_directory=run_dir)
    return Client(address.checked_admin(), admin=address.admin)


def observer_client(endpoint: str | None, run_dir: Path | None, admin: str | None) -> Client:
    """As `operator_client`, or to the clients' socket of a server on another machine."""
    from muxk.client.address import find
    from muxk.client.client import Client

    address = find(endpoint, admin=admin, run_directory=run_dir)
    if address.has_admin or address.endpoint.startswith("ipc://"):
        return operator_client(endpoint, run_dir, admin)
    return Client(endpoint)


def parse_settings(given: list[str] | None) -> dict[str, str]:
    """`["slo.tbt=40ms"]` -> `{"slo.tbt": "40ms"}`; ends the command when there is no `=`."""
    settings: dict[str, str] = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            die(f"--set {text}: expected KEY=VALUE, for example --set slo.tbt=40ms", USAGE)
        settings[key.strip()] = value.strip()
    return settings
