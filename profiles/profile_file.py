"""Profiles on disk: what a device and model were measured to take, and the key that says of which they are.

A profile is one JSON document. While it is measured, what is known is appended to a file beside it, one line
a measurement, so that a run which was killed goes on where it was. A profile or a part of one that was made
for something else is refused with the field that differs.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import IO, Any

import msgspec
from muxk.kernel.estimates import Estimates
from muxk.kernel.work import Split

FORMAT = 1
"""Of the file: one of another format is refused."""
PROFILE_BYTES_MAX = 4 << 20
PARTIAL_BYTES_MAX = 64 << 20
NUMBER_MAX = 1e15
"""Of what a profile holds: eleven days in ns, more tokens than any context."""
FOLDER = Path("profiles")
"""Where profiles go when nothing is said: below the current folder."""
SHOWN_CHARS = 120
FINGERPRINT_SAYS = (
    " (on cpu: another processor, or native operators that were built since or are missing; on a simulated "
    "card: other constants)"
)


class ProfileError(ValueError):
    """A profile can not be read, or is not of this device and model; the text is for the user."""


class ProfileKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a profile is of. Two of the same key have the same times, but for noise."""

    format: int
    device: str
    units: int
    granularity: int
    """Units in which a split moves; 0 when there is none."""
    splits: tuple[tuple[int, int], ...]
    """(decode, prefill) units."""
    model: str
    layers: int
    model_dims: dict[str, Any]
    dtype: str
    fingerprint: str
    """Digest of what else times depend on: a processor's name, the constants of a simulated card."""


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error of a fit on what it was made from, relative to what was measured."""

    samples: int
    median: float
    largest: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished profile."""

    key: ProfileKey
    grid: str
    """`full` or `quick`."""
    estimates: Estimates
    decode: Accuracy
    prefill: Accuracy
    co_runs: int
    """Decode steps that were measured beside a prefill."""
    largest_slowdown: float
    """Of those, relative to what is predicted alone."""
    cut_short: int = 0
    """Of those, steps that outlasted the prefill beside them: their slowdown is a lower bound."""


def make_key(
    device: str,
    units: int,
    splits: Sequence[Split],
    model: str,
    layers: int,
    dims: Mapping[str, Any],
    dtype: str,
    fingerprint: str,
) -> ProfileKey:
    """The key of a device with a model on it."""
    pairs = tuple((split.decode_units, split.prefill_units) for split in splits)
    prefill = sorted(split.prefill_units for split in splits)
    granularity = gcd(*(high - low for low, high in itertools.pairwise(prefill)), *prefill[:1])
    # As it is read from a file, where a tuple is a list.
    sizes = msgspec.json.decode(msgspec.json.encode(dims), type=dict[str, Any])
    return ProfileKey(FORMAT, device, units, granularity, pairs, model, layers, sizes, dtype, fingerprint)


def digest(facts: Any) -> str:
    """Of plain data or structs, the same in every process."""
    plain = msgspec.to_builtins(facts, str_keys=True)
    return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()[:16]


def default_path(key: ProfileKey) -> Path:
    """`profiles/sim-a100_llama-3.1-8b.json`."""
    name = f"{_plain(key.device)}_{_plain(Path(key.model).name)}.json"
    return FOLDER / name


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name)


def check_key(found: ProfileKey, wanted: ProfileKey, where: Path) -> None:
    """Raises ProfileError with the first field that differs."""
    for field in ProfileKey.__struct_fields__:
        theirs, ours = getattr(found, field), getattr(wanted, field)
        if theirs != ours:
            if isinstance(theirs, dict) and isinstance(ours, dict):
                theirs, ours = _where_they_differ(theirs, ours)
            why = FINGERPRINT_SAYS if field == "fingerprint" else ""
            raise ProfileError(
                f"{where} is no profile of this device and model: its {field.replace('_', ' ')} is "
                f"{_shown(theirs)}, here it is {_shown(ours)}{why}. Measure again with `muxk profile "
                f"--device {wanted.device} --model {wanted.model}`, or leave --profile out"
            )


