"""The compiler of expressions: one pass over the tree of one text, see `expressions.py`."""

from __future__ import annotations

import ast
import bisect
from collections.abc import Callable
from typing import Any

from muxk.policies import closures, combine
from muxk.policies.combine import WRONG
from muxk.policies.lexer import Kind, Token, placeholders, tokenize
from muxk.policies.marks import Scalar
from muxk.policies.operators import BOOLS, BUILTINS, SIGNS
from muxk.policies.problems import Report, by_root, did_you_mean, one_of
from muxk.policies.terms import Code, Form, Part, Term
from muxk.policies.units import Type, UnitError, parse_quantity, unit_hint
from muxk.policies.vocabulary import Constant, Function, Name, Vocabulary

MAX_DEPTH = 64
VARIABLE = "vars."
"""What the name of a variable starts with."""


def compile_root(
    scalar: Scalar, types: tuple[Type, ...], vocabulary: Vocabulary, report: Report, sort_key: bool
) -> tuple[Part, bool] | None:
    """Compile a text that must have one of some types; with whether it is a descending key. None if wrong."""
    compiler = _begin(scalar, vocabulary, report, len(vocabulary.variables))
    if compiler is None:
        return None
    try:
        return compiler.root(types, sort_key)
    except _Stop:
        return None
    except (RecursionError, MemoryError):
        report.add(scalar.mark, "the expression is nested too deeply")
        return None


def compile_variable(name: str, vocabulary: Vocabulary, report: Report) -> Part:
    """Compile a variable for a place, and those before it; mistakes are reported where they stand."""
    for index, (earlier, scalar) in enumerate(vocabulary.variables.items()):
        if earlier not in vocabulary.parts:
            vocabulary.parts[earlier] = _compile_variable(scalar, vocabulary, report, index)
        if earlier == name:
            break
    return vocabulary.parts[name]


def _compile_variable(scalar: Scalar, vocabulary: Vocabulary, report: Report, index: int) -> Part:
    compiler = _begin(scalar, vocabulary, report, index)
    if compiler is None:
        return _BROKEN
    try:
        return compiler.part(compiler.code())
    except _Stop:
        return _BROKEN
    except (RecursionError, MemoryError):
        report.add(scalar.mark, "the expression is nested too deeply")
        return _BROKEN


def _begin(scalar: Scalar, vocabulary: Vocabulary, report: Report, visible: int) -> _Compiler | None:
    if not scalar.text.strip():
        report.add(scalar.mark, "an expression is missing")
        return None
    tokens = tokenize(scalar.text, _complain_at(scalar, report))
    return _Compiler(scalar, tokens, vocabulary, report, visible) if tokens else None


def _complain_at(scalar: Scalar, report: Report) -> Callable[[int, str, str], None]:
    return lambda offset, message, hint: report.add(scalar.mark_at(offset), message, hint, "syntax")


class _Stop(Exception):
    """The expression can not be compiled further; the problem is in the report."""


_BROKEN = Part(WRONG, 0, frozenset(), {}, (), (), True)


