"""Sections of a policy that are no decision points: SLOs, limits, variables and classes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from muxk.kernel.policy import DEFAULT_GUARD, GUARDS
from muxk.kernel.view import Limits
from muxk.policies.answers import Context
from muxk.policies.classes import Classes, PolicyClass, only_class
from muxk.policies.compiler import compile_variable
from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode, describe
from muxk.policies.names import PLACES
from muxk.policies.problems import Mark, Report
from muxk.policies.units import TtftSlo, Type, UnitError, parse_ttft

MAX_CLASSES = 32
MAX_VARIABLES = 64
MAX_VARIABLE_CHARACTERS = 10_000
"""Of all variables together: each is compiled for every place that may use it."""
SLO: Mapping[str, str] = {"tbt": "", "ttft": ""}
ESTIMATOR: Mapping[str, str] = {"guard": ""}
LIMIT_RANGES: Mapping[str, tuple[int, int] | None] = {
    "backlog": (1, 4),
    "decode_ahead": (0, 1),
    "decode_floor": None,
    "queue": (1, 1_000_000),
    "preemptions": (0, 1_000),
    "parked": (0, 1 << 40),
}
"""What each limit may be, in whole numbers or bytes; None for a duration."""
LIMITS: Mapping[str, str] = dict.fromkeys(LIMIT_RANGES, "")
CLASS: Mapping[str, str] = {"name": "", "when": "", "slo": "", "share": "", "max_wait": ""}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_LARGEST_SHARE = 1_000_000


def identifier(node: Node | None, what: str, report: Report) -> str:
    """The text of a node that names something; empty, with a report, where it can not."""
    if node is None:
        return ""
    if isinstance(node, Scalar) and NAME.fullmatch(node.text):
        return node.text
    message = f"{what} must be a word of letters, digits, '-', '_' and '.', not {describe(node)}"
    report.add(node.mark, message)
    return ""


# --- SLOs ---


def read_slo(
    node: Node | None, context: Context, base: tuple[int, TtftSlo] = (1, TtftSlo(1, 0))
) -> tuple[int, TtftSlo]:
    """TBT SLO in ns and TTFT SLO; what is not said is the base's."""
    if node is None:
        return base
    found = fields(node, SLO, "slo", context.report)
    tbt_ns = _duration(found["tbt"], "slo", context) if "tbt" in found else base[0]
    return tbt_ns, _ttft(found["ttft"], context.report) if "ttft" in found else base[1]


def _ttft(node: Node, report: Report) -> TtftSlo:
    if not isinstance(node, Scalar):
        report.add(node.mark, "ttft must be a time", "write 800ms or 500ms + 10ms/token")
        return TtftSlo(1, 0)
    try:
        return parse_ttft(node.text)
    except UnitError as error:
        report.add(node.mark, str(error), error.hint)
        return TtftSlo(1, 0)


# --- constants ---


def _constant(node: Node | None, wanted: Type, place: str, context: Context) -> float | None:
    """The value of an expression that may name nothing but params, SLOs and variables of those."""
    expression = context.expression(node, wanted, place)
    if expression is None:
        return None
    value: float = expression.constant
    return value


def _duration(node: Node | None, place: str, context: Context) -> int:
    value = _constant(node, Type.DURATION, place, context)
    if value is not None and node is not None and round(value) < 1:
        context.report.add(node.mark, "a time must be more than 0")
    return max(1, round(value or 1))


def _limit(key: str, node: Node | None, context: Context, type_: Type) -> int:
    bounds = LIMIT_RANGES[key]
    assert bounds is not None, "a limit in whole numbers"
    least, most = bounds
    value = _constant(node, type_, "limits", context)
    if value is None or node is None:
        return least
    if value != round(value) or not least <= value <= most:
        what = "a size in whole bytes" if type_ is Type.SIZE else "a whole number"
        context.report.add(node.mark, f"must be {what} from {least} to {most:,}, not {value:g}")
        return least
    return round(value)


# --- limits ---


def read_limits(node: Node | None, context: Context) -> Limits:
    """Bounds that the kernel enforces."""
    found = fields(node, LIMITS, "limits", context.report) if node is not None else {}

    def whole(key: str, type_: Type = Type.NUMBER) -> int:
        return _limit(key, found.get(key), context, type_)

    return Limits(
        backlog=whole("backlog"),
        decode_floor_ns=_duration(found.get("decode_floor"), "limits", context),
        queue_bound=whole("queue"),
        decode_ahead=whole("decode_ahead"),
        preemptions=whole("preemptions"),
        parked_bytes=whole("parked", Type.SIZE),
    )


# --- the estimator ---


def read_estimator(node: Node | None, context: Context) -> str:
    """The guard of decode estimates."""
    found = fields(node, ESTIMATOR, "estimator", context.report) if node is not None else {}
    guard = found.get("guard")
    if guard is None:
        return DEFAULT_GUARD
    return context.word(guard, GUARDS, "guard") or DEFAULT_GUARD


# --- variables ---