def _where_they_differ(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    return {name: theirs.get(name) for name in names}, {name: ours.get(name) for name in names}


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return repr(text) if len(text) <= SHOWN_CHARS else repr(text[:SHOWN_CHARS]) + " ..."


def load_profile(path: Path, wanted: ProfileKey) -> Profile:
    """A profile of this key. Raises ProfileError: it is not there, damaged, stale, or of something else."""
    profile = read_profile(path)
    check_key(profile.key, wanted, path)
    _check_tables(profile, path)
    return profile


def read_profile(path: Path) -> Profile:
    """A profile, whatever it is of. Raises ProfileError."""
    raw = _read(path, PROFILE_BYTES_MAX)
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{path} is no profile: {error}") from error
    if head.key.format != FORMAT:
        raise ProfileError(
            f"{path} is a profile of format {head.key.format}, this muxk reads {FORMAT}: measure again"
        )
    try:
        return msgspec.json.decode(raw, type=Profile)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{path} is a damaged profile: {error}") from error


def holds_something_else(path: Path) -> bool:
    """Whether the file has content, and that is a profile of no format: it was not measured here.

    Raises ProfileError when it can not be read.
    """
    raw = _read(path, PROFILE_BYTES_MAX)
    try:
        msgspec.json.decode(raw, type=_Head)
    except msgspec.MsgspecError:
        return bool(raw.strip())
    return False


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Head(msgspec.Struct, frozen=True):
    """All that can be relied on in a file of any format."""

    key: _Format


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except OSError as error:
        raise ProfileError(f"{path} can not be read: {error.strerror or error}") from error
    if len(raw) > bytes_max:
        raise ProfileError(f"{path} is no profile: it has more than {bytes_max:,} bytes")
    return raw


def _check_tables(profile: Profile, path: Path) -> None:
    """What is read by index or divided by must be sound, whoever wrote the file."""
    estimates = profile.estimates
    ramps = [ramp for model in estimates.decode for ramp in (model.rows, model.context) if ramp is not None]
    ramps += [model.tokens for model in estimates.prefill if model.tokens is not None]
    sound = estimates.known and estimates.layers == profile.key.layers
    for ramp in ramps:
        sound = sound and 0 < len(ramp.knots) == len(ramp.values) == len(ramp.slopes)
        sound = sound and ramp.knots[0] == 0.0 and list(ramp.knots) == sorted(ramp.knots)
    table = estimates.contention
    if table is not None:
        levels = (table.new_tokens, table.reused_tokens, table.batch, table.context_tokens, table.units)
        size = 1
        for level in levels:
            sound = sound and bool(level) and list(level) == sorted(level)
            size *= len(level)
        sound = sound and len(table.factors) == size == table.cells * len(table.units)
    sound = sound and all(tile > 0 for model in estimates.prefill for tile, _ in model.tiles)
    if not sound:
        raise ProfileError(f"{path} is a damaged profile: its tables do not fit together; measure again")
    _check_numbers("estimates", msgspec.to_builtins(estimates), path)


def _check_numbers(place: str, value: Any, path: Path) -> None:
    """A fit gives times and counts: none is negative, nor so large that a sum of them means nothing."""
    if isinstance(value, dict):
        inside = [(f"{place}.{name}", held) for name, held in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"{place}[{index}]", held) for index, held in enumerate(value)]
    else:
        if isinstance(value, int | float) and not 0 <= value <= NUMBER_MAX:
            raise ProfileError(
                f"{path} is a damaged profile: {place} is {value:g}; it must lie between 0 and "
                f"{NUMBER_MAX:g}. Measure again"
            )
        return
    for name, held in inside:
        _check_numbers(name, held, path)


def write_profile(path: Path, profile: Profile) -> None:
    """Whole or not at all. Raises ProfileError."""
    text = msgspec.json.format(msgspec.json.encode(profile, order="deterministic"), indent=1) + b"\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ProfileError(f"{path} can not be written: {error.strerror or error}") from error


class PartialHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of an unfinished profile."""

    key: ProfileKey
    grid: str


class PartialLine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A measurement."""

    shape: str
    """Its key."""
    ns: int
    """0 when it failed."""
    covered: bool = True
    """What ran beside it outlasted it."""


class Partial:
    """Measurements so far, in a file that only grows."""

    def __init__(self, path: Path, header: PartialHeader, *, fresh: bool = False) -> None:
        """Go on with what is there, or begin anew with `fresh`. Raises ProfileError."""
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self.found: dict[str, list[PartialLine]] = {}
        """By shape, in the order in which they were measured."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)
            whole = self._take(header) if path.exists() else 0
            self._file: IO[bytes] = path.open("ab")
            self._file.truncate(whole)
            if not whole:
                self._file.write(self._encoder.encode(header) + b"\n")
                self._file.flush()
        except OSError as error:
            raise ProfileError(f"{path} can not be written: {error.strerror or error}") from error

    def _take(self, header: PartialHeader) -> int:
        """Read what is there; the bytes of its whole lines. A line that was being written is dropped."""
        raw = _read(self.path, PARTIAL_BYTES_MAX)
        whole = raw.rfind(b"\n") + 1
        lines = raw[:whole].splitlines()
        if not lines:
            return 0
        try:
            there = msgspec.json.decode(lines[0], type=PartialHeader)
            decoder = msgspec.json.Decoder(PartialLine)
            taken = [decoder.decode(line) for line in lines[1:]]
        except msgspec.MsgspecError as error:
            raise ProfileError(
                f"{self.path} is no unfinished profile: {error}; --fresh begins anew"
            ) from error
        check_key(there.key, header.key, self.path)
        if there.grid != header.grid:
            raise ProfileError(
                f"{self.path} is of a {there.grid} profile, not of a {header.grid} one; --fresh begins anew"
            )
        for line in taken:
            self.found.setdefault(line.shape, []).append(line)
        return whole

    def add(self, line: PartialLine) -> None:
        """Raises ProfileError when the disk does not take it."""
        self.found.setdefault(line.shape, []).append(line)
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
        except OSError as error:
            raise ProfileError(f"{self.path} can not be written: {error.strerror or error}") from error

    def flush(self) -> None:
        """What was added so far survives the end of the process."""
        try:
            self._file.flush()
        except OSError as error:
            raise ProfileError(f"{self.path} can not be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def remove(self) -> None:
        """The profile is written: this is not needed any more."""
        self.close()
        self.path.unlink(missing_ok=True)
