"""Reading a recorded run, see `record_frames.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from muxk.kernel.estimates import Estimates
from muxk.kernel.journal import Forgotten, OrderQuestion, Record, ShadowAnswer, VictimQuestion
from muxk.kernel.policy import PolicyText
from muxk.kernel.record_frames import (
    KINDS,
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
from muxk.kernel.view import OrderAnswer, VictimAnswer


@dataclass
class Recorded:
    """The last run of a file."""

    header: Header
    records: list[Record] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    policies: dict[str, PolicyText] = field(default_factory=dict)
    """What they were compiled from, by sha."""
    policy_names: dict[str, str] = field(default_factory=dict)
    cut_off: bool = False
    """The end of the file is missing, or is no frame."""


def read_recording(path: Path, records_max: int) -> Recorded:
    """Read the last run of a file, its last `records_max` decisions. Raises NotARecording."""
    decode = msgspec.msgpack.Decoder(AnyFrame).decode
    recorded: Recorded | None = None
    tables: dict[int, Estimates] = {}
    end = 0
    try:
        with path.open("rb") as file:
            for payload in payloads(file):
                end = file.tell()
                if recorded is None:
                    recorded = Recorded(check_header(path, payload))
                    continue
                frame = decode(payload)
                if isinstance(frame, Header):
                    recorded, tables = Recorded(frame), {}
                else:
                    _take(recorded, tables, frame, records_max)
            if recorded is not None:
                recorded.cut_off = file.seek(0, os.SEEK_END) > end
    except OSError as error:
        raise NotARecording(f"{path} can not be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if recorded is None:
            raise NotARecording(f"{path} is no recorded run") from error
        recorded.cut_off = True
    if recorded is None:
        raise NotARecording(f"{path} is no recorded run")
    del recorded.records[:-records_max]
    return recorded


def _take(recorded: Recorded, tables: dict[int, Estimates], frame: AnyFrame, records_max: int) -> None:
    match frame:
        case PolicyFrame():
            recorded.policy_names[frame.sha] = frame.name
            if frame.source is not None:
                recorded.policies[frame.sha] = PolicyText(frame.source, frame.filename, frame.settings)
        case EstimatesFrame():
            tables[frame.number] = frame.estimates
        case NameFrame():
            for index in range(frame.choices):
                name = frame.name if frame.choices == 1 else f"{frame.name}[{index}]"
                recorded.names[frame.first_id + index] = name
        case DecisionFrame():
            recorded.records.append(_record(frame, tables))
            if len(recorded.records) > 2 * records_max:
                del recorded.records[:-records_max]


def _record(frame: DecisionFrame, tables: Mapping[int, Estimates]) -> Record:
    if frame.point not in KINDS:
        raise msgspec.ValidationError(f"no question {frame.point!r}")
    view_type, answer_type = KINDS[frame.point]
    if frame.view is None and frame.point not in ("order", "victim"):
        raise msgspec.ValidationError("a decision without its question")

    def view_of(raw: bytes | None, estimates: int | None) -> Any:
        if raw is None:
            return Forgotten(frame.at_ns, frame.forgotten)
        view: Any = msgspec.msgpack.decode(raw, type=view_type)
        if estimates is None:
            return view
        return msgspec.structs.replace(view, estimates=tables.get(estimates, Estimates()))

    view = view_of(frame.view, frame.estimates)
    last_view = view if frame.last_view is None else view_of(frame.last_view, frame.last_estimates)
    shadow = None
    if frame.shadow is not None and frame.shadow_answer is not None:
        shadows = msgspec.msgpack.decode(frame.shadow_answer, type=answer_type | None)
        shadow = ShadowAnswer(frame.shadow, shadows, frame.differs)
    answer: Any = msgspec.msgpack.decode(frame.answer, type=answer_type)
    _check_indices(answer, view)
    if shadow is not None:
        _check_indices(shadow.answer, view)
    return Record(
        at_ns=frame.at_ns,
        actor=frame.actor,
        point=frame.point,
        sha=frame.sha,
        view=view,
        answer=answer,
        last_at_ns=frame.at_ns if frame.last_at_ns is None else frame.last_at_ns,
        last_view=last_view,
        count=frame.count,
        shadow=shadow,
    )


def _check_indices(answer: Any, view: Any) -> None:
    """Indices of an answer are of the requests of its question."""
    if not isinstance(view, OrderQuestion | VictimQuestion):
        return
    if isinstance(answer, OrderAnswer):
        indices: tuple[int, ...] = answer.order
    else:
        indices = (answer.index,) if isinstance(answer, VictimAnswer) else ()
    if not all(0 <= index < len(view.requests) for index in indices):
        raise msgspec.ValidationError("an answer about a request that was not asked about")
