"""A YAML loader of our own: PyYAML's events, nothing constructed, every node marked and everything bounded.

PyYAML's constructors read `on` as true, `1:30` as 90 and `1e3` as text, let the last duplicate key win and
follow aliases; the composer recurses without a bound. So only its scanner and parser are used.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from itertools import islice

import yaml
from muxk.policies.marks import Entry, MappingNode, Node, Scalar, SequenceNode, Style, is_null
from muxk.policies.problems import Mark, Report, Source, did_you_mean

MAX_CHARACTERS = 250_000
MAX_DEPTH = 32
MAX_NODES = 10_000


_DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls of bidirectional text, with which a line can look different from what it says."""
MAX_DIRECTIONS = 10
"""Of them that are told; more of them say nothing new."""


class _Stop(Exception):
    """Reading can not go on; the problem is in the report."""


def load(text: str, filename: str, report: Report) -> Node | None:
    """The root node of a YAML text with one document, or None when it can not be read.

    Problems go to the report; a duplicate key, an alias or a tag does not end the reading.
    """
    source = Source(filename, normalise(text))
    if len(text) > MAX_CHARACTERS:
        report.add(Mark(source, 1, 1), f"the file is larger than {MAX_CHARACTERS:,} characters")
        return None
    _refuse_directions(source, report)
    try:
        return _Composer(source, report).document()
    except _Stop:
        pass
    except RecursionError:
        report.add(Mark(source, 1, 1), "the file is nested too deeply")
    except yaml.reader.ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        report.add(source.mark(position), "a character that YAML does not allow")
    except yaml.MarkedYAMLError as error:
        _report_syntax(error, source, report)
    except (ValueError, OverflowError):  # PyYAML on escapes beyond the last code point
        report.add(Mark(source, 1, 1), "the file is not valid YAML", code="syntax")
    return None


def _refuse_directions(source: Source, report: Report) -> None:
    for match in islice(_DIRECTION.finditer(source.text), MAX_DIRECTIONS):
        message = f"{match[0]} changes the direction of the text around it"
        report.add(source.mark(match.start()), message, "take it out: it can make a rule look like another")


