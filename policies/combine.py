"""What operators make of compiled parts: types checked, constants folded, the fastest closure chosen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from muxk.policies import closures
from muxk.policies.closures import Run
from muxk.policies.operators import BUILTINS, common, result
from muxk.policies.problems import RuleError, explain
from muxk.policies.terms import Code, Form, Term
from muxk.policies.units import Type, unit_hint

WRONG = Code(Type.ANY, closures.constant(0), Term(Form.LITERAL, "", Type.ANY, 0))
"""Stands for a part that is already reported."""

Complain = Callable[[int | None, str, str], Code]
"""Reports a message and a hint at an operand, or at the whole, and gives WRONG."""


def arithmetic(sign: str, left: Code, right: Code, offset: int, complain: Complain) -> Code:
    """`left + right` and the like."""
    if Type.ANY in (left.type, right.type):
        return WRONG
    type_ = result(sign, left.type, right.type)
    if type_ is None:
        message = f"{left.type.phrase} {sign} {right.type.phrase} has no meaning"
        return complain(1, message, unit_hint(left.type, right.type))
    if right.constant is not None:
        run = closures.ARITHMETIC_CONSTANT[sign](left.run, right.constant)
    else:
        run = closures.ARITHMETIC[sign](left.run, right.run)
    return _operator(sign, type_, run, [left, right], offset, complain)


def comparison(signs: list[str], codes: list[Code], offset: int, complain: Complain) -> Code:
    """`a < b`, or a chain of them."""
    for index, ((left, right), sign) in enumerate(zip(pairwise(codes), signs, strict=True), start=1):
        if message := _not_comparable(left.type, sign, right.type):
            return complain(index, message, unit_hint(left.type, right.type))
    if any(code.type is Type.ANY for code in codes):
        return WRONG
    code = _operator(signs[0], Type.BOOL, _compare_run(codes, signs), codes, offset, complain)
    if len(signs) == 1 or code is WRONG:
        return code
    links = [
        Term(Form.OPERATOR, sign, Type.BOOL, left.term.offset, (left.term, right.term))
        for (left, right), sign in zip(pairwise(codes), signs, strict=True)
    ]
    term = Term(Form.OPERATOR, "and", Type.BOOL, offset, tuple(links), code.constant)
    return Code(Type.BOOL, code.run, term, code.constant)


def _not_comparable(left: Type, sign: str, right: Type) -> str:
    """Why two types can not be compared, or empty."""
    if Type.ANY in (left, right):
        return ""
    if common(left, right) is None:
        return f"{left.phrase} can not be compared with {right.phrase}"
    if sign in ("==", "!="):
        return ""
    if left is Type.BOOL:
        return f"true and false have no order for '{sign}'"
    return f"names have no order for '{sign}'" if left is Type.NAME else ""


def _compare_run(codes: list[Code], signs: list[str]) -> Run:
    if len(signs) > 1:
        return closures.chain(codes[0].run, list(zip(signs, [code.run for code in codes[1:]], strict=True)))
    (left, right), sign = codes, signs[0]
    if right.constant is not None:
        return closures.COMPARE_CONSTANT[sign](left.run, right.constant)
    if left.constant is not None:
        return closures.COMPARE_CONSTANT[closures.MIRRORED[sign]](right.run, left.constant)
    return closures.COMPARE[sign](left.run, right.run)


def logic(word: str, codes: list[Code], offset: int, complain: Complain) -> Code:
    """`a and b`, `a or b`. Constants that decide nothing are left out; the first may decide all."""
    decides = word == "or"
    asked = [code for code in codes if code.constant is not (not decides)]
    if not asked or asked[0].constant is decides:
        return _known(word, decides if asked else not decides, codes, offset)
    if len(asked) == 1:
        run = asked[0].run
    else:
        build = closures.all_of if word == "and" else closures.any_of
        run = build([code.run for code in asked])
    return _operator(word, Type.BOOL, run, codes, offset, complain)


def _known(word: str, value: Any, codes: list[Code], offset: int) -> Code:
    parts = tuple(code.term for code in codes)
    term = Term(Form.OPERATOR, word, Type.BOOL, offset, parts, value)
    return Code(Type.BOOL, closures.constant(value), term, value)


def negation(word: str, code: Code, offset: int, complain: Complain) -> Code:
    """`not a` and `-a`."""
    if code.type is Type.ANY:
        return WRONG
    run = closures.invert(code.run) if word == "not" else closures.negate(code.run)
    return _operator(word, code.type, run, [code], offset, complain)


def choice(condition: Code, yes: Code, no: Code, offset: int, complain: Complain) -> Code:
    """`yes if condition else no`; only one side is left where the condition is constant."""
    if Type.ANY in (condition.type, yes.type, no.type):
        return WRONG
    type_ = common(yes.type, no.type)
    if type_ is None:
        message = f"one side of `if` is {yes.type.phrase}, the other {no.type.phrase}"
        return complain(2, message, unit_hint(yes.type, no.type))
    terms = (condition.term, yes.term, no.term)
    if condition.constant is None:
        run = closures.choose(condition.run, yes.run, no.run)
        return Code(type_, run, Term(Form.OPERATOR, "if", type_, offset, terms))
    side = yes if condition.constant else no
    return Code(
        type_, side.run, Term(Form.OPERATOR, "if", type_, offset, terms, side.constant), side.constant
    )


def builtin(name: str, arguments: list[Code], offset: int, complain: Complain) -> Code:
    """A function of every expression; its arguments are of a type that it takes, each by itself."""
    type_ = arguments[0].type
    for index, code in enumerate(arguments[1:], start=1):
        both = Type.ANY if Type.ANY in (type_, code.type) else common(type_, code.type)
        if both is None:
            message = f"an argument of {name} must be {type_.phrase}, not {code.type.phrase}"
            return complain(index, message, unit_hint(type_, code.type))
        type_ = both
    if type_ is Type.ANY:
        return WRONG
    run = BUILTINS[name].build([code.run for code in arguments])
    term = Term(Form.CALL, name, type_, offset, tuple(code.term for code in arguments))
    return _folded(Code(type_, run, term), arguments, complain)


def _operator(sign: str, type_: Type, run: Run, codes: list[Code], offset: int, complain: Complain) -> Code:
    term = Term(Form.OPERATOR, sign, type_, offset, tuple(code.term for code in codes))
    return _folded(Code(type_, run, term), codes, complain)


def _folded(code: Code, parts: list[Code], complain: Complain) -> Code:
    """The code as a constant when all its parts are."""
    if any(part.constant is None for part in parts):
        return code
    try:
        value = code.run(None)
    except (ArithmeticError, ValueError, RuleError) as error:
        return complain(None, explain(error), "")
    term = code.term
    return Code(
        code.type,
        closures.constant(value),
        Term(term.form, term.text, term.type, term.offset, term.parts, value),
        value,
    )
