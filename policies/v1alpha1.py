"""From `muxk/v1alpha1` to `muxk/v1beta1`: what was written differently, and meant the same.

- `{fewest: condition}` is `fewest where condition`.
- Units with B (`4GiB`) counted; now they are bytes, a count has none (`4Gi`). So with params of `type: size`.
- A percentage was its fraction where a count is wanted; there it is an error now, or a share of the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muxk.policies.lexer import Kind, Token, tokenize
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode
from muxk.policies.operators import BUILTINS
from muxk.policies.rewriting import Change, Piece, pieces_in_source, pieces_in_text, unwrapped
from muxk.policies.units import SIZES, parse_quantity

_COUNTED: Mapping[str, str] = {
    "kB": "k", "MB": "M", "GB": "G", "KiB": "Ki", "MiB": "Mi", "GiB": "Gi", "TiB": "",
}  # fmt: skip
"""Units of sizes as they were, with the count of the same value where there is one."""
_LITERAL = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]+|%)")
_WITHOUT_EXPRESSIONS = ("admit", "preempt", "retain")
"""Points whose answers are words and reasons."""
_COUNTING_LIMITS = ("backlog", "decode_ahead", "queue")
_SHIPPED_PERCENTAGES: Mapping[str, tuple[str, ...]] = {"static_split": ("decode_share",)}
"""Params of the shipped policies of that time that were percentages."""


@dataclass(frozen=True, slots=True)
class _Expression:
    """A text of the language in a document."""

    scalar: Scalar
    counts: bool
    """Whether a count is wanted, so that a percentage can not stand alone."""


def from_v1alpha1(root: MappingNode) -> Iterator[Change]:
    """What changes in a policy."""
    spec = root.get("spec")
    if not isinstance(spec, MappingNode):
        return
    percentages = _percentages(spec)
    yield from _params(spec)
    for found in _expressions(spec):
        if isinstance(found, MappingNode):
            value = found.entries[0].value
            assert isinstance(value, Scalar), "checked where it was found"
            yield unwrapped(found, "fewest where ", _pieces(_Expression(value, False), percentages))
        elif pieces := _pieces(found, percentages):
            scalar = found.scalar
            yield Change(scalar, pieces_in_text(scalar.text, pieces), tuple(pieces_in_source(scalar, pieces)))


def _params(spec: MappingNode) -> Iterator[Change]:
    """`type: size` was a number; literals of any param lose the B."""
    params = spec.get("params")
    for entry in params if isinstance(params, MappingNode) else ():
        if not isinstance(entry.value, MappingNode):
            continue
        for key in ("type", "default", "min", "max"):
            scalar = entry.value.get(key)
            if not isinstance(scalar, Scalar):
                continue
            if key == "type" and scalar.text == "size":
                yield Change.of_text(scalar, "number")
            elif pieces := _counts_of_sizes(_tokens(scalar)):
                text = pieces_in_text(scalar.text, pieces)
                yield Change(scalar, text, tuple(pieces_in_source(scalar, pieces)))


def _percentages(spec: MappingNode) -> tuple[str, ...]:
    """Names of the params that are percentages."""
    extends, params = spec.get("extends"), spec.get("params")
    inherited = _SHIPPED_PERCENTAGES.get(extends.text, ()) if isinstance(extends, Scalar) else ()
    own = [
        entry.key.text
        for entry in (params if isinstance(params, MappingNode) else ())
        if isinstance(entry.value, MappingNode) and _word(entry.value.get("type")) == "percent"
    ]
    return tuple(f"params.{name}" for name in (*inherited, *own))


def _word(node: Node | None) -> str:
    return node.text if isinstance(node, Scalar) else ""


def _expressions(spec: MappingNode) -> Iterator[_Expression | MappingNode]:
    """Expressions of a policy, and the mappings `{fewest: condition}`."""
    for entry in spec:
        key, node = entry.key.text, entry.value
        if key in ("slo", "limits") and isinstance(node, MappingNode):
            for limit in node:
                if isinstance(limit.value, Scalar) and limit.key.text != "ttft":
                    yield _Expression(limit.value, limit.key.text in _COUNTING_LIMITS)
        elif key in ("admit", "order", "form", "split", "slice", "preempt", "victim", "retain"):
            yield from _of_point(key, node)


def _of_point(point: str, node: Node) -> Iterator[_Expression | MappingNode]:
    if not isinstance(node, SequenceNode):
        yield from _of_answer(point, node)
        return
    for rule in node.items:
        if isinstance(rule, MappingNode):
            when, then = rule.get("when"), rule.get("then")
            if isinstance(when, Scalar):
                yield _Expression(when, False)
            if then is not None:
                yield from _of_answer(point, then)


def _of_answer(point: str, node: Node) -> Iterator[_Expression | MappingNode]:
    if point in _WITHOUT_EXPRESSIONS:
        return
    if isinstance(node, Scalar):
        yield _Expression(node, point in ("form", "split", "slice"))
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _of_answer(point, item)
    elif point == "split" and _seeks(node):
        yield node
    else:
        for entry in node:
            yield from _of_answer(point, entry.value)


def _seeks(node: MappingNode) -> bool:
    """Whether a mapping is `{fewest: condition}`."""
    keys = [entry.key.text for entry in node]
    return keys == ["fewest"] and isinstance(node.entries[0].value, Scalar)


def _tokens(scalar: Scalar) -> list[Token]:
    """Words of an expression; none when it has mistakes, which the reader of policies tells."""
    return tokenize(scalar.text, lambda offset, message, hint: None) if scalar.text.strip() else []


def _pieces(expression: _Expression, percentages: tuple[str, ...]) -> list[Piece]:
    tokens = _tokens(expression.scalar)
    pieces = _counts_of_sizes(tokens)
    if expression.counts and _is_percentage(tokens, percentages):
        return _as_number(tokens)
    return pieces


def _counts_of_sizes(tokens: list[Token]) -> list[Piece]:
    pieces = []
    for token in tokens:
        match = _LITERAL.fullmatch(token.text) if token.kind is Kind.NUMBER else None
        if match is not None and match[2] in _COUNTED:
            end = token.offset + len(token.text)
            pieces.append(Piece(token.offset, end, _count_of_size(match[1], match[2])))
    return pieces


def _count_of_size(digits: str, unit: str) -> str:
    if _COUNTED[unit]:
        return digits + _COUNTED[unit]
    value = parse_quantity(digits + unit).value
    gibi = SIZES["GiB"]
    return f"{value // gibi}Gi" if isinstance(value, int) and value % gibi == 0 else repr(value)


def _is_percentage(tokens: list[Token], percentages: tuple[str, ...]) -> bool:
    """Whether an expression is a percentage in the next version, or might be: made of nothing else."""
    numbers = [token.text for token in tokens if token.kind is Kind.NUMBER]
    names = [token.text for token in tokens if token.kind is Kind.NAME and token.text not in BUILTINS]
    return (
        bool(numbers or names)
        and all(text.endswith("%") for text in numbers)
        and all(name in percentages for name in names)
    )


def _as_number(tokens: list[Token]) -> list[Piece]:
    first, last = tokens[0], tokens[-1]
    end = last.offset + len(last.text)
    if len(tokens) == 1 and first.kind is Kind.NUMBER:
        return [Piece(0, end, repr(parse_quantity(first.text).value))]
    if len(tokens) == 1:
        return [Piece(first.offset, first.offset, "1 * ")]
    return [Piece(first.offset, first.offset, "1 * ("), Piece(end, end, ")")]
