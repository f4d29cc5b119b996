"""Edits of a YAML text by the places of its nodes: what is not edited stays as it was laid out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muxk.policies.marks import MappingNode, Node, Scalar, Style
from muxk.policies.problems import Mark

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.()<>=!*/+%|& -]*")
"""What needs no quotes anywhere in YAML. Not all that needs none, and no word that YAML reads as a value."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A slice of a text and what comes in its place."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with edits that are in its order and do not overlap."""
    parts: list[str] = []
    done = 0
    for edit in edits:
        assert done <= edit.start <= edit.end, edit
        parts += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*parts, text[done:]])


@dataclass(frozen=True, slots=True)
class Change:
    """A node that says something else in the next version of the language."""

    node: Node
    text: str
    """What it says then."""
    edits: tuple[Edit, ...] | None
    """How its text becomes that; None when it can not be edited as it is laid out."""

    @classmethod
    def of_text(cls, scalar: Scalar, text: str) -> Change:
        """Another text, in the quotes that are there."""
        start, end = content(scalar)
        return cls(scalar, text, (Edit(start, end, text),))


def content(scalar: Scalar) -> tuple[int, int]:
    """Where the text of a scalar begins and ends in its source, without quotes or the sign of a block."""
    source = scalar.mark.source
    if scalar.style is Style.QUOTED:
        return scalar.start + 1, scalar.end - 1
    if scalar.style is Style.BLOCK and scalar.text.strip():
        first = len(scalar.text) - len(scalar.text.lstrip())
        last = len(scalar.text.rstrip()) - 1
        return index_of(scalar.mark_at(first)), index_of(scalar.mark_at(last)) + 1
    return scalar.start, scalar.start + len(source.text[scalar.start : scalar.end].rstrip())


def index_of(mark: Mark) -> int:
    """The index of a place in its source."""
    lines = mark.source.text.split("\n")
    return sum(len(line) + 1 for line in lines[: mark.line - 1]) + mark.column - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a scalar's text and what comes in its place."""

    start: int
    end: int
    text: str


def pieces_in_text(text: str, pieces: Sequence[Piece]) -> str:
    """The text with its pieces replaced; they are in its order."""
    return apply_edits(text, [Edit(piece.start, piece.end, piece.text) for piece in pieces])


def pieces_in_source(scalar: Scalar, pieces: Sequence[Piece]) -> list[Edit]:
    """The same in the source; a piece is empty, or holds no white space at its ends."""
    return [_edit(scalar, piece) for piece in pieces]


def _edit(scalar: Scalar, piece: Piece) -> Edit:
    start, end = content(scalar)
    if piece.start == piece.end:
        at = end if piece.start >= len(scalar.text.rstrip()) else index_of(scalar.mark_at(piece.start))
        return Edit(at, at, piece.text)
    first, last = scalar.mark_at(piece.start), scalar.mark_at(piece.end - 1)
    return Edit(max(start, index_of(first)), index_of(last) + 1, piece.text)


def unwrapped(mapping: MappingNode, prefix: str, pieces: Sequence[Piece]) -> Change:
    """Instead of a mapping with one key, the text of its value behind a prefix.

    `{key: "value"}` becomes `prefix value`, in the quotes of the value where it needs any.
    """
    (entry,) = mapping
    value = entry.value
    assert isinstance(value, Scalar), "the value of such a mapping is a text"
    text = prefix + pieces_in_text(value.text, pieces)
    inner = pieces_in_source(value, pieces)
    start, end = content(value)
    raw = mapping.mark.source.text
    opening = index_of(mapping.mark)
    closing = None
    gap = raw[entry.key.end : value.start]
    if raw[opening : opening + 1] == "{":
        closing = _closing(raw, value.end)
        gap += raw[opening + 1 : entry.key.start]
        if closing is None:
            return Change(mapping, text, None)
    if gap.strip() != ":":
        return Change(mapping, text, None)
    first, last = Edit(opening, start, _opened(value, raw, prefix, text)), end
    if value.style is Style.BLOCK:
        edits = [Edit(opening, value.start, ""), Edit(start, start, prefix), *inner]
        return Change(mapping, text, tuple(edits))
    after = closing if closing is not None else value.end
    if value.style is Style.PLAIN and closing is None:
        return Change(mapping, text, (first, *inner))
    return Change(mapping, text, (first, *inner, Edit(last, after, _closed(value, raw, text))))


def _closing(raw: str, index: int) -> int | None:
    """The index behind the `}` that follows, or None when something else is there too."""
    match = re.compile(r"\s*,?\s*\}").match(raw, index)
    return match.end() if match else None


def _needs_quotes(value: Scalar, raw: str, text: str) -> bool:
    """Whether the text stays in the quotes of the value."""
    as_written = raw[value.start + 1 : value.end - 1] == value.text
    return value.style is Style.QUOTED and not (as_written and _PLAIN.fullmatch(text.strip()))


def _opened(value: Scalar, raw: str, prefix: str, text: str) -> str:
    return (raw[value.start] if _needs_quotes(value, raw, text) else "") + prefix


def _closed(value: Scalar, raw: str, text: str) -> str:
    return raw[value.start] if _needs_quotes(value, raw, text) else ""
