"""Rows of trace files: which format a file has, by its content, and one checked row after the other.

Formats: JSON lines as Mooncake publishes them (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`
of 512-token blocks); CSV files that are known by their header line: Azure's LLM inference traces, BurstGPT,
and pairs of lengths without times. Reading is one line at a time; a line has a bound. Every complaint names
file and line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec
from muxk.client.traffic import WorkloadError

LINE_BYTES_MAX = 4 << 20
"""A million tokens in blocks of 512 are some 20 KB of hash ids."""
TOKENS_MAX = 1 << 24
"""Of a prompt or an answer: more than that is a damaged number, and no device holds the KV of so many."""
YEARS_MAX_NS = 100 * 366 * 86_400 * 1_000_000_000
"""From the first row to any other."""
GZIP = b"\x1f\x8b"
BLOCK_TOKENS = 512
"""Of a Mooncake hash id."""
HASH_IDS = 1 << 64
"""Mooncake's are counted from 0; other tools write hashes of 64 bits into the same field."""
SHOWN_CHARS = 60
LONG = 10**30
"""Numbers from here on are not shown."""

Parse = Callable[[str], "TraceRow | None"]
"""A line's row; None for one that is no request. Raises ValueError with what is wrong."""


class TraceError(WorkloadError):
    """A file that is not a trace, or a damaged one: `path:line: what is wrong; what would be right`."""


class TraceRow(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace file."""

    time_ns: int | None
    """As the file counts; None where it has no times."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Hash ids of the prompt's blocks; empty where the file has none."""
    session: str = ""
    """Empty where the file has none."""


@dataclass(frozen=True)
class TraceFormat:
    """What a file's first lines say about the rest."""

    name: str
    block_tokens: int
    """0 without hash ids."""
    parse: Parse
    header_lines: int


def read_rows(path: Path) -> Iterator[TraceRow]:
    """Every request of the file, in its order. Raises TraceError at the first line that is wrong."""
    known = detect(path)
    first_ns: int | None = None
    last_ns: int | None = None
    with _opened(path) as file:
        for number, line in _lines(path, file):
            if number <= known.header_lines or not line:
                continue
            with _complaints_of(path, number, line):
                row = known.parse(line)
            if row is None:
                continue
            if last_ns is not None and row.time_ns is not None and row.time_ns < last_ns:
                raise _error(path, number, "its time is before that of the row above; sort the file by time")
            last_ns = row.time_ns
            first_ns = last_ns if first_ns is None else first_ns
            if first_ns is not None and last_ns is not None and last_ns - first_ns > YEARS_MAX_NS:
                raise _error(path, number, "its time is more than a century after that of the first row")
            yield row


def detect(path: Path) -> TraceFormat:
    """The format of a file, from its header and first row."""
    with _opened(path) as file:
        lines = ((number, line) for number, line in _lines(path, file) if line)
        header_number, header = next(lines, (0, ""))
        first_number, first = next(lines, (0, ""))
    if not header:
        raise TraceError(f"{path}: the file is empty; {_known_formats()}")
    if header.startswith("version https://git-lfs"):
        raise _error(
            path, header_number, "a Git LFS pointer instead of the file; fetch it with `git lfs pull`"
        )
    if header.startswith("{"):
        return TraceFormat("mooncake", BLOCK_TOKENS, _mooncake, 0)
    with _complaints_of(path, header_number, header):
        columns = _columns(_cells(header))
    build = _builder(columns)
    if build is None:
        raise _error(
            path, header_number, f"unknown format, beginning with {_shown(header)}; {_known_formats()}"
        )
    if not first:
        raise _error(path, header_number, "a header and no row below it")
    with _complaints_of(path, first_number, first):
        name, parse = build(columns, first)
    return TraceFormat(name, 0, parse, first_number - 1)


def _columns(header: Sequence[str]) -> dict[str, int]:
    """Where each column is. Raises ValueError for a name that is there twice."""
    columns: dict[str, int] = {}
    for index, name in enumerate(header):
        if columns.setdefault(_plain(name), index) != index and name:
            raise ValueError(f"the column {_shown(name)} is there twice: which of them counts?")
    return columns


def _builder(columns: Mapping[str, int]) -> Callable[[Mapping[str, int], str], tuple[str, Parse]] | None:
    for needed, build in (
        (("timestamp", "contexttokens", "generatedtokens"), _azure),
        (("numprefilltokens", "numdecodetokens"), _vidur),
        (("timestamp", "requesttokens", "responsetokens"), _burstgpt),
    ):
        if all(name in columns for name in needed):
            return build
    return None


def _known_formats() -> str:
    return (
        "known are JSON lines with timestamp, input_length, output_length and hash_ids (Mooncake), and CSV "
        "with a header of TIMESTAMP,ContextTokens,GeneratedTokens (Azure), num_prefill_tokens,"
        "num_decode_tokens (length pairs) or Timestamp,Request tokens,Response tokens (BurstGPT)"
    )


class _MooncakeLine(msgspec.Struct):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


def _mooncake(line: str) -> TraceRow:
    try:
        read = msgspec.json.decode(line, type=_MooncakeLine)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; a row has timestamp, input_length, output_length and hash_ids") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"not a whole JSON object ({error})") from None
    tokens = _count("input_length", read.input_length)
    blocks = -(-tokens // BLOCK_TOKENS)
    if len(read.hash_ids) != blocks:
        raise ValueError(
            f"{len(read.hash_ids)} hash_ids; {tokens} tokens make {blocks} blocks of {BLOCK_TOKENS}, "
            "the last one in part"
        )
    wrong = next((one for one in read.hash_ids if not 0 <= one < HASH_IDS), None)
    if wrong is not None:
        raise ValueError(f"hash_ids has {_number_shown(wrong)}; an id is a number from 0 to 2^64 - 1")
    time_ns = _time_ns("timestamp", read.timestamp, 1e6)
    return TraceRow(time_ns, tokens, _count("output_length", read.output_length), tuple(read.hash_ids))


def _azure(columns: Mapping[str, int], first: str) -> tuple[str, Parse]:
    stamp_at, input_at, output_at = (
        columns[name] for name in ("timestamp", "contexttokens", "generatedtokens")
    )
    # Files of this layout whose times were taken out say so with letters in place of a date.
    timed = any(character.isdigit() for character in _field(_cells(first), stamp_at, "TIMESTAMP"))

    def parse(line: str) -> TraceRow:
        cells = _cells(line)
        stamp = _field(cells, stamp_at, "TIMESTAMP")
        return TraceRow(
            _date_ns(stamp) if timed else None,
            _counted(cells, input_at, "ContextTokens"),
            _counted(cells, output_at, "GeneratedTokens"),
        )

    return "azure" if timed else "length pairs", parse


def _vidur(columns: Mapping[str, int], _first: str) -> tuple[str, Parse]:
    input_at, output_at = columns["numprefilltokens"], columns["numdecodetokens"]

    def parse(line: str) -> TraceRow:
        cells = _cells(line)
        prefill = _counted(cells, input_at, "num_prefill_tokens")
        return TraceRow(None, prefill, _counted(cells, output_at, "num_decode_tokens"))

    return "length pairs", parse


def _burstgpt(columns: Mapping[str, int], _first: str) -> tuple[str, Parse]:
    stamp_at, input_at, output_at = (
        columns[name] for name in ("timestamp", "requesttokens", "responsetokens")
    )
    session_at = columns.get("sessionid")

    def parse(line: str) -> TraceRow | None:
        cells = _cells(line)
        # A failed request has an answer of no tokens.
        if _field(cells, output_at, "Response tokens") in ("0", "0.0"):
            return None
        stamp = _field(cells, stamp_at, "Timestamp")
        return TraceRow(
            _time_ns("Timestamp", _number("Timestamp", stamp), 1e9),
            _counted(cells, input_at, "Request tokens"),
            _counted(cells, output_at, "Response tokens"),
            session="" if session_at is None else _field(cells, session_at, "Session ID"),
        )

    return "burstgpt", parse


@contextmanager
def _complaints_of(path: Path, number: int, line: str) -> Iterator[None]:
    """Complaints about a line, with its place."""
    try:
        yield
    except ValueError as error:
        raise _error(path, number, f"{error}; the line is {_shown(line)}") from None


def _opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise TraceError(f"{path}: a pipe or a device; a trace is read twice, so give a file")
        return path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of every line."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if number == 1 and line.startswith(GZIP):
            raise _error(path, number, "a gzip file; unpack it first, as with `gunzip -k`")
        if len(line) > LINE_BYTES_MAX:
            raise _error(path, number, f"a line of more than {LINE_BYTES_MAX:,} bytes; is this a text file?")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise _error(
                path, number, f"byte {error.start + 1} is no UTF-8 text; is this a text file?"
            ) from None
        if "\0" in text:
            raise _error(path, number, "bytes of value 0: the file is damaged, or not a text file")
        yield number, text


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True), [])]
    except csv.Error as error:
        raise ValueError(f"not a line of CSV ({error})") from None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace(" ", "")


