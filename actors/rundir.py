"""Where a server puts its socket, and where a client of the same user finds it."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET_NAME = "muxk.sock"
LOCK_NAME = "muxk.lock"


class RunDirectoryError(Exception):
    """The run directory can not be used."""


def run_directory() -> Path:
    """`$MUXK_RUN_DIR`, else one of the user's own under the system's run or temporary directory."""
    if named := os.environ.get("MUXK_RUN_DIR"):
        return Path(named)
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"muxk-{os.getuid()}"


def default_endpoint(directory: Path | None = None) -> str:
    """The ipc endpoint in the run directory."""
    return f"ipc://{(directory or run_directory()) / SOCKET_NAME}"


def prepare_run_directory(directory: Path) -> None:
    """Make the directory readable by its owner only, and refuse one that belongs to somebody else.

    Raises:
        RunDirectoryError: not a directory, a foreign owner, or open to others and not to be closed.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"{directory} is not a directory; set MUXK_RUN_DIR to another place")
    if status.st_uid != os.getuid():
        raise RunDirectoryError(f"{directory} belongs to another user; set MUXK_RUN_DIR to another place")
    directory.chmod(0o700)


@contextmanager
def claim_run_directory(directory: Path, exclusive: bool) -> Iterator[None]:
    """Prepare the directory and, if the server listens there, keep other servers out of it.

    The lock goes with the process, however it ends, so that a socket file left by a killed server is only a
    stale file, which binding replaces.

    Raises:
        RunDirectoryError: another server listens there.
    """
    prepare_run_directory(directory)
    if not exclusive:
        yield
        return
    with (directory / LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunDirectoryError(
                f"a server already listens on {default_endpoint(directory)}; stop it, or give this one "
                "--endpoint or another MUXK_RUN_DIR"
            ) from error
        try:
            yield
        finally:
            (directory / SOCKET_NAME).unlink(missing_ok=True)
