"""What can be wrong with a policy: structured problems with a place, a caret and a hint."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

MAX_PROBLEMS = 100
"""Problems kept for one file; a file with more is not being read by a person."""
WINDOW = 120
"""Characters of a long source line that are shown around the caret."""


ABSENT = "ask running.active, parked.waiting or candidate.waiting first"


class RuleError(Exception):
    """An expression has no value for this view: division by zero, overflow, NaN, or an absent name."""


@dataclass(frozen=True, slots=True)
class Source:
    """A text that marks point into; line endings are `\\n`, without a byte order mark."""

    filename: str
    text: str

    def line(self, number: int) -> str:
        """Line `number`, counted from 1; empty beyond the end."""
        lines = self.text.split("\n")
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def mark(self, index: int) -> Mark:
        """The mark of a character index."""
        before = self.text[:index]
        line_start = before.rfind("\n") + 1
        return Mark(self, before.count("\n") + 1, index - line_start + 1)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a source; line and column are counted from 1."""

    source: Source = field(repr=False)
    line: int
    column: int


class Severity(StrEnum):
    """How much a problem matters."""

    ERROR = "error"
    """The policy is refused."""
    WARNING = "warning"
    """It says something that can not be meant; `muxk check --strict` refuses it."""
    NOTE = "note"
    """It may well be meant, and is worth knowing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a policy file."""

    file: str
    line: int
    column: int
    message: str
    hint: str
    """What to do about it; may be empty."""
    source_line: str
    severity: Severity = Severity.ERROR
    code: str = "invalid"
    """A stable word for machines, such as `unreachable-rule`."""

    def __str__(self) -> str:
        text, column = _window(self.source_line, self.column)
        gutter = f"{self.line:>5} | "
        kind = "" if self.severity is Severity.ERROR else f"{self.severity}: "
        lines = [f"{self.file}:{self.line}:{self.column}: {kind}{self.message}"]
        if text.strip():
            lines += [gutter + text, " " * 5 + " | " + " " * (column - 1) + "^"]
        if self.hint:
            lines.append(f"      hint: {self.hint}")
        return "\n".join(lines)


class PolicyError(Exception):
    """A policy was refused; `problems` lists every mistake that was found, in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        total = "1 error" if count == 1 else f"{count} errors"
        super().__init__("\n".join([*map(str, self.problems), total]))


Translate = Callable[[Mark], Mark]
"""From a place in a text that was converted to the place in the text that was read."""


class Report:
    """Collects problems, so that one run tells them all. It is true when there is an error."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []
        self._errors = 0
        self._translate: Translate = lambda mark: mark

    def __bool__(self) -> bool:
        return self._errors > 0

    @property
    def full(self) -> bool:
        return len(self._problems) >= MAX_PROBLEMS

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that was noted, in file order."""
        return tuple(sorted(self._problems, key=lambda problem: (problem.line, problem.column)))

    def translate(self, translate: Translate) -> None:
        """Say from now on where things stand in the text that was read before it was converted."""
        self._translate = translate

    def add(self, mark: Mark, message: str, hint: str = "", code: str = "invalid") -> None:
        """Note an error; the same one at the same place is noted once."""
        self._note(mark, message, hint, Severity.ERROR, code)

    def warn(self, mark: Mark, message: str, hint: str, code: str) -> None:
        """Note what can not be meant, though the policy works."""
        self._note(mark, message, hint, Severity.WARNING, code)

    def note(self, mark: Mark, message: str, hint: str, code: str) -> None:
        """Note what is worth knowing."""
        self._note(mark, message, hint, Severity.NOTE, code)

    def _note(self, mark: Mark, message: str, hint: str, severity: Severity, code: str) -> None:
        place = self._translate(mark)
        line = place.source.line(place.line)
        message, hint = visible(message), visible(hint)
        problem = Problem(
            place.source.filename, place.line, place.column, message, hint, line, severity, code
        )
        if not self.full and problem not in self._problems:
            self._problems.append(problem)
            self._errors += severity is Severity.ERROR

    def raise_any(self) -> None:
        """Raise the errors that were collected.

        Raises:
            PolicyError: there is at least one.
        """
        if self._errors:
            raise PolicyError([found for found in self.problems if found.severity is Severity.ERROR])


def explain(error: Exception) -> str:
    """A fault of an expression in words."""
    if isinstance(error, ZeroDivisionError):
        return "division by zero"
    if isinstance(error, ArithmeticError):
        return "the result is too large or not a number"
    if isinstance(error, AttributeError) and error.obj is None:
        return f"a value is absent ({error.name}): {ABSENT}"
    return str(error) or type(error).__name__


def visible(text: str) -> str:
    """A text of the file as it can be shown in a message: control and direction characters by their code."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else f"U+{ord(one):04X}" for one in text)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint with the closest known word, else `otherwise`."""
    close = difflib.get_close_matches(word[:64], list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else otherwise


def by_root(names: Iterable[str]) -> list[str]:
    """Names, with `decode.*` for all that begin with `decode.`."""
    roots = [name.partition(".") for name in names]
    return list(dict.fromkeys(root + dot + "*" * len(dot) for root, dot, _ in roots))


def one_of(words: Iterable[str]) -> str:
    """`a, b or c`."""
    listed = list(words)
    if len(listed) < 2:
        return "".join(listed)
    return ", ".join(listed[:-1]) + " or " + listed[-1]


def _window(line: str, column: int) -> tuple[str, int]:
    """The part of a long line around a column, and the column in it; tabs count as one character."""
    flat = "".join(character if character.isprintable() else " " for character in line.rstrip())
    if len(flat) <= WINDOW:
        return flat, column
    start = max(0, column - 1 - WINDOW // 2)
    return flat[start : start + WINDOW], column - start
