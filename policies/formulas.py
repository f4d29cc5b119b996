"""Conditions as formulas over what is measured, and whether one can hold at all.

An atom says where the value of one term lies: a name, or a longer expression by its text. A formula that
`contradictory` calls so holds for no values of its terms within their domains; what it can not decide within
its bound counts as possible. So what is built on it can miss something, and claims nothing that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

NEGATED: Mapping[str, str] = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_MAX_EXCLUDED = 16
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers that a term can be: an interval without some points. Closed where its ends are not open."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    whole: bool = False
    excluded: tuple[float, ...] = ()
    rounded: bool = False
    """The ends are rounded: what misses by a last digit may meet."""

    def meet(self, sign: str, value: float) -> Numbers | None:
        """Those for which a comparison holds; None when there is none."""
        low, high, low_open, high_open = self.low, self.high, self.low_open, self.high_open
        excluded = self.excluded
        if sign == "!=":
            if len(excluded) >= _MAX_EXCLUDED:
                return self
            excluded = (*excluded, value)
        if sign in ("<", "<=", "==") and (value < high or (value == high and sign == "<")):
            high, high_open = value, sign == "<"
        if sign in (">", ">=", "==") and (value > low or (value == low and sign == ">")):
            low, low_open = value, sign == ">"
        if self.whole:
            low, high = _whole_ends(low, high, low_open, high_open, excluded)
            low_open = high_open = False
        if low > high and not (self.rounded and low - high <= _CLOSE * max(abs(low), abs(high))):
            return None
        if low == high and (low_open or high_open or low in excluded):
            return None
        return Numbers(low, high, low_open, high_open, self.whole, excluded, self.rounded)


def _whole_ends(
    low: float, high: float, low_open: bool, high_open: bool, excluded: tuple[float, ...]
) -> tuple[float, float]:
    """The least and the largest whole number of an interval without some points."""
    if math.isfinite(low):
        low = math.floor(low) + 1 if low_open else math.ceil(low)
    if math.isfinite(high):
        high = math.ceil(high) - 1 if high_open else math.floor(high)
    for point in sorted(excluded):
        low = low + 1 if point == low else low
    for point in sorted(excluded, reverse=True):
        high = high - 1 if point == high else high
    return low, high


@dataclass(frozen=True, slots=True)
class Words:
    """Words that a term can be: all of some, or any; without others."""

    allowed: tuple[str, ...] | None = None
    refused: tuple[str, ...] = ()

    def meet(self, sign: str, value: str) -> Words | None:
        """Those for which `==` or `!=` holds; None when there is none."""
        if sign == "==":
            possible = value not in self.refused and (self.allowed is None or value in self.allowed)
            return Words((value,)) if possible else None
        if self.allowed is None:
            return replace(self, refused=(*self.refused, value)) if len(self.refused) < 64 else self
        left = tuple(word for word in self.allowed if word != value)
        return Words(left) if left else None


Domain: TypeAlias = Numbers | Words
BOOL = Numbers(0, 1, whole=True)
"""False is 0."""


@dataclass(frozen=True, slots=True)
class Atom:
    """`term sign value`."""

    term: str
    sign: str
    value: float | str
    domain: Domain
    """Where the term is anyway."""

    def negated(self) -> Atom:
        return Atom(self.term, NEGATED[self.sign], self.value, self.domain)


@dataclass(frozen=True, slots=True)
class All:
    """Every part holds; no part: true."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """At least one part holds; no part: false."""

    parts: tuple[Formula, ...]


Formula: TypeAlias = Atom | All | Some
TRUE = All(())
FALSE = Some(())


def truth(value: object) -> Formula:
    """A constant as a formula."""
    return TRUE if value else FALSE


def negate(formula: Formula) -> Formula:
    """`not formula`."""
    if isinstance(formula, Atom):
        return formula.negated()
    parts = tuple(negate(part) for part in formula.parts)
    return Some(parts) if isinstance(formula, All) else All(parts)


def terms(formula: Formula) -> list[str]:
    """Terms of the atoms, in the order of the text."""
    if isinstance(formula, Atom):
        return [formula.term]
    return [term for part in formula.parts for term in terms(part)]


class Budget:
    """Steps that reasoning may take; shared by all questions about one file."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def take(self) -> bool:
        """Whether there was one left."""
        self.steps -= 1
        return self.steps >= 0


MAX_STEPS = 6_000
"""Of one question; a step looks at one part of a formula."""
MAX_NESTED = 200


def contradictory(formulas: Sequence[Formula], budget: Budget) -> bool:
    """Whether no values of the terms make all formulas true. False also when that took too long."""
    steps = Budget(min(budget.steps, MAX_STEPS))
    before = steps.steps
    try:
        return not _possible(tuple(formulas), {}, steps, 0)
    finally:
        budget.steps -= before - max(0, steps.steps)


def implies(facts: Sequence[Formula], formula: Formula, budget: Budget) -> bool:
    """Whether the formula holds wherever all facts do, as far as that can be told."""
    return contradictory([*facts, negate(formula)], budget)


def _possible(pending: tuple[Formula, ...], known: Mapping[str, Domain], budget: Budget, nested: int) -> bool:
    """Whether the pending formulas can hold where each known term lies in its domain."""
    if nested > MAX_NESTED:
        return True
    domains = dict(known)
    choices: list[Some] = []
    stack = list(reversed(pending))
    while stack:
        formula = stack.pop()
        if not budget.take():
            return True
        if isinstance(formula, All):
            stack.extend(reversed(formula.parts))
        elif isinstance(formula, Some):
            if len(formula.parts) == 1:
                stack.append(formula.parts[0])
            else:
                choices.append(formula)
        elif not _narrow(domains, formula):
            return False
    if not choices:
        return True
    first = min(choices, key=lambda choice: len(choice.parts))
    others = tuple(choice for choice in choices if choice is not first)
    return any(_possible((part, *others), domains, budget, nested + 1) for part in first.parts)


def _narrow(domains: dict[str, Domain], atom: Atom) -> bool:
    """Add an atom to what is known; False when it contradicts it."""
    domain = domains.get(atom.term, atom.domain)
    met: Domain | None
    if isinstance(domain, Words):
        met = domain.meet(atom.sign, str(atom.value))
    else:
        assert not isinstance(atom.value, str), atom
        met = domain.meet(atom.sign, atom.value)
    if met is None:
        return False
    domains[atom.term] = met
    return True
