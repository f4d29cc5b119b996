"""Expressions agree with CEL, as Google's C++ implementation reads it, where the two languages say the same.

The common subset: literals and names that are doubles, booleans or texts; `+ - * /`, unary `-`,
`min max abs`; all comparisons of numbers, `== !=` of booleans and texts; `and or not`, spelled either way;
conditionals. Every number is a double on both sides, so values are compared bit for bit.

Outside of it, because the languages differ on purpose: whole numbers and their `// %` (CEL has 64-bit
integers that never mix with doubles, and truncates), `ceil floor` (whole here), chained comparisons, units,
`fewest`, and the functions and values of decision points. Two differences inside are part of the expectation:

- CEL lets a double become infinite or NaN and goes on; here the rule fails at the first result beyond 1e100.
- CEL's `&&` and `||` absorb an error on one side when the other side decides; here they are read from left to
  right, as Python does, and an error on the side that is read ends the rule.

A constant part that can only fail is refused when the policy is compiled, whether it would be reached or not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from cel_expr_python import cel
from cel_expr_python.ext import ext_math
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.kernel.estimates import Estimates
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, View
from muxk.kernel.work import Split
from muxk.policies.expressions import Expression, compile_expression
from muxk.policies.marks import Scalar, Style
from muxk.policies.names import DecideScope, vocabulary
from muxk.policies.problems import Report, RuleError, Source
from muxk.policies.units import Type

LARGEST = 1e100
NUMBERS = ("units.total", "queue.requests", "queue.tokens", "kv.free", "decode.batch", "running.pairs")
ABSENT = "candidate.pairs"
BOOLS = ("decode.waiting", "decode.in_flight")
TRUTHS = ("true", "false")
VALUES = (0.0, 0.0, 0.5, 0.5, 1.5, 1.5, -1.5, 2.25, 1e-30, 1e99, 7e8)
PLACE = "slice"


@dataclass(frozen=True)
class Tree:
    """One expression in both spellings."""

    ours: str
    cel: str
    parts: tuple[Tree, ...] = ()
    operator: str = ""
    constant: bool = False


def leaf(ours: str, cel: str = "", constant: bool = False) -> Tree:
    return Tree(ours, cel or ours, constant=constant)


def branch(ours: str, cel: str, operator: str) -> Callable[..., Tree]:
    """A tree from templates with {0}, {1} ... for its parts."""

    def make(*parts: Tree) -> Tree:
        return Tree(
            ours.format(*(part.ours for part in parts)),
            cel.format(*(part.cel for part in parts)),
            parts,
            operator,
            all(part.constant for part in parts),
        )

    return make


def both(template: str, operator: str) -> Callable[..., Tree]:
    return branch(template, template, operator)


NUMBER_LEAVES = (
    *(leaf(name) for name in (*NUMBERS, *NUMBERS, ABSENT)),
    *(leaf(literal, constant=True) for literal in ("0.1", "0.5", "1.5", "2.25")),
)
BOOL_LEAVES = (*(leaf(name) for name in (*BOOLS, *BOOLS)), *(leaf(word, constant=True) for word in TRUTHS))
TEXTS = tuple(leaf(text, constant=True) for text in ("'a'", "'b'", '"a"'))
ARITHMETIC = tuple(both(f"({{0}} {sign} {{1}})", sign) for sign in "+-*/")
UNARY = (both("(-{0})", "unary"), branch("abs({0})", "math.abs({0})", "unary"))
MANY = (
    branch("min({0}, {1})", "math.least({0}, {1})", "many"),
    branch("max({0}, {1})", "math.greatest({0}, {1})", "many"),
)
COMPARISONS = tuple(both(f"({{0}} {sign} {{1}})", "compare") for sign in ("<", "<=", ">", ">=", "==", "!="))
EQUALITY = (both("({0} == {1})", "compare"), both("({0} != {1})", "compare"))
LOGIC = (
    branch("({0} and {1})", "({0} && {1})", "and"), both("({0} && {1})", "and"),
    branch("({0} or {1})", "({0} || {1})", "or"), both("({0} || {1})", "or"),
)  # fmt: skip
NOTS = (branch("(not {0})", "(!{0})", "not"), both("(!{0})", "not"))
CHOICE = branch("({1} if {0} else {2})", "({0} ? {1} : {2})", "choice")


class Generator:
    """Draws evenly: a strategy that shrinks draws the same small parts again and again."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, depth: int) -> Tree:
        if depth == 0:
            return self._random.choice(NUMBER_LEAVES)
        kind = self._random.randrange(8)
        if kind < 5:
            return self._random.choice(ARITHMETIC)(self._some_number(depth), self._some_number(depth))
        if kind == 5:
            return self._random.choice(UNARY)(self.number(depth - 1))
        if kind == 6:
            return self._random.choice(MANY)(self._some_number(depth), self._some_number(depth))
        return CHOICE(self.bool(depth - 1), self._some_number(depth), self._some_number(depth))

    def bool(self, depth: int) -> Tree:
        if depth == 0:
            return self._random.choice(BOOL_LEAVES)
        kind = self._random.randrange(10)
        if kind < 4:
            return self._random.choice(COMPARISONS)(self._some_number(depth), self._some_number(depth))
        if kind < 7:
            return self._random.choice(LOGIC + EQUALITY)(self.bool(depth - 1), self.bool(depth - 1))
        if kind == 7:
            return self._random.choice(EQUALITY)(self._random.choice(TEXTS), self._random.choice(TEXTS))
        if kind == 8:
            return self._random.choice(NOTS)(self.bool(depth - 1))
        return CHOICE(self.bool(depth - 1), self.bool(depth - 1), self.bool(depth - 1))

    def _some_number(self, depth: int) -> Tree:
        return self.number(self._random.randrange(depth))

    def bindings(self) -> dict[str, Any]:
        """Values that are often equal, or 0, so that every operator matters."""
        numbers = {name: self._random.choice(VALUES) for name in NUMBERS}
        return {**numbers, **{name: self._random.random() < 0.5 for name in BOOLS}}


