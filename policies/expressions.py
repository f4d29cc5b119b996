"""Expressions of policies: checked once against the names of a decision point, compiled to closures.

The text is parsed by `ast` from placeholders (see `lexer.py`); the compiler below accepts ten node kinds,
types each of them, folds constants and builds closures. Nothing is evaluated or executed as Python code.
"""

from __future__ import annotations

import ast
import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from muxk.policies import closures
from muxk.policies.closures import Run
from muxk.policies.lexer import Token, placeholders, tokenize
from muxk.policies.marks import Scalar
from muxk.policies.operators import BOOLS, BUILTINS, RESULTS, SIGNS
from muxk.policies.problems import ABSENT, Report, RuleError, did_you_mean
from muxk.policies.units import Type, UnitError, parse_quantity
from muxk.policies.vocabulary import Constant, Function, Vocabulary

MAX_DEPTH = 64
MAX_COST = 400
"""One operator or name costs 1, a function of a decision point what it declares."""


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


def explain(error: Exception) -> str:
    """A fault of an expression in words."""
    if isinstance(error, ZeroDivisionError):
        return "division by zero"
    if isinstance(error, ArithmeticError):
        return "the result is too large or not a number"
    if isinstance(error, AttributeError) and error.obj is None:
        return f"a value is absent ({error.name}): {ABSENT}"
    return str(error) or type(error).__name__


def compile_expression(
    scalar: Scalar, wanted: Type, vocabulary: Vocabulary, report: Report, sort_key: bool = False
) -> Expression | None:
    """Check and compile the text of a scalar; None when problems were reported.

    Args:
        wanted: the type that is needed; ANY takes every type.
        sort_key: a leading `-` over the whole text means descending, for moments too.
    """
    tokens = tokenize(scalar.text, _complain_at(scalar, report)) if scalar.text.strip() else []
    if not tokens:
        if not scalar.text.strip():
            report.add(scalar.mark, "an expression is missing")
        return None
    compiler = _Compiler(scalar, tokens, vocabulary, report)
    try:
        return compiler.expression(wanted, sort_key)
    except _Stop:
        return None
    except (RecursionError, MemoryError):
        report.add(scalar.mark, "the expression is nested too deeply")
        return None


def _complain_at(scalar: Scalar, report: Report) -> Callable[[int, str, str], None]:
    return lambda offset, message, hint: report.add(scalar.mark_at(offset), message, hint)


class _Stop(Exception):
    """The expression can not be compiled further; the problem is in the report."""


@dataclass(frozen=True, slots=True)
class _Code:
    """A compiled part: its type, its closure, and its value if it is constant."""

    type: Type
    run: Run
    constant: Any = None


_WRONG = _Code(Type.ANY, closures.constant(0))


