"""YAML nodes that know where they stand in the file, down to the column inside a scalar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from muxk.policies.problems import Mark, Source

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


class Style(StrEnum):
    """How a scalar is written, which says how its text maps to the file."""

    PLAIN = "plain"
    QUOTED = "quoted"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A leaf: its text, and the slice of the source it came from."""

    text: str
    style: Style
    mark: Mark
    start: int
    """Index of its first character in the source, quote or block sign included."""
    end: int
    before: str = ""
    """What stands before `text` in the same scalar and was taken off."""

    def after(self, count: int) -> Scalar:
        """What is left without the first characters."""
        before = self.before + self.text[:count]
        return Scalar(self.text[count:], self.style, self.mark, self.start, self.end, before)

    def mark_at(self, offset: int) -> Mark:
        """The mark of a character of `text`, found by walking text and source side by side.

        Folding only takes out or joins white space, so each visible character is looked for in order.
        """
        raw = self.mark.source.text
        index = self._first_index(raw)
        wanted = offset + len(self.before)
        for position, character in enumerate(self.before + self.text):
            if not character.isspace():
                index = _find(raw, character, index, self.end)
                if position >= wanted:
                    return self.mark.source.mark(index)
                index += 1
            elif position >= wanted:
                break
        return self.mark.source.mark(min(index, self.end))

    def _first_index(self, raw: str) -> int:
        if self.style is Style.QUOTED:
            return self.start + 1
        if self.style is Style.BLOCK:
            return raw.find("\n", self.start) + 1 or self.end
        return self.start


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """A list of nodes."""

    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping with its value."""

    key: Scalar
    value: Node


@dataclass(frozen=True, slots=True)
class MappingNode:
    """Keys and values; keys are scalars and differ."""

    entries: tuple[Entry, ...]
    mark: Mark

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def get(self, key: str) -> Node | None:
        """The value of a key, or None."""
        return next((entry.value for entry in self.entries if entry.key.text == key), None)


Node: TypeAlias = Scalar | SequenceNode | MappingNode

_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | float | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".nan": float("nan"), ".NaN": float("nan"), ".NAN": float("nan"),
    ".inf": float("inf"), ".Inf": float("inf"), ".INF": float("inf"), "-.inf": float("-inf"),
}  # fmt: skip
_MAX_DIGITS = 64


def plain_scalar(scalar: Scalar) -> bool | int | float | str | None:
    """The value of a scalar by the YAML 1.2 core schema: `on` is text, `1e3` a number, `017` is 17."""
    text = scalar.text
    if scalar.style is not Style.PLAIN or len(text) > _MAX_DIGITS:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEXADECIMAL.fullmatch(text):
        return int(text[2:], 16)
    return float(text) if _FLOAT.fullmatch(text) else text


def plain(node: Node) -> Plain:
    """A node as plain Python data, without marks."""
    if isinstance(node, Scalar):
        return plain_scalar(node)
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.items]
    return {entry.key.text: plain(entry.value) for entry in node}


def is_null(node: Node) -> bool:
    """True for an empty value, `~` or `null`."""
    return isinstance(node, Scalar) and plain_scalar(node) is None


def describe(node: Node) -> str:
    """What a node is, for messages."""
    if isinstance(node, SequenceNode):
        return "a list"
    if isinstance(node, MappingNode):
        return "a mapping"
    return "nothing" if is_null(node) else f"'{node.text[:40]}'"


def written(node: Node) -> str:
    """A node on one line, about as it was written."""
    if isinstance(node, Scalar):
        return " ".join(node.text.split())
    if isinstance(node, SequenceNode):
        return f"[{', '.join(written(item) for item in node.items)}]"
    return "{" + ", ".join(f"{entry.key.text}: {written(entry.value)}" for entry in node) + "}"


def whole(source: Source, text: str) -> Scalar:
    """A scalar that is a whole source, such as the value of a `--set`."""
    start = max(0, source.text.find(text)) if text else len(source.text)
    return Scalar(text, Style.PLAIN, source.mark(start), start, start + len(text))


def _find(raw: str, character: str, start: int, end: int) -> int:
    found = raw.find(character, start, end)
    return found if found >= 0 else min(start, end)
