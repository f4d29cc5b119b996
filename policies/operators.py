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
_N, _D, _M = Type.NUMBER, Type.DURATION, Type.MOMENT
RESULTS: Mapping[tuple[str, Type, Type], Type] = {
    ("+", _N, _N): _N, ("+", _D, _D): _D, ("+", _M, _D): _M, ("+", _D, _M): _M,
    ("-", _N, _N): _N, ("-", _D, _D): _D, ("-", _M, _D): _M, ("-", _M, _M): _D,
    ("*", _N, _N): _N, ("*", _D, _N): _D, ("*", _N, _D): _D,
    ("/", _N, _N): _N, ("/", _D, _D): _N, ("/", _D, _N): _D,
    ("//", _N, _N): _N, ("//", _D, _D): _N,
    ("%", _N, _N): _N, ("%", _D, _D): _D,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Builtin:
    """A function of every expression: how many arguments, of which type, all of the same."""

    least: int
    most: int
    types: tuple[Type, ...]
    build: Callable[[list[Run]], Run]


_ORDERED = (_N, _D, _M)
BUILTINS: Mapping[str, Builtin] = {
    "min": Builtin(2, 8, _ORDERED, closures.call_many(min)),
    "max": Builtin(2, 8, _ORDERED, closures.call_many(max)),
    "clamp": Builtin(3, 3, _ORDERED, closures.call_clamp),
    "abs": Builtin(1, 1, (_N, _D), closures.call_one(abs)),
    "ceil": Builtin(1, 1, (_N,), closures.call_one(math.ceil)),
    "floor": Builtin(1, 1, (_N,), closures.call_one(math.floor)),
}
BOOLS: Mapping[str, bool] = {"true": True, "True": True, "false": False, "False": False}
