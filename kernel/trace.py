"""The trace: a bounded ring of what happened, always on, and an optional hash of a whole run.

A record keeps references and is formatted only when somebody reads it, so that recording costs a fraction
of a microsecond.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

TRACE_RECORDS = 4096
"""Records the ring holds by default; the oldest goes first."""

DETAIL_BYTES = 2048
"""A message whose frame is larger is traced by its size alone, so that the ring's memory has a bound."""

DETAIL_CHARACTERS = 160
"""Characters of a detail that are printed."""


class Record(NamedTuple):
    """One thing that happened."""

    at_ns: int
    kind: str
    """`sent`, `handled`, `timer`, `dropped`, `started`, `stopped`, `crashed`, or a word of the caller's."""
    actor: str
    name: str
    """Of the message or decision."""
    detail: Any
    """A message, a frozen decision, or anything else with a repr."""

    def __str__(self) -> str:
        detail = "" if self.detail is None else _shortened(self.detail)
        return f"{self.at_ns:>18} {self.kind:<8} {self.actor:<12} {self.name} {detail}".rstrip()


class Trace:
    """A ring of records; with `hashed`, also a running blake2b over time, receiver and encoded message."""

    def __init__(self, records: int = TRACE_RECORDS, *, hashed: bool = False) -> None:
        assert records >= 1
        self._ring: deque[tuple[int, str, str, str, Any]] = deque(maxlen=records)
        self.keep: Callable[[tuple[int, str, str, str, Any]], None] = self._ring.append
        """`record` of its arguments as one tuple: for runtimes, which record several times a message."""
        self._hash = hashlib.blake2b(digest_size=16) if hashed else None

    @property
    def hashed(self) -> bool:
        return self._hash is not None

    def record(self, at_ns: int, kind: str, actor: str, name: str, detail: Any = None) -> None:
        """Keep one record; `detail` must not change afterwards. Safe from any thread."""
        self.keep((at_ns, kind, actor, name, detail))

    def recent(self, count: int) -> list[Record]:
        """The last `count` records, oldest first."""
        records = list(self._ring)
        return [Record(*record) for record in records[max(0, len(records) - count) :]]

    def mix(self, at_ns: int, receiver: str, payload: bytes) -> None:
        """Add one delivery to the hash; without `hashed` it does nothing."""
        if self._hash is not None:
            self._hash.update(b"%d %b %d %b" % (at_ns, receiver.encode(), len(payload), payload))

    @property
    def hash(self) -> str:
        """Hex digest so far; empty without `hashed`."""
        return "" if self._hash is None else self._hash.hexdigest()


def _shortened(detail: Any) -> str:
    try:
        text = repr(detail)
    except Exception as error:  # a repr must not turn a crash report into a second crash
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= DETAIL_CHARACTERS else f"{text[:DETAIL_CHARACTERS]}... ({len(text)})"
