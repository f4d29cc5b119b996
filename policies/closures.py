"""Closures of the operators. Each takes the scope of a decision and returns a value.

Leaves are `operator.attrgetter`, which runs in C; an operator adds one Python frame. Variants for a constant
operand save a call. Arithmetic checks its result; infinity and NaN fail the comparison as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from muxk.policies.problems import RuleError

Run = Callable[[Any], Any]
"""A compiled expression: from the scope of a decision to a number or a bool."""


LARGEST = 1e100
LEAST = -LARGEST
"""Results stay between, whole numbers too: nothing that is measured comes near."""


def overflow() -> NoReturn:
    """Raise what a result that is no finite number means."""
    raise RuleError("the result is too large or not a number")


def constant(value: Any) -> Run:
    """A closure that returns one value."""
    return lambda scope: value


COMPARE: Mapping[str, Callable[[Run, Run], Run]] = {
    "<": lambda a, b: lambda s: a(s) < b(s),
    "<=": lambda a, b: lambda s: a(s) <= b(s),
    ">": lambda a, b: lambda s: a(s) > b(s),
    ">=": lambda a, b: lambda s: a(s) >= b(s),
    "==": lambda a, b: lambda s: a(s) == b(s),
    "!=": lambda a, b: lambda s: a(s) != b(s),
}
COMPARE_CONSTANT: Mapping[str, Callable[[Run, Any], Run]] = {
    "<": lambda a, c: lambda s: a(s) < c,
    "<=": lambda a, c: lambda s: a(s) <= c,
    ">": lambda a, c: lambda s: a(s) > c,
    ">=": lambda a, c: lambda s: a(s) >= c,
    "==": lambda a, c: lambda s: a(s) == c,
    "!=": lambda a, c: lambda s: a(s) != c,
}
COMPARE_VALUES: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
    "==": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
}
MIRRORED: Mapping[str, str] = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}

ARITHMETIC: Mapping[str, Callable[[Run, Run], Run]] = {
    "+": lambda a, b: lambda s: v if LEAST < (v := a(s) + b(s)) < LARGEST else overflow(),
    "-": lambda a, b: lambda s: v if LEAST < (v := a(s) - b(s)) < LARGEST else overflow(),
    "*": lambda a, b: lambda s: v if LEAST < (v := a(s) * b(s)) < LARGEST else overflow(),
    "/": lambda a, b: lambda s: v if LEAST < (v := a(s) / b(s)) < LARGEST else overflow(),
    "//": lambda a, b: lambda s: v if LEAST < (v := a(s) // b(s)) < LARGEST else overflow(),
    "%": lambda a, b: lambda s: v if LEAST < (v := a(s) % b(s)) < LARGEST else overflow(),
}
ARITHMETIC_CONSTANT: Mapping[str, Callable[[Run, Any], Run]] = {
    "+": lambda a, c: lambda s: v if LEAST < (v := a(s) + c) < LARGEST else overflow(),
    "-": lambda a, c: lambda s: v if LEAST < (v := a(s) - c) < LARGEST else overflow(),
    "*": lambda a, c: lambda s: v if LEAST < (v := a(s) * c) < LARGEST else overflow(),
    "/": lambda a, c: lambda s: v if LEAST < (v := a(s) / c) < LARGEST else overflow(),
    "//": lambda a, c: lambda s: v if LEAST < (v := a(s) // c) < LARGEST else overflow(),
    "%": lambda a, c: lambda s: v if LEAST < (v := a(s) % c) < LARGEST else overflow(),
}


def negate(a: Run) -> Run:
    """`-a`."""
    return lambda s: -a(s)


def invert(a: Run) -> Run:
    """`not a`."""
    return lambda s: not a(s)


def choose(condition: Run, a: Run, b: Run) -> Run:
    """`a if condition else b`."""
    return lambda s: a(s) if condition(s) else b(s)


def all_of(parts: list[Run]) -> Run:
    """`a and b and ...`; two and three parts, the usual ones, without a nested call."""
    if len(parts) == 2:
        a, b = parts
        return lambda s: a(s) and b(s)
    if len(parts) == 3:
        a, b, c = parts
        return lambda s: a(s) and b(s) and c(s)
    a, b, rest = parts[0], parts[1], all_of(parts[2:])
    return lambda s: a(s) and b(s) and rest(s)


def any_of(parts: list[Run]) -> Run:
    """`a or b or ...`."""
    if len(parts) == 2:
        a, b = parts
        return lambda s: a(s) or b(s)
    if len(parts) == 3:
        a, b, c = parts
        return lambda s: a(s) or b(s) or c(s)
    a, b, rest = parts[0], parts[1], any_of(parts[2:])
    return lambda s: a(s) or b(s) or rest(s)


def chain(first: Run, links: list[tuple[str, Run]]) -> Run:
    """`a < b <= c`: each operand is computed once, and none after the first comparison that fails."""
    steps = [(COMPARE_VALUES[sign], run) for sign, run in links]

    def run_chain(scope: Any) -> bool:
        left = first(scope)
        for compare, operand in steps:
            right = operand(scope)
            if not compare(left, right):
                return False
            left = right
        return True

    return run_chain


def call_one(function: Callable[[Any], Any]) -> Callable[[list[Run]], Run]:
    """A function of one argument."""

    def build(arguments: list[Run]) -> Run:
        (a,) = arguments
        return lambda s: function(a(s))

    return build


def call_scoped(function: Callable[..., Any], arguments: list[Run]) -> Run:
    """A function of the scope and one or two arguments."""
    if len(arguments) == 1:
        (only,) = arguments
        return lambda s: function(s, only(s))
    a, b = arguments
    return lambda s: function(s, a(s), b(s))


def call_many(function: Callable[..., Any]) -> Callable[[list[Run]], Run]:
    """`min` and `max`."""

    def build(arguments: list[Run]) -> Run:
        if len(arguments) == 2:
            a, b = arguments
            return lambda s: function(a(s), b(s))
        return lambda s: function([argument(s) for argument in arguments])

    return build


def call_clamp(arguments: list[Run]) -> Run:
    """`clamp(x, low, high)`; high wins when the bounds cross."""
    x, low, high = arguments
    return lambda s: min(max(x(s), low(s)), high(s))
