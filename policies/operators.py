"""Operators and built-in functions of expressions: what they take and what they give."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muxk.policies import closures
from muxk.policies.closures import Run
from muxk.policies.units import Type

SIGNS: Mapping[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_N, _D, _M, _S, _P = Type.NUMBER, Type.DURATION, Type.MOMENT, Type.SIZE, Type.PERCENT
_RESULTS: Mapping[tuple[str, Type, Type], Type] = {
    ("+", _N, _N): _N, ("+", _D, _D): _D, ("+", _M, _D): _M, ("+", _D, _M): _M, ("+", _S, _S): _S,
    ("-", _N, _N): _N, ("-", _D, _D): _D, ("-", _M, _D): _M, ("-", _M, _M): _D, ("-", _S, _S): _S,
    ("*", _N, _N): _N, ("*", _D, _N): _D, ("*", _N, _D): _D, ("*", _S, _N): _S, ("*", _N, _S): _S,
    ("/", _N, _N): _N, ("/", _D, _D): _N, ("/", _D, _N): _D, ("/", _S, _S): _N, ("/", _S, _N): _S,
    ("//", _N, _N): _N, ("//", _D, _D): _N, ("//", _S, _S): _N,
    ("%", _N, _N): _N, ("%", _D, _D): _D, ("%", _S, _S): _S,
}  # fmt: skip
_OF_PERCENTAGES: Mapping[tuple[str, Type, Type], Type] = {
    ("+", _P, _P): _P, ("-", _P, _P): _P, ("*", _P, _P): _P, ("%", _P, _P): _P,
}  # fmt: skip


def result(sign: str, left: Type, right: Type) -> Type | None:
    """Type of `left sign right`, or None where it has no meaning. A percentage counts as a number."""
    found = _OF_PERCENTAGES.get((sign, left, right)) or _RESULTS.get((sign, left, right))
    if found is None and _P in (left, right):
        found = _RESULTS.get((sign, _as_number(left), _as_number(right)))
    return found


def _as_number(type_: Type) -> Type:
    return _N if type_ is _P else type_


def common(left: Type, right: Type) -> Type | None:
    """The type that both can stand for, or None: numbers and percentages mix, no others do."""
    if left is right:
        return left
    return _N if {left, right} == {_N, _P} else None


@dataclass(frozen=True, slots=True)
class Builtin:
    """A function of every expression: how many arguments, of which type, all of the same."""

    least: int
    most: int
    types: tuple[Type, ...]
    build: Callable[[list[Run]], Run]
    about: str
    """One line for people."""


_ORDERED = (_N, _D, _M, _S, _P)
BUILTINS: Mapping[str, Builtin] = {
    "min": Builtin(2, 8, _ORDERED, closures.call_many(min), "the least of 2 to 8 values"),
    "max": Builtin(2, 8, _ORDERED, closures.call_many(max), "the largest of 2 to 8 values"),
    "clamp": Builtin(3, 3, _ORDERED, closures.call_clamp, "clamp(x, low, high): x within bounds"),
    "abs": Builtin(1, 1, (_N, _D, _S, _P), closures.call_one(abs), "without its sign"),
    "ceil": Builtin(1, 1, (_N,), closures.call_one(math.ceil), "rounded up to a whole number"),
    "floor": Builtin(1, 1, (_N,), closures.call_one(math.floor), "rounded down to a whole number"),
}
BOOLS: Mapping[str, bool] = {"true": True, "True": True, "false": False, "False": False}
