"""Where a server is and what reaching it takes: its endpoint, its admin socket, CURVE keys.

What a caller does not give comes from the environment: MUXK_ADMIN, MUXK_SERVER_KEY, MUXK_KEYS and
MUXK_RUN_DIR. Keys are always named by the path of their file, so that none is in a command line or a log.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from muxk.client.errors import ConnectError
from muxk.kernel.curve import CurveClient

NO_ADMIN = (
    "there is no such socket, and admin commands work on the machine of the server only: name its run "
    "directory (--run-dir, MUXK_RUN_DIR) or its admin socket (--admin, MUXK_ADMIN)"
)


@dataclass(frozen=True, slots=True)
class Address:
    """Of one server."""

    endpoint: str
    admin: str
    """The ipc endpoint where its admin socket is, if the server runs on this machine."""
    curve: CurveClient | None = None

    def checked_admin(self) -> str:
        """The admin endpoint. Raises ConnectError when nothing is there."""
        if not self.has_admin:
            reason = "there is no such socket" if self.endpoint.startswith("ipc://") else NO_ADMIN
            raise ConnectError(self.admin, reason)
        return self.admin

    @property
    def has_admin(self) -> bool:
        return Path(self.admin.removeprefix("ipc://")).exists()


def find(
    endpoint: str | None = None,
    *,
    admin: str | None = None,
    server_key: str | Path | None = None,
    keys: str | Path | None = None,
    run_directory: Path | None = None,
) -> Address:
    """Complete what the caller gave; without an endpoint it is the server that the same user started.

    Raises:
        ConnectError: the run directory belongs to somebody else, or a key file can not be used.
    """
    from muxk.actors.rundir import RunDirectoryError, admin_endpoint, check_owner, default_endpoint
    from muxk.actors.rundir import run_directory as usual_directory

    directory = run_directory or usual_directory()
    chosen = endpoint or default_endpoint(directory)
    try:
        check_owner(directory)
    except RunDirectoryError as error:
        raise ConnectError(chosen, str(error)) from None
    beside = admin or os.environ.get("MUXK_ADMIN") or admin_endpoint(chosen, directory)
    if not beside.startswith("ipc://"):
        beside = f"ipc://{beside}"
    curve = _load(chosen, server_key, keys) if chosen.startswith("tcp://") else None
    return Address(chosen, beside, curve)


def _load(endpoint: str, server_key: str | Path | None, keys: str | Path | None) -> CurveClient | None:
    """Both files or none."""
    from muxk.kernel.curve import KeyFileError, load_pair, load_public

    server = server_key or os.environ.get("MUXK_SERVER_KEY")
    own = keys or os.environ.get("MUXK_KEYS")
    if not server and not own:
        return None
    if not server or not own:
        missing = "server_key (MUXK_SERVER_KEY)" if not server else "keys (MUXK_KEYS)"
        raise ConnectError(endpoint, f"a connection with keys needs {missing} as well")
    try:
        return CurveClient(load_public(Path(server)), load_pair(Path(own)))
    except KeyFileError as error:
        raise ConnectError(endpoint, str(error)) from None
