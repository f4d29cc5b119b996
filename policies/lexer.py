"""Tokens of an expression, and their order, so that only well-formed text reaches `ast.parse`.

Names and literals become placeholders `n<index>` there: Python never sees a string, an attribute, a
subscript or any word of its own but `and or not if else`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from muxk.policies.units import NUMBER

MAX_CHARACTERS = 2_000
MAX_TOKENS = 400
MAX_PARENTHESES = 32
MAX_NAME_CHARACTERS = 64
"""Of a quoted name; those of classes and rules are no longer."""


class Kind(StrEnum):
    """What a token is."""

    NUMBER = "number"
    NAME = "name"
    QUOTED = "quoted"
    """A name between quotes, such as 'interactive'."""
    BINARY = "binary"
    """Stands between two values; `-` is one too."""
    PREFIX = "prefix"
    OPEN = "("
    CLOSE = ")"
    COMMA = ","


@dataclass(frozen=True, slots=True)
class Token:
    """A word of an expression at a character offset."""

    kind: Kind
    text: str
    offset: int


Complain = Callable[[int, str, str], None]
"""Takes an offset, a message and a hint."""

_PATTERN = re.compile(
    rf"(?P<number>{NUMBER}(?:[A-Za-z_µ]\w*|%(?![\w(.]))?)"
    r"|(?P<quoted>'[^'\n]*'|\"[^\"\n]*\")"
    r"|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
    r"|(?P<sign>\*\*|<<|>>|&&|\|\||==|!=|<=|>=|//|[-+*/%<>!(),])"
    r"|(?P<other>\S)",
    re.ASCII,
)
_BINARY_WORDS = ("and", "or", "if", "else")
_REFUSED_WORDS = (
    "lambda", "for", "in", "is", "import", "await", "yield", "class", "def", "return", "None", "from", "with",
    "while", "try", "global", "del", "assert", "raise", "async", "nonlocal", "pass", "as", "match", "print",
)  # fmt: skip
_HINTS: Mapping[str, str] = {
    "=": "compare with ==",
    "?": "write `a if condition else b`",
    ":": "write `a if condition else b`",
    "&": "write `and` or &&",
    "|": "write `or` or ||",
    "'": "a name ends with the quote that it began with",
    '"': "a name ends with the quote that it began with",
    "**": "multiply instead",
    "<<": "multiply instead",
    ">>": "divide instead",
    "≤": "write <=",
    "≥": "write >=",
    "≠": "write !=",
}


_VALUES = (Kind.NUMBER, Kind.NAME, Kind.QUOTED)
_BEGIN_A_VALUE = (*_VALUES, Kind.OPEN, Kind.PREFIX)


def tokenize(text: str, complain: Complain) -> list[Token]:
    """Tokens of an expression; empty when something was complained of."""
    if len(text) > MAX_CHARACTERS:
        complain(0, f"the expression is longer than {MAX_CHARACTERS:,} characters", "split it into rules")
        return []
    tokens: list[Token] = []
    for match in _PATTERN.finditer(text):
        token = _token(match, complain)
        if token is None:
            return []
        tokens.append(token)
    if len(tokens) > MAX_TOKENS:
        complain(
            tokens[MAX_TOKENS].offset,
            f"the expression has more than {MAX_TOKENS} words",
            "split it into rules",
        )
        return []
    return tokens if _in_order(tokens, len(text), complain) else []


def _token(match: re.Match[str], complain: Complain) -> Token | None:
    text, offset = match[0], match.start()
    if match["number"]:
        return Token(Kind.NUMBER, text, offset)
    if match["name"]:
        return _word(text, offset, complain)
    if match["quoted"]:
        return _quoted(text, offset, complain)
    if match["other"] or text in ("**", "<<", ">>"):
        complain(offset, f"{text} is not part of the language", _HINTS.get(text, ""))
        return None
    if text in "(),":
        return Token(Kind(text), text, offset)
    return Token(Kind.PREFIX if text == "!" else Kind.BINARY, text, offset)


def _quoted(text: str, offset: int, complain: Complain) -> Token | None:
    if len(text) > MAX_NAME_CHARACTERS + 2 or not text.isprintable():
        hint = f"at most {MAX_NAME_CHARACTERS} characters that can be printed"
        complain(offset, "what is between the quotes can not be a name", hint)
        return None
    return Token(Kind.QUOTED, text, offset)


def _word(text: str, offset: int, complain: Complain) -> Token | None:
    if text in _REFUSED_WORDS:
        complain(offset, f"'{text}' is not part of the language", "")
        return None
    if text in _BINARY_WORDS:
        return Token(Kind.BINARY, text, offset)
    return Token(Kind.PREFIX if text == "not" else Kind.NAME, text, offset)


def _in_order(tokens: list[Token], end: int, complain: Complain) -> bool:
    """Values and operators alternate and parentheses match; the first mistake is complained of."""
    calls: list[bool] = []
    value_expected = True
    for previous, token in zip([None, *tokens], tokens, strict=False):
        if message := _misplaced(token, previous, value_expected, calls):
            complain(token.offset, message, "")
            return False
        if token.kind is Kind.OPEN:
            calls.append(previous is not None and previous.kind is Kind.NAME)
            value_expected = True
        elif token.kind is Kind.CLOSE:
            calls.pop()
            value_expected = False
        else:
            value_expected = token.kind in (Kind.BINARY, Kind.COMMA, Kind.PREFIX)
    if value_expected:
        complain(end, "the expression ends where a value is expected", "")
    elif calls:
        complain(end, "a parenthesis is not closed", "")
    return not value_expected and not calls


def _misplaced(token: Token, previous: Token | None, value_expected: bool, calls: list[bool]) -> str:
    """What is wrong with a token at its place, or empty. `calls` has True for each open call."""
    if value_expected:
        is_sign = token.kind is Kind.BINARY and token.text in ("-", "+")
        if token.kind in _BEGIN_A_VALUE or is_sign:
            too_deep = token.kind is Kind.OPEN and len(calls) >= MAX_PARENTHESES
            return "too many nested parentheses" if too_deep else ""
        return f"a value is missing before '{token.text}'"
    if token.kind is Kind.OPEN and previous is not None and previous.kind is Kind.NAME:
        return "" if len(calls) < MAX_PARENTHESES else "too many nested parentheses"
    if token.kind in _BEGIN_A_VALUE:
        word = token.text if token.kind is Kind.QUOTED else f"'{token.text[:40]}'"
        return f"an operator is missing before {word}"
    if token.kind is Kind.CLOSE and not calls:
        return "a parenthesis is closed that was not opened"
    if token.kind is Kind.COMMA and not (calls and calls[-1]):
        return "a comma stands only between the arguments of a function"
    return ""


_SPELLING: Mapping[str, str] = {"&&": "and", "||": "or", "!": "~"}
"""`!` binds as tightly as `~`, which users can not write themselves."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Python text of an expression; `starts[i]` is the column of token i."""

    text: str
    starts: tuple[int, ...]


def placeholders(tokens: list[Token]) -> Placeholders:
    """The text for `ast.parse`, with `n<index>` for every name, quoted name and number."""
    words: list[str] = []
    starts: list[int] = []
    column = 0
    for index, token in enumerate(tokens):
        is_value = token.kind in _VALUES
        word = f"n{index}" if is_value else _SPELLING.get(token.text, token.text)
        words.append(word)
        starts.append(column)
        column += len(word) + 1
    return Placeholders(" ".join(words), tuple(starts))
