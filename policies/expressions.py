"""Expressions of policies: checked once against the names of a decision point, compiled to closures.

The text is parsed by `ast` from placeholders (see `lexer.py`); the compiler (`compiler.py`) accepts ten kinds
of nodes, types each of them, folds constants and builds closures. Nothing is executed as Python code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muxk.policies.closures import Run
from muxk.policies.compiler import compile_root
from muxk.policies.marks import Scalar
from muxk.policies.problems import Report, RuleError
from muxk.policies.problems import explain as explain
from muxk.policies.terms import Term
from muxk.policies.units import Type
from muxk.policies.vocabulary import Name, Vocabulary


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression."""

    text: str
    type: Type
    run: Run
    """The bare closure, for hot paths; may raise any ArithmeticError, AttributeError or RuleError."""
    constant: Any
    """Its value if it depends on nothing, else None."""
    cost: int
    names: frozenset[str]
    """Names and functions of the decision point that it mentions."""
    tree: Term
    """What it was made of, checked."""
    reads: Mapping[str, Name]
    """How to read what it mentions: names, params, variables and calls of functions, by their text."""
    scalar: Scalar
    """Where it stands in the file."""
    quoted: tuple[str, ...] = ()
    """Names in quotes that it mentions."""
    descending: bool = False
    """For sort keys: the text was `-key`."""

    def __call__(self, scope: Any) -> Any:
        """The value for a scope.

        Raises:
            RuleError: there is none, and why.
        """
        try:
            return self.run(scope)
        except (ArithmeticError, AttributeError, ValueError) as error:
            raise RuleError(explain(error)) from error


def compile_expression(
    scalar: Scalar,
    wanted: Type | tuple[Type, ...],
    vocabulary: Vocabulary,
    report: Report,
    sort_key: bool = False,
) -> Expression | None:
    """Check and compile the text of a scalar; None when problems were reported.

    Args:
        wanted: the type that is needed, or those that will do; ANY takes every type.
        sort_key: a leading `-` over the whole text means descending, for moments too.
    """
    types = wanted if isinstance(wanted, tuple) else (wanted,)
    root = compile_root(scalar, tuple(Type) if Type.ANY in types else types, vocabulary, report, sort_key)
    if root is None:
        return None
    part, descending = root
    code = part.code
    return Expression(
        scalar.text,
        code.type,
        code.run,
        code.constant,
        part.cost,
        part.names,
        code.term,
        part.reads,
        scalar,
        part.quoted,
        descending,
    )
