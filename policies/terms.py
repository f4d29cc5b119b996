"""What is known of an expression, or of a part of it, once it was checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from muxk.policies.closures import Run
from muxk.policies.units import Type

if TYPE_CHECKING:
    from muxk.policies.vocabulary import Name


class Form(StrEnum):
    """What a term is."""

    LITERAL = "literal"
    """`text` is as written, such as `50ms`."""
    CONSTANT = "constant"
    """A param or an SLO."""
    NAME = "name"
    VARIABLE = "variable"
    """`parts` holds its term; offsets in there are of the variable's own text."""
    CALL = "call"
    """Of the function `text` with the arguments `parts`."""
    OPERATOR = "operator"
    """`text` is `and or not + - * / // % < <= > >= == !=` or `if` (condition, yes, no); `-` and `+` may have
    one part. `a < b <= c` is an `and` of two comparisons."""


@dataclass(frozen=True, slots=True)
class Term:
    """A checked part of an expression, for tools that reason about it."""

    form: Form
    text: str
    type: Type
    offset: int
    """Of its first character in the expression's text."""
    parts: tuple[Term, ...] = ()
    constant: Any = None
    """Its value when it depends on nothing, else None."""


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled part: its type, its closure, its value if it is constant, and what it was made of."""

    type: Type
    run: Run
    term: Term
    constant: Any = None


@dataclass(frozen=True, slots=True)
class Part:
    """A compiled text with all that an expression which uses it takes over."""

    code: Code
    cost: int
    names: frozenset[str]
    """Names and functions of the decision point that it mentions, those of its variables included."""
    reads: dict[str, Name]
    """How to read what it mentions, for who asks why: names, params, variables and calls, by their text."""
    quoted: tuple[str, ...]
    """Names in quotes."""
    foreign: tuple[str, ...]
    """Names that are not known in this place, though elsewhere; for variables only."""
    wrong: bool
    """It has mistakes, which are reported at its text."""
