"""Outcomes on disk, so that a long study goes on where it was stopped.

A file for each cell, named by a digest of the cell, of the contents of the files it names, and of the version
that the caller gives. What can not be read is run again, and nothing is ever deleted.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import msgspec
from muxk.client.cells import Cell, Outcome, files_of
from muxk.client.errors import ClientError

PACKAGES = ("kernel", "actors", "policies", "profiles", "client")
"""What the result of a run depends on; `client` holds workloads and measures."""
READ_BYTES = 1 << 20


class StoreError(ClientError):
    """The folder can not be used."""


class _Kept(msgspec.Struct, frozen=True):
    cell: Cell
    version: str
    outcome: Outcome


class CellStore:
    """A folder of outcomes. Threads and processes may share it."""

    def __init__(self, folder: Path, version: str) -> None:
        """Makes the folder. Raises StoreError."""
        self._folder = folder
        self._version = version
        self._digest = lru_cache(maxsize=256)(_file_digest)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} can not be a folder of results: {error.strerror or error}") from error

    def path_of(self, cell: Cell) -> Path:
        """Where the outcome of a cell is, or would be."""
        digest = hashlib.sha256(msgspec.json.encode((self._version, cell)))
        for path in files_of(cell):
            status = path.stat()
            digest.update(self._digest(path, status.st_mtime_ns, status.st_size))
        return self._folder / f"{digest.hexdigest()}.json"

    def find(self, cell: Cell) -> Outcome | None:
        """The outcome of an earlier run of the same cell with the same code."""
        try:
            kept = msgspec.json.decode(self.path_of(cell).read_bytes(), type=_Kept)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        return kept.outcome if kept.cell == cell and kept.version == self._version else None

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Write an outcome; a disk that is full loses it, and costs a run next time."""
        payload = msgspec.json.encode(_Kept(cell, self._version, outcome))
        try:
            path = self.path_of(cell)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
                file.write(payload)
            os.replace(file.name, path)
        except OSError:
            return


def _file_digest(path: Path, changed_ns: int, size: int) -> bytes:
    """`changed_ns` and `size` tell apart what was in the file at different times."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.digest()


def code_version() -> str:
    """A digest of the installed code and of everything it reads: runs of the same version are the same."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        folder = Path(__file__).parents[1] / package
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".yaml", ".json") and path.is_file():
                digest.update(f"{package}/{path.relative_to(folder).as_posix()}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
