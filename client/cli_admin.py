"""`muxk abort`, `muxk drain` and `muxk keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from muxk.client.options import USAGE, Admin, Endpoint, RunDir, die, operator_client, readable_errors

CLIENTS_FOLDER = "clients"
"""Of the folder of keys: the public keys that the server lets in."""


def abort(
    requests: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REQUEST]...", help="Names of requests, as their clients gave them."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Abort all requests of all clients.")] = False,
    endpoint: Endpoint = None,
    run_dir: RunDir = None,
    admin: Admin = None,
) -> None:
    """End requests of any client of the running server, and print how many that were."""
    if bool(requests) == everything:
        die("name the requests to abort, or give --all", USAGE)
    with readable_errors(), operator_client(endpoint, run_dir, admin) as client:
        count = client.abort_any(requests or None)
    typer.echo(f"aborted {count} request{'' if count == 1 else 's'}")


def drain(endpoint: Endpoint = None, run_dir: RunDir = None, admin: Admin = None) -> None:
    """Have the running server finish what it accepted, take no more, and stop."""
    with readable_errors(), operator_client(endpoint, run_dir, admin) as client:
        client.drain()
    typer.echo("the server finishes its requests and stops")


def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys are, or will be.")],
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make a key pair for this client, and let it in.")
    ] = None,
) -> None:
    """Make the keys with which a server may listen beyond its machine (`muxk run --keys DIR`).

    Without --client these are the server's own. Keys that are there already are never replaced, and none is
    printed. To let in a client that made its own pair, copy its .key file into DIR/clients.
    """
    from muxk.kernel.curve import KeyFileError

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / CLIENTS_FOLDER).mkdir(mode=0o700, exist_ok=True)
        _make_server(folder) if client is None else _make_client(folder, client)
    except (KeyFileError, OSError) as error:
        die(str(error))


def _make_server(folder: Path) -> None:
    from muxk.kernel.curve import make_keys

    public, _ = make_keys(folder, "server")
    typer.echo(
        f"made the server's keys in {folder}\n"
        f"  server:   muxk run POLICY --endpoint tcp://0.0.0.0:PORT --allow-remote --keys {folder}\n"
        f"  clients:  muxk keys {folder} --client NAME, or their own .key file in {folder / CLIENTS_FOLDER}\n"
        f"            each needs {public} as well"
    )


def _make_client(folder: Path, name: str) -> None:
    from muxk.kernel.curve import make_keys

    if not name.replace("-", "").replace("_", "").isalnum() or name == "server":
        die(f"--client {name}: letters, digits, - and _ make a name; `server` is taken", USAGE)
    public, secret = make_keys(folder, name)
    public.rename(folder / CLIENTS_FOLDER / public.name)
    typer.echo(
        f"made {secret}, and let it in\n"
        f"  give the client that file and {folder / 'server.key'}; it uses them by\n"
        f"  MUXK_KEYS={secret.name} MUXK_SERVER_KEY=server.key muxk submit --endpoint tcp://HOST:PORT ..."
    )
