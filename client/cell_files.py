"""The files that a cell's result depends on besides its own text, and whether they still say the same.

A policy, a trace or a model may be a file that somebody edits while a study runs. Runs of before and after
would be compared as if they were of one policy, so whoever runs cells asks here, before each and after it.
"""

from __future__ import annotations

import hashlib
import threading
from functools import lru_cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from muxk.policies.api import ENTRY_POINT_GROUP
from muxk.policies.engine import shipped_policies

if TYPE_CHECKING:
    from muxk.client.cells import Cell

READ_BYTES = 1 << 20
MODULES_MAX = 1000
"""Files of a package with a policy in Python that are looked at."""
KEPT = 1024
"""Digests and lists of files."""


class CellFiles:
    """What is known of the files of cells. Threads may share it."""

    def __init__(self) -> None:
        self._modules = lru_cache(KEPT)(_modules_of)
        self._digests = lru_cache(KEPT)(_digest)

    def of(self, cell: Cell) -> tuple[Path, ...]:
        """Those that exist, a policy in Python with the modules of its package."""
        return tuple(path for path in self.named(cell) if path.is_file())

    def named(self, cell: Cell) -> tuple[Path, ...]:
        """Those that exist or would be read if they did."""
        names = (cell.policy, cell.workload, cell.model, cell.profile or "")
        paths = [Path(name) for name in names if name]
        return tuple(dict.fromkeys([*paths, *self._modules(cell.policy)]))

    def digest(self, path: Path) -> bytes:
        """Read again only when its time or size changed. Raises OSError."""
        status = path.stat()
        return self._digests(path, status.st_mtime_ns, status.st_size, status.st_ino)


class Unchanged:
    """Notices when a file is not what it was when it was first asked for. Threads may share it."""

    def __init__(self) -> None:
        self._files = CellFiles()
        self._first: dict[Path, bytes | None] = {}
        self._lock = threading.Lock()

    def complaint(self, cell: Cell) -> str:
        """Of the first file of the cell that changed; empty when none did."""
        for path in self._files.named(cell):
            found = self._found(path)
            with self._lock:
                first = self._first.setdefault(path, found)
            if first != found:
                return f"{path} changed while the study ran: its runs would not be of one file; start again"
        return ""

    def _found(self, path: Path) -> bytes | None:
        try:
            return self._files.digest(path)
        except OSError:  # there is none, as of most names
            return None


def _modules_of(policy: str) -> tuple[Path, ...]:
    """Of a policy that another distribution brought; nothing of it is run."""
    if policy in shipped_policies():
        return ()
    found: list[Path] = []
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP, name=policy):
        spec = PathFinder.find_spec(entry.module.partition(".")[0])
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            found += sorted(Path(folder).rglob("*.py"))[:MODULES_MAX]
        if spec.origin is not None and not spec.submodule_search_locations:
            found.append(Path(spec.origin))
    return tuple(found)


def _digest(path: Path, changed_ns: int, size: int, inode: int) -> bytes:
    """The last three tell apart what was in the file at different times."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.digest()
