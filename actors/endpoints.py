"""Which endpoints a server may listen on: this machine only, unless it is told otherwise and has keys."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from muxk.actors.backends import StartupError
from muxk.kernel.curve import AllowedClients, CurveServer, KeyFileError, load_pair

SERVER_NAME = "server"
"""`server.key` and `server.key_secret` in the folder of keys."""
CLIENTS_FOLDER = "clients"
"""Holds the public key of every client that may connect."""


def check_endpoint(endpoint: str, *, allow_remote: bool, has_keys: bool) -> None:
    """Refuse an endpoint that makes no sense, or that is open to others without keys and the flag.

    Raises:
        StartupError: says what to do.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address and not address.startswith("@"):
        return
    if scheme == "ipc" and address:
        raise StartupError(f"endpoint {endpoint!r}: an abstract socket has no owner; use ipc://PATH")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdecimal() or port == "*"):
        raise StartupError(f"endpoint {endpoint!r}: use ipc://PATH or tcp://127.0.0.1:PORT")
    if _is_loopback(host):
        return
    missing = [] if allow_remote else ["--allow-remote, to say that this is wanted"]
    missing += [] if has_keys else ["--keys DIR, made by `muxk keys DIR`, so that clients need a key"]
    if missing:
        raise StartupError(
            f"endpoint {endpoint!r} is open to other machines; that takes {' and '.join(missing)}. "
            "Else use tcp://127.0.0.1:PORT and a tunnel"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name of an interface or a host, or *
        return False


def load_server_keys(folder: Path | None) -> CurveServer | None:
    """The keys that `muxk keys` made in the folder; None without one. Raises StartupError."""
    if folder is None:
        return None
    try:
        pair = load_pair(folder / f"{SERVER_NAME}.key_secret")
        return CurveServer(pair, AllowedClients(folder / CLIENTS_FOLDER))
    except KeyFileError as error:
        raise StartupError(str(error)) from error
