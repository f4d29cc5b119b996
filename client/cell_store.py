"""Outcomes on disk, so that a long study goes on where it was stopped.

A file for each cell, named by a digest of the cell, of the contents of the files it names, and of the version
that the caller gives. It holds a digest of the outcome too: what can not be read, or is not what was written,
is run again. Nothing that was kept is ever deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from pathlib import Path

import msgspec
from muxk.client.cell_files import CellFiles
from muxk.client.cells import Cell, Outcome
from muxk.client.errors import ClientError

PACKAGES = ("kernel", "actors", "policies", "profiles", "client")
"""What the result of a run depends on; `client` holds workloads and measures."""


class StoreError(ClientError):
    """The folder can not be used."""


class _Kept(msgspec.Struct, frozen=True):
    cell: Cell
    version: str
    outcome: msgspec.Raw
    sha256: str = ""
    """Of the outcome as it stands in the file; empty in files of earlier versions."""


class CellStore:
    """A folder of outcomes. Threads and processes may share it."""

    def __init__(self, folder: Path, version: str) -> None:
        """Makes the folder. Raises StoreError."""
        self._folder = folder
        self._version = version
        self._files = CellFiles()
        self._paths: dict[Cell, Path] = {}
        """Of cells that were not found: a policy that is edited while it runs must not be kept as edited."""
        self._lock = threading.Lock()
        self.lost = 0
        """Outcomes that could not be written."""
        self.lost_why = ""
        """Of the first."""
        _check(folder)

    def path_of(self, cell: Cell) -> Path:
        """Where the outcome of a cell is, or would be. Raises OSError when a file of the cell is gone."""
        digest = hashlib.sha256(msgspec.json.encode((self._version, cell)))
        for path in self._files.of(cell):
            digest.update(self._files.digest(path))
        return self._folder / f"{digest.hexdigest()}.json"

    def find(self, cell: Cell) -> Outcome | None:
        """The outcome of an earlier run of the same cell with the same code."""
        try:
            path = self.path_of(cell)
            outcome = _read(path, cell, self._version)
        except OSError:
            return None
        if outcome is None:
            with self._lock:
                self._paths[cell] = path
        return outcome

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Write an outcome; a disk that is full loses it, which is counted and costs a run next time."""
        raw = msgspec.json.encode(outcome)
        sha256 = hashlib.sha256(raw).hexdigest()
        payload = msgspec.json.encode(_Kept(cell, self._version, msgspec.Raw(raw), sha256))
        with self._lock:
            path = self._paths.pop(cell, None)
        try:
            _write(path or self.path_of(cell), payload)
        except OSError as error:
            with self._lock:
                self.lost += 1
                self.lost_why = self.lost_why or str(error.strerror or error)


def _check(folder: Path) -> None:
    """That it is there and takes files: found out before hours of runs. Raises StoreError."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} can not be a folder of results: it is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} can not be a folder of results: {error.strerror or error}") from error
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"can it be written to?")
    except OSError as error:
        raise StoreError(f"{folder} takes no files: {error.strerror or error}") from error


def _read(path: Path, cell: Cell, version: str) -> Outcome | None:
    """None for what is not there, damaged, or of something else."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        outcome = msgspec.json.decode(kept.outcome, type=Outcome)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    intact = not kept.sha256 or kept.sha256 == hashlib.sha256(kept.outcome).hexdigest()
    ours = kept.cell == cell and kept.version == version
    return outcome if ours and intact and not outcome.error and "verdicts" in outcome.figures else None


def _write(path: Path, payload: bytes) -> None:
    """All of it or nothing. Raises OSError."""
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            name = file.name
            file.write(payload)
        os.replace(name, path)
    except OSError:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise


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
