"""From a checked condition to a formula (see `formulas.py`): what it says of which values.

A comparison with a constant says where a value lies; one of two values says how they are ordered, or where
their quotient lies. What is not understood stays one value by its text, bounded where its parts are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from muxk.policies import closures
from muxk.policies.formulas import BOOL, All, Atom, Domain, Formula, Numbers, Some, Words, negate, truth
from muxk.policies.operators import BUILTINS
from muxk.policies.problems import RuleError
from muxk.policies.terms import Form, Term
from muxk.policies.units import Type

ANYWHERE = Numbers()


@dataclass(frozen=True, slots=True)
class Value:
    """What is no formula; `constant` is there when it is known."""

    key: str
    domain: Domain
    constant: float | str | None = None
    multiple: tuple[float, Value] | None = None
    """Factor and value of `0.9 * slo.tbt`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of names, whatever is measured."""

    domain: Callable[[Term], Domain]
    """Where a name, a constant or the result of a function lies."""
    at_most: Mapping[tuple[str, str], float]
    """For two names, what the first is at most when divided by the second."""
    fixed: bool
    """Whether params and SLOs have the values in force; else any that they may have."""
    options: Collection[str] = ()
    """Params that may have any value nevertheless, as `params.name`."""


def formula_of(term: Term, facts: Facts) -> Formula | None:
    """What a condition says, or None where that is not understood."""
    try:
        return _Reader(facts).formula(term)
    except (_NotUnderstood, RecursionError, ArithmeticError):
        return None


class _NotUnderstood(Exception):
    """Nothing can be said of this term."""


class _Reader:
    """Reads the terms of one condition."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def formula(self, term: Term) -> Formula:
        """What a part that is true or false says."""
        if term.form is Form.VARIABLE:
            return self.formula(term.parts[0])
        if self._known(term):
            return truth(term.constant)
        if term.form is not Form.OPERATOR:
            return Atom(term.text, "==", 1, BOOL)
        if term.text in ("and", "or"):
            parts = tuple(self.formula(part) for part in term.parts)
            return All(parts) if term.text == "and" else Some(parts)
        if term.text == "not":
            return negate(self.formula(term.parts[0]))
        if term.text == "if":
            test, yes, no = (self.formula(part) for part in term.parts)
            return Some((All((test, yes)), All((negate(test), no))))
        if term.text in closures.COMPARE_VALUES:
            return self._comparison(term)
        raise _NotUnderstood

    def _known(self, term: Term) -> bool:
        """Whether the constant of a term may be used: that of a literal, or of a param as it is set now."""
        if term.constant is None:
            return False
        return term.form is Form.LITERAL or (self._facts.fixed and not self._open(term))

    def _open(self, term: Term) -> bool:
        """Whether a term depends on a param that may have any value."""
        is_option = term.form is Form.CONSTANT and term.text in self._facts.options
        return is_option or any(self._open(part) for part in term.parts)

    def _comparison(self, term: Term) -> Formula:
        first, second = term.parts
        if Type.BOOL in (first.type, second.type):
            left, right = self.formula(first), self.formula(second)
            same = Some((All((left, right)), All((negate(left), negate(right)))))
            return same if term.text == "==" else negate(same)
        return self._compared(self.value(first), term.text, self.value(second))

    def _compared(self, left: Value, sign: str, right: Value) -> Formula:
        if left.constant is not None and right.constant is not None:
            return truth(closures.COMPARE_VALUES[sign](left.constant, right.constant))
        if right.constant is not None:
            return Atom(left.key, sign, right.constant, left.domain)
        if left.constant is not None:
            return Atom(right.key, closures.MIRRORED[sign], left.constant, right.domain)
        if isinstance(left.domain, Words) or isinstance(right.domain, Words):
            first, second = sorted((left.key, right.key))
            equal = Atom(f"{first} == {second}", "==", 1, BOOL)
            return equal if sign == "==" else negate(equal)
        return self._ordered(left, sign, right)

    def _ordered(self, left: Value, sign: str, right: Value) -> Formula:
        """Where the quotient of two lies if the divisor is positive, else the sign of their difference."""
        if left.key == right.key:
            return truth(closures.COMPARE_VALUES[sign](0, 0))
        if left.multiple is not None or (right.multiple is None and left.key > right.key):
            left, right, sign = right, left, closures.MIRRORED[sign]
        factor, divisor = right.multiple or (1.0, right)
        domain = self._quotient(left, divisor)
        if domain is not None and factor > 0 and left.multiple is None:
            return Atom(f"{left.key} : {divisor.key}", sign, factor, domain)
        return Atom(f"{left.key} <> {right.key}", sign, 0, _difference(left.domain, right.domain))

    def _quotient(self, left: Value, divisor: Value) -> Numbers | None:
        """Where `left / divisor` lies, or None where the divisor may be 0 or less."""
        above, below = left.domain, divisor.domain
        if not isinstance(below, Numbers) or not isinstance(above, Numbers):
            return None
        if below.low < 0 or (below.low == 0 and not below.low_open):
            return None
        low = 0.0 if above.low >= 0 else -math.inf
        return Numbers(low, self._facts.at_most.get((left.key, divisor.key), math.inf), rounded=True)

    def value(self, term: Term) -> Value:
        """A part that is a number, a time, a size or a name."""
        if term.form is Form.VARIABLE:
            return self.value(term.parts[0])
        if self._known(term):
            return _constant(term.constant)
        if term.form is Form.CALL:
            return self._call(term, [self.value(part) for part in term.parts])
        if term.form is not Form.OPERATOR:
            return Value(term.text, self._facts.domain(term))
        if term.text == "if":
            yes, no = self.value(term.parts[1]), self.value(term.parts[2])
            test = self.formula(term.parts[0])
            return Value(f"({yes.key} if {test!r} else {no.key})", _hull(yes.domain, no.domain))
        if len(term.parts) == 1:
            operand = self.value(term.parts[0])
            return operand if term.text == "+" else _negative(operand)
        left, right = (self.value(part) for part in term.parts)
        return _arithmetic(term.text, left, right)

    def _call(self, term: Term, arguments: list[Value]) -> Value:
        key = f"{term.text}({', '.join(argument.key for argument in arguments)})"
        if term.text not in BUILTINS:
            return Value(key, self._facts.domain(term))
        constants = [argument.constant for argument in arguments if argument.constant is not None]
        if len(constants) == len(arguments):
            run = BUILTINS[term.text].build([closures.constant(value) for value in constants])
            return _constant(run(None))
        return Value(key, _of_builtin(term.text, [_numbers(argument.domain) for argument in arguments]))