class _Compiler:
    """One pass over the tree of one expression."""

    def __init__(self, scalar: Scalar, tokens: list[Token], vocabulary: Vocabulary, report: Report) -> None:
        self._scalar = scalar
        self._tokens = tokens
        self._python = placeholders(tokens)
        self._vocabulary = vocabulary
        self._report = report
        self._cost = 0
        self._names: set[str] = set()
        self._wrong = False

    def expression(self, wanted: Type, sort_key: bool) -> Expression | None:
        """The whole text."""
        root = self._parse()
        descending = sort_key and isinstance(root, ast.UnaryOp) and isinstance(root.op, ast.USub)
        code = self._visit(root.operand if descending and isinstance(root, ast.UnaryOp) else root, 0)
        self._want(code, (wanted,) if wanted is not Type.ANY else tuple(Type), root)
        if self._cost > MAX_COST:
            self._problem(
                root, f"the expression costs {self._cost}, more than {MAX_COST}", "split it into rules"
            )
        if self._wrong:
            return None
        names = frozenset(self._names)
        return Expression(
            self._scalar.text, code.type, code.run, code.constant, self._cost, names, descending
        )

    def _parse(self) -> ast.expr:
        try:
            return ast.parse(self._python.text, mode="eval").body
        except SyntaxError as error:
            token = self._token_at(max(0, (error.offset or 1) - 1))
            hint = "every `if` needs an `else`; put parentheses around a part with `not`"
            mark = self._scalar.mark_at(token.offset)
            self._report.add(mark, f"the expression can not be read at '{token.text[:40]}'", hint)
            raise _Stop from None

    def _token_at(self, column: int) -> Token:
        return self._tokens[max(0, bisect.bisect_right(self._python.starts, column) - 1)]

    def _problem(self, node: ast.expr, message: str, hint: str = "") -> _Code:
        self._wrong = True
        offset = self._token_at(node.col_offset).offset
        self._report.add(self._scalar.mark_at(offset), message, hint)
        return _WRONG

    def _visit(self, node: ast.expr, depth: int) -> _Code:
        self._cost += 1
        if depth > MAX_DEPTH:
            self._problem(
                node, "the expression is nested too deeply", "use parentheses, or split it into rules"
            )
            raise _Stop
        if isinstance(node, ast.Name):
            return self._leaf(node)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node, depth)
        if isinstance(node, ast.Compare):
            return self._compare(node, depth)
        if isinstance(node, ast.BoolOp):
            return self._logic(node, depth)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node, depth)
        if isinstance(node, ast.IfExp):
            return self._choice(node, depth)
        return self._problem(node, "this is not part of the language")

    def _want(self, code: _Code, types: tuple[Type, ...], node: ast.expr, what: str = "") -> bool:
        if code.type in types or code.type is Type.ANY:
            return True
        needed = " or ".join(type_.phrase for type_ in types)
        hint = ""
        if types == (Type.DURATION,) and code.type is Type.NUMBER:
            hint = "a time needs a unit, such as 50ms or 2s"
        message = f"{what or 'this'} must be {needed}, not {code.type.phrase}"
        self._problem(node, message, hint)
        return False

    def _leaf(self, node: ast.Name) -> _Code:
        token = self._token_at(node.col_offset)
        text = token.text
        if text in BOOLS:
            return _constant(Type.BOOL, BOOLS[text])
        if text[0].isdigit() or text[0] == ".":
            return self._literal(node, text)
        known = self._vocabulary.names.get(text)
        if isinstance(known, Constant):
            return _constant(known.type, known.value)
        if known is not None:
            self._names.add(text)
            return _Code(known.type, known.read)
        return self._unknown(node, text)

    def _literal(self, node: ast.Name, text: str) -> _Code:
        try:
            quantity = parse_quantity(text)
        except UnitError as error:
            return self._problem(node, str(error), error.hint)
        return _constant(quantity.type, quantity.value)

    def _unknown(self, node: ast.expr, text: str) -> _Code:
        place, names = self._vocabulary.place, self._vocabulary.names
        if text in BUILTINS or text in self._vocabulary.functions:
            return self._problem(node, f"'{text}' is a function", f"write {text}(...)")
        if text in self._vocabulary.elsewhere:
            where = self._vocabulary.elsewhere[text]
            return self._problem(node, f"'{text}' is not known in {place}", f"it is known in {where}")
        under = [name for name in names if name.startswith(text + ".")]
        known = f"known here: {', '.join(under or names)}"
        return self._problem(node, f"unknown name '{text[:60]}' in {place}", did_you_mean(text, names, known))

    def _call(self, node: ast.Call, depth: int) -> _Code:
        plain_arguments = not node.keywords and not any(isinstance(part, ast.Starred) for part in node.args)
        if not isinstance(node.func, ast.Name) or not plain_arguments:
            return self._problem(node, "this call is not part of the language")
        name = self._token_at(node.func.col_offset).text
        arguments = [self._visit(argument, depth + 1) for argument in node.args]
        if name in BUILTINS:
            return self._builtin(node, name, arguments)
        function = self._vocabulary.functions.get(name)
        if function is None:
            known = [*BUILTINS, *self._vocabulary.functions]
            hint = did_you_mean(name, known, f"functions here: {', '.join(known)}")
            return self._problem(node, f"unknown function '{name[:60]}' in {self._vocabulary.place}", hint)
        self._names.add(name)
        return self._function(node, name, function, arguments)

    def _function(self, node: ast.Call, name: str, function: Function, arguments: list[_Code]) -> _Code:
        parameters = function.parameters
        if len(arguments) != len(parameters):
            plural = "" if len(parameters) == 1 else "s"
            message = f"{name} takes {len(parameters)} argument{plural}, not {len(arguments)}"
            usage = ", ".join(parameter for parameter, _ in parameters)
            return self._problem(node, message, f"write {name}({usage})")
        self._cost += function.cost
        for code, argument, (parameter, type_) in zip(arguments, node.args, parameters, strict=True):
            if not self._want(code, (type_,), argument, f"'{parameter}' of {name}"):
                return _WRONG
        return _Code(function.result, closures.call_scoped(function.call, [code.run for code in arguments]))

    def _builtin(self, node: ast.Call, name: str, arguments: list[_Code]) -> _Code:
        builtin = BUILTINS[name]
        if not builtin.least <= len(arguments) <= builtin.most:
            wanted = (
                str(builtin.least) if builtin.least == builtin.most else f"{builtin.least} to {builtin.most}"
            )
            plural = "" if wanted == "1" else "s"
            return self._problem(node, f"{name} takes {wanted} argument{plural}, not {len(arguments)}")
        for code, argument in zip(arguments, node.args, strict=True):
            if not self._want(code, builtin.types, argument, f"an argument of {name}"):
                return _WRONG
        type_ = next((code.type for code in arguments if code.type is not Type.ANY), Type.ANY)
        for code, argument in zip(arguments, node.args, strict=True):
            if not self._want(code, (type_, Type.ANY), argument, f"an argument of {name}"):
                return _WRONG
        run = builtin.build([code.run for code in arguments])
        return self._folded(node, _Code(type_, run), arguments)

    def _arithmetic(self, node: ast.BinOp, depth: int) -> _Code:
        sign = SIGNS.get(type(node.op))
        if sign is None:
            return self._problem(node, "this operator is not part of the language")
        left, right = self._visit(node.left, depth + 1), self._visit(node.right, depth + 1)
        if Type.ANY in (left.type, right.type):
            return _WRONG
        result = RESULTS.get((sign, left.type, right.type))
        if result is None:
            message = f"{left.type.phrase} {sign} {right.type.phrase} has no meaning"
            return self._problem(node.right, message, _unit_hint(left.type, right.type))
        if right.constant is not None:
            run = closures.ARITHMETIC_CONSTANT[sign](left.run, right.constant)
        else:
            run = closures.ARITHMETIC[sign](left.run, right.run)
        return self._folded(node.right, _Code(result, run), [left, right])

    def _folded(self, node: ast.expr, code: _Code, parts: list[_Code]) -> _Code:
        """The code as a constant when all its parts are."""
        if code.type is Type.ANY or any(part.constant is None for part in parts):
            return code
        try:
            return _constant(code.type, code.run(None))
        except (ArithmeticError, ValueError, RuleError) as error:
            return self._problem(node, explain(error))

    def _compare(self, node: ast.Compare, depth: int) -> _Code:
        nodes = [node.left, *node.comparators]
        codes = [self._visit(operand, depth + 1) for operand in nodes]
        signs = [SIGNS.get(type(operator), "") for operator in node.ops]
        if not all(signs):
            return self._problem(node, "this comparison is not part of the language")
        for (left, right), sign, operand in zip(pairwise(codes), signs, nodes[1:], strict=True):
            if not self._comparable(left, sign, right, operand):
                return _WRONG
        if any(code.type is Type.ANY for code in codes):
            return _WRONG
        return self._folded(node, _Code(Type.BOOL, _compare_run(codes, signs)), codes)

    def _comparable(self, left: _Code, sign: str, right: _Code, node: ast.expr) -> bool:
        if Type.ANY in (left.type, right.type):
            return True
        if left.type is not right.type:
            message = f"{left.type.phrase} can not be compared with {right.type.phrase}"
            self._problem(node, message, _unit_hint(left.type, right.type))
            return False
        if left.type is Type.BOOL and sign not in ("==", "!="):
            self._problem(node, f"true and false have no order for '{sign}'")
            return False
        return True

    def _logic(self, node: ast.BoolOp, depth: int) -> _Code:
        word = "and" if isinstance(node.op, ast.And) else "or"
        codes = [self._visit(value, depth + 1) for value in node.values]
        for code, value in zip(codes, node.values, strict=True):
            self._want(code, (Type.BOOL,), value, f"each side of `{word}`")
        build = closures.all_of if word == "and" else closures.any_of
        return self._folded(node, _Code(Type.BOOL, build([code.run for code in codes])), codes)

    def _unary(self, node: ast.UnaryOp, depth: int) -> _Code:
        code = self._visit(node.operand, depth + 1)
        if isinstance(node.op, ast.Not | ast.Invert):
            self._want(code, (Type.BOOL,), node.operand, "what follows `not`")
            return self._folded(node, _Code(Type.BOOL, closures.invert(code.run)), [code])
        if not self._want(code, (Type.NUMBER, Type.DURATION), node.operand, "what follows a sign"):
            return _WRONG
        if isinstance(node.op, ast.UAdd):
            return code
        return self._folded(node, _Code(code.type, closures.negate(code.run)), [code])

    def _choice(self, node: ast.IfExp, depth: int) -> _Code:
        condition = self._visit(node.test, depth + 1)
        self._want(condition, (Type.BOOL,), node.test, "what follows `if`")
        yes, no = self._visit(node.body, depth + 1), self._visit(node.orelse, depth + 1)
        if Type.ANY in (yes.type, no.type):
            return _WRONG
        if yes.type is not no.type:
            message = f"one side of `if` is {yes.type.phrase}, the other {no.type.phrase}"
            return self._problem(node.orelse, message, _unit_hint(yes.type, no.type))
        run = closures.choose(condition.run, yes.run, no.run)
        return self._folded(node, _Code(yes.type, run), [condition, yes, no])


def _constant(type_: Type, value: Any) -> _Code:
    return _Code(type_, closures.constant(value), value)


def _unit_hint(left: Type, right: Type) -> str:
    if {left, right} == {Type.NUMBER, Type.DURATION}:
        return "a time needs a unit, such as 50ms or 2s"
    return ""


def _compare_run(codes: list[_Code], signs: list[str]) -> Run:
    if len(signs) > 1:
        return closures.chain(codes[0].run, list(zip(signs, [code.run for code in codes[1:]], strict=True)))
    (left, right), sign = codes, signs[0]
    if right.constant is not None:
        return closures.COMPARE_CONSTANT[sign](left.run, right.constant)
    if left.constant is not None:
        return closures.COMPARE_CONSTANT[closures.MIRRORED[sign]](right.run, left.constant)
    return closures.COMPARE[sign](left.run, right.run)