def normalise(text: str) -> str:
    """Without a byte order mark, and with `\\n` as the line ending."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _report_syntax(error: yaml.MarkedYAMLError, source: Source, report: Report) -> None:
    mark = error.problem_mark or error.context_mark
    index = mark.index if mark is not None else 0
    message = " ".join(part for part in (error.context, error.problem) if part)
    place = source.mark(min(index, len(source.text)))
    report.add(place, message or "not valid YAML", _syntax_hint(message, source.text, index), "syntax")


def _syntax_hint(message: str, text: str, index: int) -> str:
    if "\\t" in message or text[index : index + 1] == "\t":
        return "indent with spaces; YAML does not allow tabs there"
    if "mapping values are not allowed" in message:
        return "put quotes around a text that holds ': '"
    if "undefined alias" in message or "anchor" in message:
        return "put quotes around an expression that starts with & or *"
    if "tag" in message:
        return "put quotes around an expression that starts with !"
    if "expected ',' or" in message:
        return "inside { } put quotes around an expression that holds a comma, a bracket or a colon"
    return ""


class _Composer:
    """Builds marked nodes from parser events."""

    def __init__(self, source: Source, report: Report) -> None:
        self._source = source
        self._report = report
        self._loader = yaml.SafeLoader(source.text)
        self._nodes = 0
        # By characters, not by YAML's own count of lines: to it U+0085 and U+2028 end a line too.
        self._line_starts = [0, *(index + 1 for index, one in enumerate(source.text) if one == "\n")]

    def document(self) -> Node | None:
        """The only document of the text."""
        self._next()  # StreamStart
        if isinstance(self._next(), yaml.StreamEndEvent):
            self._report.add(Mark(self._source, 1, 1), "the file is empty", code="syntax")
            return None
        root = self._node(self._next(), 1)
        self._next()  # DocumentEnd
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            self._report.add(self._mark(after), "a policy file holds one document", "take out the '---'")
        return root

    def _next(self) -> yaml.Event:
        event: yaml.Event = self._loader.get_event()  # type: ignore[no-untyped-call]
        return event

    def _mark(self, event: yaml.Event) -> Mark:
        mark = event.start_mark
        assert mark is not None, "a Python text has marks"
        line = bisect.bisect_right(self._line_starts, mark.index)
        return Mark(self._source, line, mark.index - self._line_starts[line - 1] + 1)

    def _node(self, event: yaml.Event, depth: int) -> Node:
        self._bound(event, depth)
        if isinstance(event, yaml.AliasEvent):
            self._report.add(self._mark(event), "aliases are not allowed", _ALIAS_HINT)
            return self._scalar(event, "")
        self._refuse_extras(event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(event, depth)
        return self._mapping(event, depth)

    def _bound(self, event: yaml.Event, depth: int) -> None:
        self._nodes += 1
        if depth > MAX_DEPTH:
            self._report.add(self._mark(event), f"nested more than {MAX_DEPTH} levels deep")
            raise _Stop
        if self._nodes > MAX_NODES or self._report.full:
            self._report.add(self._mark(event), f"more than {MAX_NODES:,} nodes in the file")
            raise _Stop

    def _refuse_extras(self, event: yaml.Event) -> None:
        tag = getattr(event, "tag", None)
        if tag is not None:
            hint = "an expression that starts with ! needs quotes"
            self._report.add(self._mark(event), f"tags are not allowed: '{tag[:40]}'", hint)
        if getattr(event, "anchor", None) is not None:
            self._report.add(self._mark(event), "anchors are not allowed", _ALIAS_HINT)

    def _scalar(self, event: yaml.Event, text: str) -> Scalar:
        assert event.start_mark is not None
        assert event.end_mark is not None
        start, end = event.start_mark.index, event.end_mark.index
        return Scalar(text, _style(getattr(event, "style", None)), self._mark(event), start, end)

    def _sequence(self, start: yaml.Event, depth: int) -> SequenceNode:
        items: list[Node] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return SequenceNode(tuple(items), self._mark(start))

    def _mapping(self, start: yaml.Event, depth: int) -> MappingNode:
        entries: dict[str, Entry] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            value = self._node(self._next(), depth + 1)
            if not isinstance(key, Scalar):
                self._report.add(key.mark, "a key must be a word", "put quotes around text that holds { or [")
            elif key.text in entries:
                first = entries[key.text].key.mark.line
                self._report.add(
                    key.mark,
                    f"duplicate key '{key.text[:40]}'",
                    f"it is on line {first} already",
                    "duplicate-key",
                )
            else:
                entries[key.text] = Entry(key, value)
        return MappingNode(tuple(entries.values()), self._mark(start))


_ALIAS_HINT = "write the value out; an expression that starts with & or * needs quotes"


def _style(style: str | None) -> Style:
    if style in ("'", '"'):
        return Style.QUOTED
    return Style.BLOCK if style in ("|", ">") else Style.PLAIN


def fields(node: Node, known: Mapping[str, str], what: str, report: Report) -> dict[str, Node]:
    """Values of a mapping by key. Unknown keys are reported.

    Args:
        known: each allowed key; the value is empty, or says why the key is not supported yet.
        what: names the mapping in messages, such as "a rule".
    """
    if not isinstance(node, MappingNode):
        hint = f"known here: {', '.join(known)}"
        report.add(node.mark, f"{what} must be a mapping of keys to values", hint, "wrong-type")
        return {}
    found: dict[str, Node] = {}
    before: Entry | None = None
    torn = False
    for entry in node:
        if report.full:
            break
        key = entry.key.text
        if key not in known and is_torn(entry):
            if not torn:
                report.add(entry.key.mark, *torn_text(before), code="torn-text")
            torn = True
        elif key not in known:
            hint = did_you_mean(key, known, f"known here: {', '.join(known)}")
            report.add(entry.key.mark, f"unknown key '{key[:40]}' in {what}", hint, "unknown-key")
        elif known[key]:
            report.add(entry.key.mark, f"'{key}' {known[key]}", code="unknown-key")
        else:
            found[key] = entry.value
        before = entry
    return found


def is_torn(entry: Entry) -> bool:
    """Whether it is the rest of a text that a comma inside { } cut in two: YAML takes it for a key."""
    after = entry.key.mark.source.text[entry.key.end : entry.key.end + 8]
    return is_null(entry.value) and not after.lstrip().startswith(":")


def torn_text(before: Entry | None) -> tuple[str, str]:
    """Message and hint for that; `before` is the entry whose text it was."""
    whose = "" if before is None else f" of '{before.key.text[:40]}'"
    return "inside { } a comma ends a text", f"put quotes around the text{whose}"