def read_variables(node: Node | None, report: Report) -> dict[str, Scalar]:
    """Expressions by name, in the order in which they are written."""
    if node is None:
        return {}
    if not isinstance(node, MappingNode):
        report.add(node.mark, f"variables must be a mapping of names to expressions, not {describe(node)}")
        return {}
    if len(node.entries) > MAX_VARIABLES:
        report.add(node.mark, f"more than {MAX_VARIABLES} variables")
        return {}
    found: dict[str, Scalar] = {}
    for entry in node:
        name = entry.key.text
        if not name.isidentifier() or not name.isascii():
            message = f"a variable's name must be letters, digits and '_', not '{name[:40]}'"
            report.add(entry.key.mark, message)
        elif not isinstance(entry.value, Scalar):
            hint = "inside { } put quotes around it"
            message = f"variable '{name}' must be an expression, not {describe(entry.value)}"
            report.add(entry.value.mark, message, hint)
        else:
            found[name] = entry.value
    if sum(len(scalar.text) for scalar in found.values()) > MAX_VARIABLE_CHARACTERS:
        report.add(node.mark, f"the variables have more than {MAX_VARIABLE_CHARACTERS:,} characters together")
        return {}
    return found


def check_variables(context: Context) -> None:
    """Report variables that no place could use, whether or not one does."""
    for name, scalar in context.variables.items():
        if not any(_knows(place, name, context) for place in PLACES):
            message = f"no decision point knows all the names of variable '{name}'"
            context.report.add(scalar.mark, message, "split it in two")


def _knows(place: str, variable: str, context: Context) -> bool:
    """Whether a place knows all that a variable mentions; mistakes of the variable itself are reported."""
    return not compile_variable(variable, context.vocabulary(place), context.report).foreign


# --- classes ---


@dataclass(frozen=True, slots=True)
class ClassSource:
    """A class as written, but for what `Classes` has of it; `when` is None for the last."""

    name: str
    when: Scalar | None
    mark: Mark


def read_classes(
    node: Node | None, slo: tuple[int, TtftSlo], context: Context
) -> tuple[Classes, tuple[ClassSource, ...]]:
    """The classes of a policy with their conditions as written; without the section there is one."""
    if node is None:
        return only_class(*slo), ()
    report = context.report
    if not isinstance(node, SequenceNode) or not 0 < len(node.items) <= MAX_CLASSES:
        hint = "write classes: [{name: chat, when: request.priority < 1}, {name: batch}]"
        report.add(node.mark, f"classes must be a list of 1 to {MAX_CLASSES} classes", hint)
        return only_class(*slo), ()
    rows, sources = [], []
    for rank, item in enumerate(node.items):
        row, source = _class(item, rank, slo, context)
        rows.append(row)
        sources.append(source)
    _check_names(sources, report)
    _check_catch_all(sources, report)
    return Classes(tuple(rows), slo[0]), tuple(sources)


def _class(
    node: Node, rank: int, slo: tuple[int, TtftSlo], context: Context
) -> tuple[PolicyClass, ClassSource]:
    report = context.report
    found = fields(node, CLASS, "a class", report)
    if isinstance(node, MappingNode) and "name" not in found:
        report.add(node.mark, "a class needs a 'name'", code="missing-key")
    name = identifier(found.get("name"), "a class's name", report)
    when = found.get("when")
    if when is not None and not isinstance(when, Scalar):
        report.add(when.mark, f"'when' must be an expression, not {describe(when)}", "put quotes around it")
        when = None
    tbt_ns, ttft = read_slo(found.get("slo"), context, slo)
    max_wait = found.get("max_wait")
    row = PolicyClass(
        name,
        rank,
        tbt_ns,
        ttft,
        _share(found.get("share"), context),
        None if max_wait is None else _duration(max_wait, "a class", context),
    )
    return row, ClassSource(name, when, node.mark)


def _share(node: Node | None, context: Context) -> float | None:
    value = _constant(node, Type.NUMBER, "a class", context)
    if value is None or node is None:
        return None
    if not 0 < value <= _LARGEST_SHARE:
        hint = "shares are weights: a class with share 3 gets three tokens where one with share 1 gets one"
        context.report.add(node.mark, f"a share must be more than 0, at most {_LARGEST_SHARE:,}", hint)
        return None
    return float(value)


def _check_names(sources: list[ClassSource], report: Report) -> None:
    lines: dict[str, int] = {}
    for source in sources:
        if source.name in lines:
            hint = f"the other is on line {lines[source.name]}"
            report.add(source.mark, f"two classes are named '{source.name}'", hint, "duplicate-name")
        elif source.name:
            lines[source.name] = source.mark.line


def _check_catch_all(sources: list[ClassSource], report: Report) -> None:
    """The last class takes every request, and no other does."""
    for source, after in pairwise(sources):
        if source.when is None:
            hint = f"class '{source.name}' before it takes every request; give that one a 'when'"
            report.add(after.mark, f"class '{after.name}' can never be reached", hint, "unreachable-class")
            return
    if sources[-1].when is not None:
        hint = "end with a class that has no 'when', such as - {name: other}"
        report.add(
            sources[-1].mark,
            "the last class must take every request: it is the catch-all",
            hint,
            "no-catch-all",
        )
