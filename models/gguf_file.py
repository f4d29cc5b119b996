"""Reading a GGUF file: metadata, and where its tensors lie.

The `gguf` package reads the same format, but builds numpy views for every string of the vocabulary, which
takes seconds; this reader takes the metadata of a 49k vocabulary in well under one. Format: the GGUF
specification of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from muxk.models.errors import ModelError, damaged
from muxk.models.fields import positive_int

STRING = 8
ARRAY = 9
SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
MAX_DIMENSIONS = 4
MAX_DEPTH = 4
PART_NAME = r"(.+)-(\d{5})-of-(\d{5})\.gguf"
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file. `shape` is row-major, the last dimension contiguous."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    """Of ggml's types; see `gguf.GGMLQuantizationType`."""
    start: int
    """Byte offset in its file."""
    path: Path
    """Its file: the one that was asked for, or another part of a model in several files."""


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensor table of a model; the tensors' bytes stay on disk."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor table, of all parts where the model is in several files.

    ModelError when a file is missing, truncated, or not GGUF version 2 or 3.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return first
    tensors = dict(first.tensors)
    for part in _other_parts(path, count):
        tensors.update(_read_file(part).tensors)
    return GgufFile(path, first.metadata, tensors)


def _other_parts(path: Path, count: int) -> list[Path]:
    found = re.fullmatch(PART_NAME, path.name)
    if found is None or int(found[3]) != count:
        raise ModelError(
            f"{path}: is one of {count} parts, which are named like model-00001-of-{count:05}.gguf"
        )
    parts = [path.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if path != parts[0]:
        raise ModelError(f"{path}: is a part of a model; give its first part, {parts[0]}")
    return parts[1:]


def _read_file(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise damaged(path, "shorter than a GGUF header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    if data[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it begins with {data[:4]!r})")
    cursor = _Cursor(path, data, 4)
    version = cursor.u32()
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported; supported: 2, 3")
    tensor_count, field_count = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32())
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = positive_int({"general.alignment": 32, **metadata}, "general.alignment", str(path))
    base = -(-cursor.at // alignment) * alignment
    return GgufFile(path, metadata, {e.name: replace(e, start=base + e.start) for e in entries})


def _entry(cursor: _Cursor) -> GgufTensor:
    name = cursor.string()
    dimensions = cursor.u32()
    if dimensions > MAX_DIMENSIONS:
        raise damaged(cursor.path, f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(dimensions))
    return GgufTensor(name, shape[::-1], cursor.u32(), cursor.u64(), cursor.path)


class _Cursor:
    """Reads values one after the other; every read past the end is a ModelError."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self.path = path
        self.at = at
        self._data = data
        self._size = len(data)

    def u32(self) -> int:
        return int(self._scalar(U32))

    def u64(self) -> int:
        return int(self._scalar(U64))

    def string(self) -> str:
        length = self.u64()
        start = self._advance(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise damaged(self.path, f"a string at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        return self._scalar(self._scalar_type(kind))

    def _array(self, depth: int = 1) -> list[Any]:
        if depth > MAX_DEPTH:
            raise damaged(self.path, f"an array at byte {self.at} lies in more than {MAX_DEPTH} others")
        kind, length = self.u32(), self.u64()
        if length > self._size:
            raise damaged(self.path, f"an array at byte {self.at} claims {length} elements")
        if kind in (STRING, ARRAY):
            read: Callable[[], Any] = self.string if kind == STRING else partial(self._array, depth + 1)
            return [read() for _ in range(length)]
        scalar = self._scalar_type(kind)
        start = self._advance(length * scalar.size)
        return [value for (value,) in scalar.iter_unpack(self._data[start : self.at])]

    def _scalar_type(self, kind: int) -> struct.Struct:
        try:
            return SCALARS[kind]
        except KeyError:
            raise damaged(self.path, f"unknown value type {kind} at byte {self.at}") from None

    def _scalar(self, scalar: struct.Struct) -> Any:
        return scalar.unpack_from(self._data, self._advance(scalar.size))[0]

    def _advance(self, size: int) -> int:
        """The place before `size` more bytes, which must lie inside the file."""
        start, self.at = self.at, self.at + size
        if self.at > self._size:
            raise damaged(self.path, f"it ends at byte {self._size} inside its metadata")
        return start