class _Compiler:
    """One pass over the tree of one text. The first `visible` variables of the vocabulary may be used."""

    def __init__(
        self, scalar: Scalar, tokens: list[Token], vocabulary: Vocabulary, report: Report, visible: int
    ) -> None:
        self._scalar = scalar
        self._tokens = tokens
        self._python = placeholders(tokens)
        self._vocabulary = vocabulary
        self._report = report
        self._visible = visible
        self._is_variable = visible < len(vocabulary.variables)
        self._cost = 0
        self._names: set[str] = set()
        self._reads: dict[str, Name] = {}
        self._quoted: dict[str, None] = {}
        self._foreign: dict[str, None] = {}
        self._wrong = False

    def root(self, types: tuple[Type, ...], sort_key: bool) -> tuple[Part, bool] | None:
        """The whole text, as one of some types."""
        node = self._parse()
        descending = sort_key and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        code = self._visit(node.operand if descending and isinstance(node, ast.UnaryOp) else node, 0)
        self._want(code, types, node)
        self._bound_cost(node)
        return None if self._wrong else (self.part(code), descending)

    def code(self) -> Code:
        """The whole text, of any type; what it costs is bounded where it is used."""
        return self._visit(self._parse(), 0)

    def part(self, code: Code) -> Part:
        """A compiled text with all that came to light."""
        names, quoted, foreign = frozenset(self._names), tuple(self._quoted), tuple(self._foreign)
        return Part(code, self._cost, names, self._reads, quoted, foreign, self._wrong)

    def _bound_cost(self, node: ast.expr) -> None:
        most = self._vocabulary.max_cost
        if self._cost > most:
            message = f"the expression costs {self._cost:,}, more than {most} for {self._vocabulary.place}"
            self._problem(node, message, "split it into rules, or ask for less")
            raise _Stop

    def _parse(self) -> ast.expr:
        try:
            return ast.parse(self._python.text, mode="eval").body
        except SyntaxError as error:
            token = self._token_at(max(0, (error.offset or 1) - 1))
            hint = "every `if` needs an `else`; put parentheses around a part with `not`"
            mark = self._scalar.mark_at(token.offset)
            self._report.add(mark, f"the expression can not be read at '{token.text[:40]}'", hint, "syntax")
            raise _Stop from None

    def _token_at(self, column: int) -> Token:
        return self._tokens[max(0, bisect.bisect_right(self._python.starts, column) - 1)]

    def _offset(self, node: ast.expr) -> int:
        return self._token_at(node.col_offset).offset

    def _problem(self, node: ast.expr, message: str, hint: str = "", code: str = "invalid") -> Code:
        self._wrong = True
        self._report.add(self._scalar.mark_at(self._offset(node)), message, hint, code)
        return WRONG

    def _visit(self, node: ast.expr, depth: int) -> Code:
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

    def _want(self, code: Code, types: tuple[Type, ...], node: ast.expr, what: str = "") -> bool:
        if code.type in types or code.type is Type.ANY:
            return True
        needed = one_of(type_.phrase for type_ in types)
        hint = unit_hint(types[0], code.type) if len(types) <= 2 else ""
        if code.type is Type.NAME and Type.MOMENT in types:
            hint = "names have no order; class.rank is the place of a class among the classes"
        self._problem(node, f"{what or 'this'} must be {needed}, not {code.type.phrase}", hint, "wrong-type")
        return False

    # --- leaves ---

    def _leaf(self, node: ast.Name) -> Code:
        token = self._token_at(node.col_offset)
        text = token.text
        if token.kind is Kind.QUOTED:
            return self._quoted_name(node, text[1:-1])
        if text in BOOLS:
            return self._literal(node, Type.BOOL, text, BOOLS[text])
        if token.kind is Kind.NUMBER:
            return self._quantity(node, text)
        if text.startswith(VARIABLE):
            return self._variable(node, text)
        known = self._vocabulary.names.get(text)
        if isinstance(known, Constant):
            run = closures.constant(known.value)
            self._reads[text] = Name(known.type, run, known.about)
            term = Term(Form.CONSTANT, text, known.type, token.offset, (), known.value)
            return Code(known.type, run, term, known.value)
        if known is None:
            return self._unknown(node, text)
        self._names.add(text)
        self._reads[text] = known
        return Code(known.type, known.read, Term(Form.NAME, text, known.type, token.offset))

    def _literal(self, node: ast.expr, type_: Type, text: str, value: Any) -> Code:
        term = Term(Form.LITERAL, text, type_, self._offset(node), (), value)
        return Code(type_, closures.constant(value), term, value)

    def _quantity(self, node: ast.Name, text: str) -> Code:
        try:
            quantity = parse_quantity(text)
        except UnitError as error:
            return self._problem(node, str(error), error.hint)
        return self._literal(node, quantity.type, text, quantity.value)

    def _quoted_name(self, node: ast.Name, text: str) -> Code:
        words = self._vocabulary.words
        if words is not None and text not in words:
            listed = f"its classes: {', '.join(words)}"
            return self._problem(
                node, f"'{text}' is no class of this policy", did_you_mean(text, words, listed)
            )
        self._quoted[text] = None
        return self._literal(node, Type.NAME, repr(text), text)

    def _variable(self, node: ast.Name, text: str) -> Code:
        name = text.removeprefix(VARIABLE)
        variables = list(self._vocabulary.variables)
        if name not in variables:
            known = (
                f"variables of this policy: {', '.join(variables)}" if variables else "it has no variables"
            )
            hint = did_you_mean(text, [VARIABLE + other for other in variables], known)
            return self._problem(node, f"unknown variable '{text[:60]}'", hint, "unknown-name")
        if variables.index(name) >= self._visible:
            user = variables[self._visible]
            message = f"'{VARIABLE}{user}' uses '{text}', which is not defined before it"
            return self._problem(node, message, "a variable may use those that are written above it")
        return self._inlined(node, text, compile_variable(name, self._vocabulary, self._report))

    def _inlined(self, node: ast.Name, text: str, part: Part) -> Code:
        self._cost += part.cost
        self._names.update(part.names)
        self._quoted.update(dict.fromkeys(part.quoted))
        for name in part.foreign:
            self._not_here(
                node, name, f"'{text}' uses '{name}', which is not known in {self._vocabulary.place}"
            )
        if part.wrong or part.foreign:
            self._wrong = True
            return WRONG
        code = part.code
        self._reads.update(part.reads)
        self._reads[text] = Name(code.type, code.run, f"variable of the policy, {part.cost} operations")
        term = Term(Form.VARIABLE, text, code.type, self._offset(node), (code.term,), code.constant)
        return Code(code.type, code.run, term, code.constant)

    def _not_here(self, node: ast.expr, name: str, message: str) -> Code:
        """A name of another place; that of a variable is told where the variable is used."""
        self._wrong = True
        if self._is_variable:
            self._foreign[name] = None
            return WRONG
        return self._problem(
            node, message, f"it is known in {self._vocabulary.elsewhere[name]}", "unknown-name"
        )

    def _unknown(self, node: ast.expr, text: str) -> Code:
        known, functions = self._vocabulary.names, self._vocabulary.functions
        place = self._vocabulary.place
        if text in BUILTINS or text in functions:
            return self._problem(node, f"'{text}' is a function", f"write {text}(...)")
        if text in self._vocabulary.elsewhere:
            return self._not_here(node, text, f"'{text}' is not known in {place}")
        if self._is_variable:
            every = sorted({*known, *self._vocabulary.elsewhere})
            return self._problem(
                node, f"unknown name '{text[:60]}' in a variable", did_you_mean(text, every), "unknown-name"
            )
        under = [name for name in known if name.startswith(text + ".")]
        names = [*known, *(VARIABLE + name for name in self._vocabulary.variables)]
        if VARIABLE + text in names:
            hint = f"did you mean '{VARIABLE}{text}'?"
        else:
            hint = did_you_mean(text, names, f"known here: {', '.join(under or by_root(names))}")
        return self._problem(node, f"unknown name '{text[:60]}' in {place}", hint, "unknown-name")

    # --- calls ---

    def _call(self, node: ast.Call, depth: int) -> Code:
        plain_arguments = not node.keywords and not any(isinstance(part, ast.Starred) for part in node.args)
        if not isinstance(node.func, ast.Name) or not plain_arguments:
            return self._problem(node, "this call is not part of the language")
        name = self._token_at(node.func.col_offset).text
        arguments = [self._visit(argument, depth + 1) for argument in node.args]
        if name in BUILTINS:
            return self._builtin(node, name, arguments)
        function = self._vocabulary.functions.get(name)
        if function is not None:
            self._names.add(name)
            return self._function(node, name, function, arguments)
        if name in self._vocabulary.names:
            return self._problem(node, f"'{name}' is no function", f"write {name} without ( )")
        place = "a variable" if self._is_variable else self._vocabulary.place
        if name in self._vocabulary.elsewhere:
            return self._not_here(node, name, f"'{name}' is not known in {place}")
        known = [*BUILTINS, *self._vocabulary.functions]
        hint = did_you_mean(name, known, f"functions here: {', '.join(known)}")
        return self._problem(node, f"unknown function '{name[:60]}' in {place}", hint, "unknown-name")

    def _function(self, node: ast.Call, name: str, function: Function, arguments: list[Code]) -> Code:
        parameters = function.parameters
        if len(arguments) != len(parameters):
            plural = "" if len(parameters) == 1 else "s"
            message = f"{name} takes {len(parameters)} argument{plural}, not {len(arguments)}"
            usage = ", ".join(parameter for parameter, _ in parameters)
            return self._problem(node, message, f"write {name}({usage})")
        self._cost += function.cost
        for code, argument, (parameter, type_) in zip(arguments, node.args, parameters, strict=True):
            if not self._want(code, (type_,), argument, f"'{parameter}' of {name}"):
                return WRONG
        run = closures.call_scoped(function.call, [code.run for code in arguments])
        self._reads[self._text(node)] = Name(function.result, run, function.about, "", function.least)
        return Code(function.result, run, self._term(node, Form.CALL, name, function.result, arguments))

    def _text(self, node: ast.expr) -> str:
        """What was written for a part."""
        last = self._token_at((node.end_col_offset or 1) - 1)
        return self._scalar.text[self._offset(node) : last.offset + len(last.text)]

    def _term(self, node: ast.expr, form: Form, text: str, type_: Type, parts: list[Code]) -> Term:
        return Term(form, text, type_, self._offset(node), tuple(part.term for part in parts))

    def _builtin(self, node: ast.Call, name: str, arguments: list[Code]) -> Code:
        builtin = BUILTINS[name]
        if not builtin.least <= len(arguments) <= builtin.most:
            wanted = (
                str(builtin.least) if builtin.least == builtin.most else f"{builtin.least} to {builtin.most}"
            )
            plural = "" if wanted == "1" else "s"
            return self._problem(node, f"{name} takes {wanted} argument{plural}, not {len(arguments)}")
        for code, argument in zip(arguments, node.args, strict=True):
            if not self._want(code, builtin.types, argument, f"an argument of {name}"):
                return WRONG
        return combine.builtin(name, arguments, self._offset(node), self._complain(node, node.args))

    # --- operators ---

    def _complain(self, node: ast.expr, operands: list[ast.expr]) -> combine.Complain:
        """Reports at an operand, or at the whole."""
        return lambda index, message, hint: self._problem(
            node if index is None else operands[index], message, hint, "wrong-type"
        )

    def _arithmetic(self, node: ast.BinOp, depth: int) -> Code:
        sign = SIGNS.get(type(node.op))
        if sign is None:
            return self._problem(node, "this operator is not part of the language")
        left, right = self._visit(node.left, depth + 1), self._visit(node.right, depth + 1)
        complain = self._complain(node.right, [node.left, node.right])
        return combine.arithmetic(sign, left, right, self._offset(node), complain)

    def _compare(self, node: ast.Compare, depth: int) -> Code:
        operands = [node.left, *node.comparators]
        codes = [self._visit(operand, depth + 1) for operand in operands]
        signs = [SIGNS.get(type(operator), "") for operator in node.ops]
        if not all(signs):
            return self._problem(node, "this comparison is not part of the language")
        return combine.comparison(signs, codes, self._offset(node), self._complain(node, operands))

    def _logic(self, node: ast.BoolOp, depth: int) -> Code:
        word = "and" if isinstance(node.op, ast.And) else "or"
        codes = [self._visit(value, depth + 1) for value in node.values]
        for code, value in zip(codes, node.values, strict=True):
            self._want(code, (Type.BOOL,), value, f"each side of `{word}`")
        return combine.logic(word, codes, self._offset(node), self._complain(node, node.values))

    def _unary(self, node: ast.UnaryOp, depth: int) -> Code:
        code = self._visit(node.operand, depth + 1)
        complain = self._complain(node, [node.operand])
        if isinstance(node.op, ast.Not | ast.Invert):
            self._want(code, (Type.BOOL,), node.operand, "what follows `not`")
            return combine.negation("not", code, self._offset(node), complain)
        signed = (Type.NUMBER, Type.DURATION, Type.SIZE, Type.PERCENT)
        if not self._want(code, signed, node.operand, "what follows a sign"):
            return WRONG
        if isinstance(node.op, ast.UAdd):
            return code
        return combine.negation("-", code, self._offset(node), complain)

    def _choice(self, node: ast.IfExp, depth: int) -> Code:
        condition = self._visit(node.test, depth + 1)
        self._want(condition, (Type.BOOL,), node.test, "what follows `if`")
        yes, no = self._visit(node.body, depth + 1), self._visit(node.orelse, depth + 1)
        complain = self._complain(node, [node.test, node.body, node.orelse])
        return combine.choice(condition, yes, no, self._offset(node), complain)
