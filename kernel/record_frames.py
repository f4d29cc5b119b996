"""Frames of a recorded run: what is in the file that `muxk run --record FILE` writes.

Each is a length of four bytes (big-endian) and a MessagePack value: a `Header` for each run that was
appended, then policies, estimates and names as they are needed, and decisions. Views refer to their estimates
by number, for hundreds share one table. A frame that was cut off at the end of the file is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from muxk.kernel.estimates import Estimates
from muxk.kernel.journal import OrderQuestion, VictimQuestion
from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    FormAnswer,
    FormView,
    OrderAnswer,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)

FORMAT = "muxk-record"
VERSION = 1
FRAME_BYTES_MAX = 64 << 20
"""A larger frame is not written, and ends the reading of a file that has one."""
LENGTH_BYTES = 4

KINDS: Mapping[str, tuple[type, type]] = {
    "classify": (RequestView, ClassAnswer),
    "admit": (AdmitView, AdmitAnswer),
    "order": (OrderQuestion, OrderAnswer),
    "form": (FormView, FormAnswer),
    "decide": (View, Decision),
    "victim": (VictimQuestion, VictimAnswer),
    "retain": (RequestView, RetainAnswer),
    "place": (PlaceView, PlaceAnswer),
}
"""View and answer of each question."""


class NotARecording(Exception):
    """A file that can not be read as a recorded run, or not be appended to; the text says why."""


class Header(msgspec.Struct, frozen=True, tag=True):
    """The beginning of a run."""

    format: str
    version: int
    muxk: str
    zero_ns: int
    """When the server started, on the clock of all records."""


class PolicyFrame(msgspec.Struct, frozen=True, tag=True):
    """A policy, before its first decision; without a source when it is not written in the language."""

    sha: str
    name: str
    source: str | None = None
    filename: str = ""
    settings: dict[str, str] = {}


class EstimatesFrame(msgspec.Struct, frozen=True, tag=True):
    """A table of estimates that views refer to."""

    number: int
    estimates: Estimates


class NameFrame(msgspec.Struct, frozen=True, tag=True):
    """What a client calls a request."""

    first_id: int
    choices: int
    name: str


class DecisionFrame(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A record of the journal; views and answers are MessagePack inside."""

    at_ns: int
    actor: str
    point: str
    sha: str
    answer: bytes
    view: bytes | None
    """None: there were too many requests, `forgotten` of them."""
    estimates: int | None = None
    last_at_ns: int | None = None
    last_view: bytes | None = None
    last_estimates: int | None = None
    count: int = 1
    forgotten: int = 0
    shadow: str | None = None
    """The sha of a shadow policy that differed."""
    shadow_answer: bytes | None = None
    differs: tuple[str, ...] = ()


AnyFrame = Header | PolicyFrame | EstimatesFrame | NameFrame | DecisionFrame


def payloads(file: BinaryIO) -> Iterator[bytes]:
    """Whole frames, in order; nothing after one that is cut off or too large."""
    while len(head := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
        length = int.from_bytes(head, "big")
        if length > FRAME_BYTES_MAX:
            return
        payload = file.read(length)
        if len(payload) < length:
            return
        yield payload


def check_header(path: Path, payload: bytes) -> Header:
    """The header that a file begins with. Raises NotARecording."""
    try:
        header = msgspec.msgpack.decode(payload, type=AnyFrame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotARecording(f"{path} is no recorded run") from error
    if not isinstance(header, Header) or header.format != FORMAT:
        raise NotARecording(f"{path} is no recorded run")
    if header.version != VERSION:
        known = f"this muxk reads {VERSION}"
        raise NotARecording(f"{path} is a recorded run of version {header.version}; {known}")
    return header
