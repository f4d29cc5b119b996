"""Recording a run: the journal's records in a file, to be explained later without the server.

Records wait in memory until `Recorder.write`, which another thread calls: a slow disk holds up nothing.
`record_frames.py` has the format.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import anyio.to_thread
import msgspec
from muxk.kernel.estimates import Estimates
from muxk.kernel.journal import Forgotten, Record
from muxk.kernel.placing import PlaceView
from muxk.kernel.policy import PolicyBook
from muxk.kernel.record_frames import (
    FORMAT,
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    VERSION,
    AnyFrame,
    DecisionFrame,
    EstimatesFrame,
    Header,
    NameFrame,
    NotARecording,
    PolicyFrame,
    check_header,
    payloads,
)
from muxk.kernel.view import AdmitView, FormView, View

RECORD_BYTES_MAX = 256 << 20
"""Default bound on a file."""
PENDING_MAX = 32_768
"""Records that may wait to be written; more are lost, and counted."""
WRITE_EVERY_S = 0.25
TABLES_KNOWN = 8
"""Tables of estimates that views may still refer to."""


class Recorder:
    """Appends one run to a file; a `journal.Sink`. `add` and `name_request` cost an append to a list."""

    def __init__(self, path: Path, book: PolicyBook, muxk: str, bytes_max: int = RECORD_BYTES_MAX) -> None:
        """Opens the file. Raises NotARecording."""
        self._book = book
        self._muxk = muxk
        self._bytes_max = bytes_max
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending: list[Record | NameFrame] = []
        self._policies: dict[str, None] = {}
        self._tables: dict[int, Estimates] = {}
        self._numbers = 0
        self.path = path
        self.stopped = ""
        """Why nothing more is written, or empty."""
        self._begun = False
        self.records = 0
        self.lost = 0
        self._file = _open_to_append(path)
        self.bytes = self._file.tell()

    def add(self, record: Record) -> None:
        self._put(record)

    def name_request(self, first_id: int, choices: int, name: str) -> None:
        self._put(NameFrame(first_id, choices, name))

    def _put(self, entry: Record | NameFrame) -> None:
        if self.stopped:
            return
        if len(self._pending) >= PENDING_MAX:
            self.lost += 1
            return
        self._pending.append(entry)

    def describe(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"file": str(self.path), "records": self.records, "bytes": self.bytes}
        if self.lost:
            shown["lost"] = self.lost
        if self.stopped:
            shown["stopped"] = self.stopped
        return shown

    def take(self) -> list[Record | NameFrame]:
        """What waits to be written; call it on the thread that adds."""
        pending, self._pending = self._pending, []
        return pending

    def write(self, entries: list[Record | NameFrame]) -> None:
        """Append to the file; on any thread, but one at a time."""
        try:
            if not self._begun and entries:
                self._begun = True
                self._write(Header(FORMAT, VERSION, self._muxk, self._book.journal.zero_ns))
            for entry in entries:
                if self.stopped:
                    return
                self._write_entry(entry)
            self._file.flush()
        except OSError as error:
            self.stopped = f"it can not be written: {error.strerror or error}"

    def _write_entry(self, entry: Record | NameFrame) -> None:
        try:
            frame = entry if isinstance(entry, NameFrame) else self._frame(entry)
        except (
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
        ):  # of a policy in Python: what has no form
            self.lost += 1
            return
        self._write(frame)
        self.records += isinstance(entry, Record)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.write([*self.take(), *self._book.journal.runs()])
        try:
            self._file.close()
        except OSError as error:
            self.stopped = self.stopped or f"it can not be closed: {error.strerror or error}"

    def _write(self, frame: AnyFrame) -> None:
        payload = self._encode(frame)
        if self.stopped or len(payload) > FRAME_BYTES_MAX:
            return
        size = LENGTH_BYTES + len(payload)
        if self.bytes + size > self._bytes_max:
            self.stopped = f"the file has reached its bound of {self._bytes_max} bytes (--record-max)"
            return
        self._file.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
        self.bytes += size

    def _frame(self, record: Record) -> DecisionFrame:
        view, last_view = record.view, record.last_view
        shadow = record.shadow
        self._tell_policy(record.sha)
        if shadow is not None:
            self._tell_policy(shadow.sha)
        raw, estimates = self._raw_view(view)
        last_raw, last_estimates = self._raw_view(last_view) if record.count > 1 else (None, None)
        raw_of_shadow = None if shadow is None else self._encode(shadow.answer)
        return DecisionFrame(
            at_ns=record.at_ns,
            actor=record.actor,
            point=record.point,
            sha=record.sha,
            answer=self._encode(record.answer),
            view=raw,
            estimates=estimates,
            last_at_ns=record.last_at_ns if record.count > 1 else None,
            last_view=last_raw,
            last_estimates=last_estimates,
            count=record.count,
            forgotten=view.requests if isinstance(view, Forgotten) else 0,
            shadow=None if shadow is None else shadow.sha,
            shadow_answer=raw_of_shadow,
            differs=() if shadow is None else shadow.differs,
        )

    def _raw_view(self, view: Any) -> tuple[bytes | None, int | None]:
        """A view without its estimates, and their number."""
        if isinstance(view, Forgotten):
            return None, None
        number = None
        if isinstance(view, View | AdmitView | FormView | PlaceView):
            number = self._number(view.estimates)
            view = msgspec.structs.replace(view, estimates=Estimates())
        return self._encode(view), number

    def _number(self, estimates: Estimates) -> int:
        """Of a table that was written; it is the latest but for views of the moment when it changed."""
        for number, table in self._tables.items():
            if table is estimates:
                return number
        self._numbers += 1
        self._tables[self._numbers] = estimates
        if len(self._tables) > TABLES_KNOWN:
            del self._tables[next(iter(self._tables))]
        self._write(EstimatesFrame(self._numbers, estimates))
        return self._numbers

    def _tell_policy(self, sha: str) -> None:
        if sha in self._policies:
            return
        self._policies[sha] = None
        policy, text = self._book.find(sha), self._book.text(sha)
        name = "" if policy is None else policy.name
        if text is None:
            self._write(PolicyFrame(sha, name))
        else:
            self._write(PolicyFrame(sha, name, text.source, text.filename, dict(text.settings)))


async def keep_writing(recorder: Recorder) -> None:
    """Write what waits, on a thread, again and again, until cancelled."""
    while True:
        await anyio.sleep(WRITE_EVERY_S)
        await anyio.to_thread.run_sync(recorder.write, recorder.take())


def _open_to_append(path: Path) -> BinaryIO:
    """The file after its last whole frame; it is for its owner only, for it tells who asked for how much."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "r+b")
    except OSError as error:
        raise NotARecording(f"{path} can not be opened: {error.strerror or error}") from error
    try:
        end = 0
        for payload in payloads(file):
            if end == 0:
                check_header(path, payload)
            end = file.tell()
        if end == 0 and file.seek(0, os.SEEK_END):
            raise NotARecording(f"{path} is there already, and is no recorded run")
        file.seek(end)
        file.truncate()
    except (OSError, NotARecording) as error:
        file.close()
        if isinstance(error, NotARecording):
            raise
        raise NotARecording(f"{path} can not be written: {error.strerror or error}") from error
    return file