def _numbers(domain: Domain) -> Numbers:
    return domain if isinstance(domain, Numbers) else ANYWHERE


def _constant(value: float | str) -> Value:
    if isinstance(value, str):
        return Value(repr(value), Words((value,)), value)
    return Value(repr(value), Numbers(value, value, whole=float(value).is_integer()), value)


def _negative(value: Value) -> Value:
    if isinstance(value.constant, int | float):
        return _constant(-value.constant)
    domain = _numbers(value.domain)
    return Value(f"-{value.key}", Numbers(-domain.high, -domain.low, whole=domain.whole))


def _arithmetic(sign: str, left: Value, right: Value) -> Value:
    if left.constant is not None and right.constant is not None:
        run = closures.ARITHMETIC[sign](closures.constant(left.constant), closures.constant(right.constant))
        try:
            return _constant(run(None))
        except RuleError:
            raise _NotUnderstood from None
    keys = sorted((left.key, right.key)) if sign in ("+", "*") else [left.key, right.key]
    domain = _result(sign, _numbers(left.domain), _numbers(right.domain))
    value = Value(f"({keys[0]} {sign} {keys[1]})", domain)
    if sign != "*" or not (left.constant or right.constant):
        return value
    factor, divisor = (left.constant, right) if left.constant is not None else (right.constant, left)
    return replace(value, multiple=(factor, divisor)) if isinstance(factor, int | float) else value


def _result(sign: str, left: Numbers, right: Numbers) -> Numbers:
    """Where the result lies; computed as the engine computes it, and rounding keeps order."""
    whole = left.whole and right.whole
    if sign == "+":
        return _closed([left.low + right.low], [left.high + right.high], whole)
    if sign == "-":
        return _closed([left.low - right.high], [left.high - right.low], whole)
    if sign == "*":
        ends = [_product(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
        return _closed(ends, ends, whole)
    if sign in ("/", "//") and left.low >= 0 and right.low >= 0:
        return Numbers(0, math.inf, whole=whole and sign == "//")
    if sign == "%" and right.low >= 0:
        return Numbers(0, right.high, whole=whole)
    return ANYWHERE


def _product(a: float, b: float) -> float:
    return 0.0 if 0 in (a, b) else a * b


def _closed(lows: list[float], highs: list[float], whole: bool) -> Numbers:
    if any(math.isnan(end) for end in (*lows, *highs)):
        return ANYWHERE
    return Numbers(min(lows), max(highs), whole=whole)


def _of_builtin(name: str, domains: list[Numbers]) -> Numbers:
    lows, highs = [domain.low for domain in domains], [domain.high for domain in domains]
    whole = all(domain.whole for domain in domains)
    if name == "min":
        return Numbers(min(lows), min(highs), whole=whole)
    if name == "max":
        return Numbers(max(lows), max(highs), whole=whole)
    if name == "clamp":
        return Numbers(min(max(lows[0], lows[1]), lows[2]), highs[2], whole=whole)
    if name == "abs":
        return Numbers(0, math.inf, whole=whole)
    low, high = (_rounded(name, end) for end in (lows[0], highs[0]))
    return Numbers(low, high, whole=True)


def _rounded(name: str, value: float) -> float:
    if math.isinf(value):
        return value
    return math.ceil(value) if name == "ceil" else math.floor(value)


def _hull(left: Domain, right: Domain) -> Domain:
    if isinstance(left, Words) or isinstance(right, Words):
        return Words()
    return Numbers(min(left.low, right.low), max(left.high, right.high), whole=left.whole and right.whole)


def _difference(left: Domain, right: Domain) -> Numbers:
    """The sign of `left - right`: -1, 0 or 1."""
    a, b = _numbers(left), _numbers(right)
    low = -1 if a.low < b.high else 0 if a.low == b.high else 1
    high = 1 if a.high > b.low else 0 if a.high == b.low else -1
    return Numbers(min(low, high), max(low, high), whole=True)
