"""Where a server puts its sockets, and where a client of the same user finds them.

Beside the socket at PATH lies PATH.admin, the admin socket, and PATH.lock, which the server holds locked. A
server that listens on tcp has its admin socket in the run directory, named by its port.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

SOCKET_NAME = "muxk.sock"
ADMIN_SUFFIX = ".admin"
LOCK_SUFFIX = ".lock"
TCP_PREFIX = "tcp-"
DIRECTORY_LOCK = "directory.lock"
"""Held for the moment in which files of the directory are claimed or removed."""


class RunDirectoryError(Exception):
    """The run directory, or a place in it, can not be used."""


def run_directory() -> Path:
    """`$MUXK_RUN_DIR`, else one of the user's own under the system's run or temporary directory."""
    if named := os.environ.get("MUXK_RUN_DIR"):
        return Path(named)
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"muxk-{os.getuid()}"


def default_endpoint(directory: Path | None = None) -> str:
    """The ipc endpoint in the run directory."""
    return f"ipc://{(directory or run_directory()) / SOCKET_NAME}"


def admin_endpoint(endpoint: str, directory: Path | None = None) -> str:
    """The admin socket of the server that listens on `endpoint`, whose port is resolved."""
    return f"ipc://{_stem(endpoint, directory or run_directory())}{ADMIN_SUFFIX}"


def _stem(endpoint: str, directory: Path) -> Path:
    """What the names of the server's files begin with."""
    scheme, _, address = endpoint.partition("://")
    return Path(address) if scheme == "ipc" else directory / f"{TCP_PREFIX}{address.rpartition(':')[2]}"


def check_owner(directory: Path) -> None:
    """Refuse a run directory of somebody else, who could listen there in the server's place.

    Raises:
        RunDirectoryError: not a directory, or a foreign owner. One that is not there is no error.
    """
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"{directory} is not a directory; set MUXK_RUN_DIR to another place")
    if status.st_uid != os.getuid():
        raise RunDirectoryError(f"{directory} belongs to another user; set MUXK_RUN_DIR to another place")


def prepare_run_directory(directory: Path) -> None:
    """Make the directory readable by its owner only, and refuse one that belongs to somebody else.

    Raises:
        RunDirectoryError: not a directory, or a foreign owner.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(directory)
    directory.chmod(0o700)


class EndpointClaims:
    """The endpoints of one server, which no other server can take while it lives.

    A lock goes with its process, however that ends, so that files left by a killed server are only stale
    files, which are removed when a server starts in the same directory.
    """

    def __init__(self, directory: Path) -> None:
        """Prepares the run directory and removes what killed servers left. Raises RunDirectoryError."""
        self._directory = directory
        self._locks = ExitStack()
        prepare_run_directory(directory)
        with _directory_locked(directory):
            # Only names that muxk gives: somebody may run servers in a folder with files of their own.
            for pattern in (SOCKET_NAME, f"{TCP_PREFIX}[0-9]*"):
                for lock in sorted(directory.glob(f"{pattern}{LOCK_SUFFIX}")):
                    _remove_if_stale(lock)

    def claim(self, endpoint: str) -> None:
        """Take an endpoint, whose port is resolved. Raises RunDirectoryError when a server has it."""
        stem = _stem(endpoint, self._directory)
        _check_replaceable(stem)
        with _directory_locked(self._directory):
            try:
                descriptor = _locked(Path(f"{stem}{LOCK_SUFFIX}"))
            except RunDirectoryError as error:
                raise RunDirectoryError(f"can not listen on {endpoint}: {error}") from error
        if descriptor is None:
            raise RunDirectoryError(
                f"a server already listens on {endpoint}; stop it, or give this one --endpoint or another "
                "MUXK_RUN_DIR"
            )
        self._locks.callback(self._release, stem, descriptor)

    def _release(self, stem: Path, descriptor: int) -> None:
        with _directory_locked(self._directory):
            _remove_files(stem)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()


@contextmanager
def _directory_locked(directory: Path) -> Iterator[None]:
    """Nobody else claims or removes files meanwhile; waits for the moment that it takes."""
    descriptor = _open(directory / DIRECTORY_LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open(lock: Path) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunDirectoryError(f"can not use {lock}: {error.strerror}") from error


def _locked(lock: Path) -> int | None:
    """The descriptor that holds the lock; None when another process does."""
    descriptor = _open(lock)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_if_stale(lock: Path) -> None:
    descriptor = _locked(lock)
    if descriptor is not None:
        _remove_files(lock.with_suffix(""))
        os.close(descriptor)


def _check_replaceable(stem: Path) -> None:
    """ZeroMQ removes whatever is in the place of a socket that it binds."""
    for place in (stem, Path(f"{stem}{ADMIN_SUFFIX}")):
        if place.exists() and not place.is_socket():
            raise RunDirectoryError(f"{place} is there and is no socket; choose another place")


def _remove_files(stem: Path) -> None:
    """The sockets first, and the lock last."""
    for socket in (stem, Path(f"{stem}{ADMIN_SUFFIX}")):
        if socket.is_socket():
            socket.unlink(missing_ok=True)
    Path(f"{stem}{LOCK_SUFFIX}").unlink(missing_ok=True)