ENVIRONMENT = cel.NewEnv(
    variables={
        **dict.fromkeys((*NUMBERS, ABSENT), cel.Type.DOUBLE),
        **dict.fromkeys(BOOLS, cel.Type.BOOL),
    },
    extensions=[ext_math.ExtMath()],
)


def view_of(bound: Mapping[str, Any]) -> View:
    """A view that holds doubles where a server has whole numbers; nobody waits, so a candidate is absent."""
    batch = PrefillView(1, 1, 1, 0, bound["running.pairs"], 0, 0, 0, 0, 0)
    decode = DecodeView(bound["decode.batch"], 0, bound["decode.waiting"], bound["decode.in_flight"], 0)
    queue = QueueView(bound["queue.requests"], bound["queue.tokens"])
    view = View(
        0,
        4,
        (),
        Split(4, 4),
        4,
        decode,
        batch,
        None,
        None,
        0,
        queue,
        KvView(9, bound["kv.free"]),
        Estimates(),
    )
    return msgspec.structs.replace(view, units_total=bound["units.total"])


def compiled(text: str) -> Expression | None:
    report = Report()
    scalar = Scalar(text, Style.PLAIN, Source("p", text).mark(0), 0, len(text))
    return compile_expression(scalar, Type.ANY, vocabulary(PLACE, {}), report)


@cache
def in_cel(text: str) -> cel.Expression:
    return ENVIRONMENT.compile(text)


class Failed(Exception):
    """The expectation is that the rule fails."""


def expected(tree: Tree, bound: Mapping[str, Any]) -> Any:
    """What CEL makes of it, read from left to right without absorbing errors, and with our bound."""
    if tree.operator in ("and", "or"):
        first, second = tree.parts
        decided = expected(first, bound) == (tree.operator == "or")
        if not decided:
            expected(second, bound)
    elif tree.operator == "choice":
        condition, then, otherwise = tree.parts
        expected(then if expected(condition, bound) else otherwise, bound)
    else:
        for part in tree.parts:
            expected(part, bound)
    value = in_cel(tree.cel).eval(data=bound)
    if value.type() == cel.Type.ERROR:
        raise Failed
    result = value.value()
    if isinstance(result, float) and not isinstance(result, bool) and not abs(result) < LARGEST:
        raise Failed
    return result


def has_a_constant_that_fails(tree: Tree, bound: Mapping[str, Any]) -> bool:
    if tree.constant:
        try:
            expected(tree, bound)
        except Failed:
            return True
    return any(has_a_constant_that_fails(part, bound) for part in tree.parts)


def check(tree: Tree, bound: Mapping[str, Any]) -> None:
    """Every part by itself, small ones first, so that a difference is told where it begins."""
    for part in tree.parts:
        check(part, bound)
    expression = compiled(tree.ours)
    if expression is None:
        assert has_a_constant_that_fails(tree, bound), tree.ours
        return
    try:
        wanted = expected(tree, bound)
    except Failed:
        wanted = Failed
    try:
        found: Any = expression(DecideScope(view_of(bound)))
    except RuleError:
        found = Failed
    assert (type(found), found) == (type(wanted), wanted), (tree.ours, bound)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**64 - 1))
def test_expressions_of_the_common_subset_have_the_value_that_cel_gives_them(seed: int) -> None:
    generator = Generator(seed)
    tree = generator.number(3) if seed % 2 else generator.bool(4)
    check(tree, generator.bindings())


def test_cel_and_we_differ_where_the_docstring_says_so() -> None:
    bound: dict[str, Any] = {**dict.fromkeys(NUMBERS, 0.0), **dict.fromkeys(BOOLS, True)}
    scope = DecideScope(view_of(bound))
    for ours, theirs in (
        ("1.5 / units.total > 2.0", True),
        ("candidate.pairs > 1.0 || decode.waiting", True),
        ("candidate.pairs > 1.0 && !decode.waiting", False),
    ):
        assert ENVIRONMENT.compile(ours).eval(data=bound).value() is theirs
        expression = compiled(ours)
        assert expression is not None
        try:
            value = expression(scope)
        except RuleError:
            value = None
        assert value is None
    assert math.isinf(ENVIRONMENT.compile("1.5 / units.total").eval(data=bound).value())
