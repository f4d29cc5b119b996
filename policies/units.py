"""Numbers with units as policies write them: `50ms`, `10ms/token`, `16k`, `4GiB`, `90%`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from muxk.policies.problems import did_you_mean


class Type(StrEnum):
    """Static type of an expression. Durations are ns; a moment is ns on the runtime's clock."""

    NUMBER = "number"
    DURATION = "duration"
    MOMENT = "moment"
    SIZE = "size"
    """In bytes."""
    PERCENT = "percent"
    """90% is 0.9; a number wherever it is computed with, but never a count."""
    BOOL = "bool"
    NAME = "name"
    """Of a class, such as 'interactive'; knows == and != only."""
    ANY = "any"
    """Of a part that is already reported as wrong."""

    @property
    def phrase(self) -> str:
        return _PHRASES[self]


_PHRASES: Mapping[Type, str] = {
    Type.NUMBER: "a number",
    Type.DURATION: "a duration",
    Type.MOMENT: "a moment in time",
    Type.SIZE: "a size",
    Type.PERCENT: "a percentage",
    Type.BOOL: "true or false",
    Type.NAME: "a name",
    Type.ANY: "a value",
}

DURATION_NS: Mapping[str, int] = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "min": 60_000_000_000,
    "h": 3_600_000_000_000,
}
COUNTS: Mapping[str, int] = {
    "k": 1_000, "M": 1_000_000, "G": 1_000_000_000,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30,
}  # fmt: skip
SIZES: Mapping[str, int] = {
    "B": 1,
    "kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000, "TB": 1_000_000_000_000,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
LARGEST = float(1 << 63)
"""Literals stay below; larger ones are typing errors or attacks."""

NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_QUANTITY = re.compile(rf"({NUMBER})([A-Za-z_µ]\w*|%)?")
_RATE = re.compile(rf"({NUMBER})([A-Za-z]*)\s*(/\s*token)?")


class UnitError(ValueError):
    """A literal can not be read; `hint` says what would be right."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Quantity:
    """A literal: an int or float in base units (ns for durations, bytes for sizes) and its type."""

    value: int | float
    type: Type


def parse_quantity(text: str) -> Quantity:
    """Read `50ms`, `16k`, `4GiB`, `90%` or a bare number.

    Raises:
        UnitError: not a number, an unknown unit, or too large.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UnitError(
            f"'{text[:40]}' is not a number", "write a number and a unit, such as 50ms, 16k, 4GiB or 90%"
        )
    digits, unit = match[1], match[2] or ""
    if unit in DURATION_NS:
        return Quantity(_scaled(digits, DURATION_NS[unit]), Type.DURATION)
    if unit in SIZES:
        return Quantity(_scaled(digits, SIZES[unit]), Type.SIZE)
    if unit == "%":
        return Quantity(_scaled(digits, 1) / 100, Type.PERCENT)
    if unit and unit not in COUNTS:
        raise UnitError(f"unknown unit '{unit[:40]}'", _unknown_unit_hint(digits, unit))
    return Quantity(_scaled(digits, COUNTS.get(unit, 1)), Type.NUMBER)


def _unknown_unit_hint(digits: str, unit: str) -> str:
    known = [*DURATION_NS, *COUNTS, *SIZES]
    special = {
        "m": "min", "K": "k", "sec": "s", "seconds": "s", "µs": "us", "msec": "ms", "minutes": "min",
        "KB": "kB", "Kb": "kB", "kb": "kB", "Mb": "MB", "mb": "MB", "Gb": "GB", "gb": "GB",
    }  # fmt: skip
    if unit in special:
        return f"did you mean {digits}{special[unit]}?"
    return did_you_mean(unit, known, f"known units: {', '.join(known)}, %")


def unit_hint(left: Type, right: Type) -> str:
    """What is usually meant where one type stands and the other is needed, or empty."""
    pair = {left, right}
    if pair == {Type.NUMBER, Type.DURATION}:
        return "a time needs a unit, such as 50ms or 2s"
    if pair == {Type.NUMBER, Type.SIZE}:
        return "a size has a unit with B, such as 512kB or 4GiB; a count has none, such as 16k or 4Gi"
    if pair == {Type.NUMBER, Type.PERCENT}:
        return "a percentage of a count is a product, such as 50% * units.total"
    if pair == {Type.MOMENT, Type.DURATION}:
        return "the time between two moments is a duration, such as now - request.arrival"
    return ""


def _scaled(digits: str, scale: int) -> int | float:
    value = float(digits) * scale
    if not math.isfinite(value) or value >= LARGEST:
        raise UnitError(f"'{digits[:40]}' is too large")
    if digits.isdecimal():
        return int(digits) * scale
    return int(value) if value.is_integer() else value


def parse_duration(text: str) -> int:
    """A duration in ns, at least 1.

    Raises:
        UnitError: no unit, another unit, or not positive.
    """
    quantity = parse_quantity(text)
    if quantity.type is not Type.DURATION:
        raise UnitError("a time needs a unit", f"write {text.strip()[:20]}ms or {text.strip()[:20]}s")
    if round(quantity.value) < 1:
        raise UnitError("a time must be more than 0")
    if quantity.value > LONGEST_NS:
        raise UnitError("a time must be at most 10 years")
    return round(quantity.value)


LONGEST_NS = 10 * 365 * 24 * 3_600_000_000_000
"""Ten years: added to any clock it stays far within the integers that messages carry."""


@dataclass(frozen=True, slots=True)
class TtftSlo:
    """Time to the first token that is allowed for a prompt: base_ns + per_token_ns * prompt tokens."""

    base_ns: int
    per_token_ns: int

    def at(self, prompt_tokens: int) -> int:
        """The SLO in ns, at most LONGEST_NS."""
        return min(LONGEST_NS, self.base_ns + self.per_token_ns * prompt_tokens)


def parse_ttft(text: str) -> TtftSlo:
    """Read `800ms`, `10ms/token` or `500ms + 10ms/token`.

    Raises:
        UnitError: a term is not a duration or a duration per token, or there is more than one of a kind.
    """
    terms: dict[str, int] = {}
    for term in text.split("+"):
        match = _RATE.fullmatch(term.strip())
        if match is None:
            raise UnitError(
                f"'{term.strip()[:40]}' is not a time", "write 800ms, 10ms/token or 500ms + 10ms/token"
            )
        kind = "per token" if match[3] else "base"
        if kind in terms:
            raise UnitError(f"'{text[:40]}' has two terms of one kind", "write 500ms + 10ms/token")
        terms[kind] = parse_duration(match[1] + match[2])
    return TtftSlo(terms.get("base", 0), terms.get("per token", 0))
