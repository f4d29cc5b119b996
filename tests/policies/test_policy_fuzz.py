"""Whatever is sent ends in a policy or a PolicyError, and what it computes in a value or a RuleError."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from importlib import resources

from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, View
from muxk.kernel.work import Split
from muxk.policies.engine import CompiledPolicy, compile_policy, shipped_policies
from muxk.policies.expressions import Expression, compile_expression
from muxk.policies.marks import Scalar, Style
from muxk.policies.names import PLACES, DecideScope, vocabulary
from muxk.policies.problems import PolicyError, Report, RuleError, Source
from muxk.policies.units import Type

NAMES = sorted(PLACES["slice"])
WORDS = [
    "and", "or", "not", "if", "else", "&&", "||", "!", "<", "<=", "==", "!=", "+", "-", "*", "/", "//", "%",
    "(", ")", ",", "min(", "max(", "clamp(", "ceil(", "abs(", "estimate.decode(", "estimate.prefill_layer(",
    "estimate.chunk(", "1", "0", "2.5", "1e18", "50ms", "90%", "16k", "true", "false", "**", "[", "]", ".",
    "'", "lambda", ":=",
]  # fmt: skip
soups = st.lists(st.sampled_from(WORDS + NAMES) | st.text(max_size=3), max_size=25).map(" ".join)


def view(batch: PrefillView | None, known: bool) -> View:
    models = (
        ((DecodeModel(1, 1e6, 1.0, 1.0, 1.0),), (PrefillModel(1, 1e5, 1.0, 1.0, 1.0),)) if known else ((), ())
    )
    return View(
        now_ns=10**18,
        units_total=4,
        splits=(Split(1, 3), Split(2, 2), Split(3, 1)),
        split=Split(0, 4),
        layers=4,
        decode=DecodeView(0, 0, False, True, 0),
        running=batch,
        parked=None,
        candidate=batch,
        prefill_in_flight=0,
        queue=QueueView(0, 0),
        kv=KvView(0, 0),
        estimates=Estimates(4, *models),
    )


VIEWS = [
    view(batch, known)
    for batch in (
        None,
        PrefillView(1, 1, 9, 0, 9, 0, 0, 0, 0, 0),
        PrefillView(1, 1, 9, 0, 45, 2, 0, 0, 0, 0, 4, 10, 5, 35),
    )
    for known in (True, False)
]


def compiled(text: str) -> Expression | None:
    report = Report()
    scalar = Scalar(text, Style.PLAIN, Source("p", text).mark(0), 0, len(text))
    expression = compile_expression(scalar, Type.ANY, vocabulary("slice", {}), report)
    with contextlib.suppress(PolicyError):
        report.raise_any()
    assert (expression is None) == bool(report)
    return expression


@settings(max_examples=300, deadline=None)
@given(text=soups | st.text(max_size=40))
def test_any_text_is_an_expression_or_a_reported_problem(text: str) -> None:
    expression = compiled(text)
    for one in VIEWS if expression is not None else []:
        with contextlib.suppress(RuleError):
            assert expression is not None
            value = expression(DecideScope(one))
            assert isinstance(value, bool | str) or math.isfinite(value)


Meaning = tuple[str, Callable[[], float]]


def binary(sign: str, apply: Callable[[float, float], float]) -> Callable[[Meaning, Meaning], Meaning]:
    return lambda a, b: (f"({a[0]} {sign} {b[0]})", lambda: apply(a[1](), b[1]()))


leaves: st.SearchStrategy[Meaning] = st.one_of(
    st.integers(0, 9).map(lambda value: (str(value), lambda: value)),
    st.just(("units.total", lambda: 4)),
    st.just(("queue.requests", lambda: 0)),
    st.just(("layers.total", lambda: 4)),
)
OPERATIONS = [
    binary("+", lambda a, b: a + b),
    binary("-", lambda a, b: a - b),
    binary("*", lambda a, b: a * b),
    binary("/", lambda a, b: a / b),
    binary("//", lambda a, b: a // b),
    binary("%", lambda a, b: a % b),
    lambda a, b: (f"({a[0]} if {a[0]} < {b[0]} else {b[0]})", lambda: a[1]() if a[1]() < b[1]() else b[1]()),
    lambda a, b: (f"min({a[0]}, {b[0]})", lambda: min(a[1](), b[1]())),
    lambda a, b: (f"max({a[0]}, 2, {b[0]})", lambda: max(a[1](), 2, b[1]())),
    lambda a, b: (f"(-{a[0]} + abs({b[0]}))", lambda: -a[1]() + abs(b[1]())),
    lambda a, b: (f"(1 if not {b[0]} <= 2 < {a[0]} else 3)", lambda: 1 if not b[1]() <= 2 < a[1]() else 3),
]  # fmt: skip
meanings = st.recursive(
    leaves,
    lambda inner: st.tuples(st.sampled_from(OPERATIONS), inner, inner).map(
        lambda parts: parts[0](*parts[1:])
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(meaning=meanings)
def test_expressions_mean_what_python_means(meaning: Meaning) -> None:
    text, expected = meaning
    try:
        value: float | None = expected()
    except ZeroDivisionError:
        value = None
    expression = compiled(text)
    if expression is None:
        # Refused at once only where constants divide by zero, or where it is too long.
        assert value is None or "/" in text or "%" in text or len(text) > 400
        return
    try:
        found: float | None = expression(DecideScope(VIEWS[0]))
    except RuleError:
        found = None
    assert found == value


SHIPPED = [
    resources.files("muxk.policies").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    for name in (*shipped_policies(), "defaults")
]
INSERTS = [
    "[",
    "]",
    "{",
    "}",
    ":",
    "- ",
    "&a ",
    "*a",
    "!x ",
    "'",
    '"',
    "\t",
    "\n",
    "\x00",
    "|",
    "? ",
    "#",
    "1e999",
    "é",
    "then",
    "~",
]


@st.composite
def mutants(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(SHIPPED))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(st.sampled_from([*INSERTS, ""]) | st.text(max_size=3)) + text[end:]
    return text


def outcome(text: str) -> CompiledPolicy | PolicyError:
    try:
        return compile_policy(text, "fuzz.yaml")
    except PolicyError as error:
        return error


@settings(max_examples=300, deadline=None)
@given(text=mutants() | st.text(max_size=60))
def test_any_text_is_a_policy_or_a_policy_error_with_places(text: str) -> None:
    policy = outcome(text)
    if isinstance(policy, PolicyError):
        assert policy.problems
        assert str(policy).endswith(("error", "errors"))
        assert all(problem.line >= 1 and problem.column >= 1 for problem in policy.problems)
    else:
        assert all(policy.decide(one).layers >= 1 for one in VIEWS)