def _field(cells: list[str], at: int, name: str) -> str:
    if at >= len(cells) or not cells[at]:
        raise ValueError(f"no {name}, column {at + 1}, among {len(cells)}: the line is cut, or lacks a value")
    return cells[at]


def _counted(cells: list[str], at: int, name: str) -> int:
    value = _number(name, _field(cells, at, name))
    if not value.is_integer():
        raise ValueError(f"{name} is {cells[at]}; it must be a whole number of tokens")
    return _count(name, int(value))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} is {_shown(text)}; it must be a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} is {text}; it must be a finite number")
    return value


def _count(name: str, tokens: int) -> int:
    if not 1 <= tokens <= TOKENS_MAX:
        raise ValueError(
            f"{name} is {_number_shown(tokens)}; it must be a number of tokens from 1 to {TOKENS_MAX:,}"
        )
    return tokens


def _time_ns(name: str, value: float, unit_ns: float) -> int:
    if not 0 <= value < (1 << 62) / unit_ns:
        shown = _number_shown(value)
        raise ValueError(f"{name} is {shown}; it must be 0 or later, and less than a century")
    return round(value * unit_ns)


def _date_ns(text: str) -> int:
    """Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900`, with up to nine digits after the point."""
    whole, _, fraction = text.partition(".")
    fraction = fraction.removesuffix("Z").removesuffix("+00:00")
    try:
        seconds = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
        if fraction and not (fraction.isascii() and fraction.isdigit()):
            raise ValueError(fraction)
    except (ValueError, OverflowError):
        raise ValueError(
            f"TIMESTAMP is {_shown(text)}; it must be like 2023-11-16 18:15:46.6805900"
        ) from None
    return int(seconds) * 1_000_000_000 + int(f"{fraction:0<9}"[:9])


def _number_shown(value: float) -> str:
    """Python refuses to write thousands of digits."""
    if isinstance(value, int) and abs(value) >= LONG:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    return f"{value}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…")


def _error(path: Path, number: int, problem: str) -> TraceError:
    return TraceError(f"{path}:{number}: {problem}")
