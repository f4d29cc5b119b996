"""The expression language: what it means, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from muxk.kernel.estimates import DecodeModel, Estimates
from muxk.kernel.view import View
from muxk.policies.expressions import Expression, compile_expression
from muxk.policies.marks import Scalar, Style
from muxk.policies.names import DecideScope, vocabulary
from muxk.policies.problems import PolicyError, Report, RuleError, Source
from muxk.policies.units import Type
from muxk.policies.vocabulary import Constant

CONSTANTS = {
    "slo.tbt": Constant(Type.DURATION, 100_000_000),
    "params.factor": Constant(Type.NUMBER, 1.5),
}


def compiled(text: str, wanted: Type = Type.ANY) -> Expression:
    report = Report()
    source = Source("p.yaml", text)
    scalar = Scalar(text, Style.PLAIN, source.mark(0), 0, len(text))
    expression = compile_expression(scalar, wanted, vocabulary("slice", CONSTANTS), report)
    report.raise_any()
    assert expression is not None
    return expression


def refusal(text: str, wanted: Type = Type.ANY) -> tuple[int, str, str]:
    """Column, message and hint of the first problem."""
    with pytest.raises(PolicyError) as raised:
        compiled(text, wanted)
    problem = raised.value.problems[0]
    return problem.column, problem.message, problem.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3 - 4", 3),
        ("7 // 2 + 7 % 2 + 7 / 2", 7.5),
        ("7%2", 1),
        ("50%", 0.5),
        ("90% + 1", 1.9),
        ("(50%)*4", 2.0),
        ("50ms + 1s", 1_050_000_000),
        ("1.5ms", 1_500_000),
        ("2 * 50ms / 10ms", 10),
        ("16k + 4Ki", 20_096),
        ("1e3", 1000),
        ("-2 - -3", 1),
        ("1 < 2 <= 2 < 3", True),
        ("1 < 3 < 2", False),
        ("not 1 > 2 and !(2 > 3)", True),
        ("!true == false", True),
        ("1 > 2 || 2 > 1 && true", True),
        ("10 if 1 > 2 else 20", 20),
        ("min(3, 1, 2) + max(5, 4) + abs(-2)", 8),
        ("ceil(1.2) + floor(1.8)", 3),
        ("clamp(7, 1, 5)", 5),
        ("slo.tbt * params.factor", 150_000_000),
        ("max(1ms, 2ms)", 2_000_000),
    ],
)
def test_constants_are_computed_when_the_policy_is_compiled(text: str, value: object) -> None:
    expression = compiled(text)
    assert expression.constant == pytest.approx(value)
    assert expression(None) == pytest.approx(value)


def test_names_are_read_from_the_view(make_view: Callable[..., View], make_batch: Callable[..., Any]) -> None:
    scope = DecideScope(make_view(running=make_batch(layers_left=10)))
    assert compiled("decode.batch * 2 == 16")(scope) is True
    assert compiled("units.total > decode.batch > 7 and not candidate.waiting")(scope) is True
    assert compiled("estimate.decode(8)")(scope) == 100_000_000
    assert compiled("running.time_left")(scope) == 10 * 10 * 8_000_000 / 16
    assert compiled("running.slack + running.time_left == running.deadline - now")(scope) is True
    assert compiled("running.age")(scope) == 1_000_000_000


@pytest.mark.parametrize(
    ("text", "column", "message", "hint"),
    [
        ("decode.batsh > 1", 1, "unknown name 'decode.batsh'", "did you mean 'decode.batch'?"),
        ("1 < request.age", 5, "'request.age' is not known in slice", "it is known in"),
        ("estimate.decod(3) > 1ms", 1, "unknown function", "did you mean 'estimate.decode'?"),
        ("estimate.decode > 1ms", 1, "is a function", "estimate.decode(...)"),
        ("estimate.decode(8) < 50", 22, "a duration can not be compared with a number", "needs a unit"),
        ("decode.idle + 5", 15, "a duration + a number has no meaning", "needs a unit"),
        ("now < 5s", 7, "a moment in time can not be compared with a duration", ""),
        ("now + now", 7, "has no meaning", ""),
        ("5sec", 1, "unknown unit 'sec'", "5s"),
        ("5m", 1, "unknown unit 'm'", "5min"),
        ("decode.batch and true", 1, "must be true or false", ""),
        ("true < false", 8, "no order", ""),
        ("1 if true else 1ms", 16, "one side of `if`", "needs a unit"),
        ("min(1)", 1, "min takes 2 to 8", ""),
        ("min(1, 2ms)", 8, "must be a number", ""),
        ("ceil(1ms)", 6, "must be a number", ""),
        ("1 +", 4, "ends where a value is expected", ""),
        ("(1 + 2", 7, "not closed", ""),
        ("1 + 2)", 6, "was not opened", ""),
        ("1 2", 3, "an operator is missing before '2'", ""),
        ("1 + * 2", 5, "a value is missing before '*'", ""),
        ("decode.batch = 1", 14, "= is not part of the language", "=="),
        ("1 if true", 1, "can not be read", "else"),
        ("1, 2", 2, "comma", ""),
        ("1 / (3 - 3)", 6, "division by zero", ""),
        ("1e400", 1, "too large", ""),
        ("9e18 * 9e300", 8, "", ""),
    ],
)
def test_a_mistake_is_told_at_its_column_with_a_hint(text: str, column: int, message: str, hint: str) -> None:
    found_column, found_message, found_hint = refusal(text)
    assert message in found_message
    assert hint in found_hint
    assert found_column == column


def test_all_mistakes_of_one_expression_are_told() -> None:
    with pytest.raises(PolicyError) as raised:
        compiled("decode.batsh > 1 and kv.fre < 3 and decode.idle < 4")
    assert [problem.column for problem in raised.value.problems] == [1, 22, 51]


ESCAPES = [
    "__import__('os').system('id')", "().__class__.__bases__", "decode.__class__", "now.__init__.__globals__",
    "decode.batch.__class__", "lambda: 1", "[x for x in (1, 2)]", "(1).real", "'a' * 10", '"%s" % now',
    "f'{now}'", "2 ** 10000", "1 << 10000", "kv.free[0]", "{1: 2}", "(yield)", "(x := 1)", "await now",
    "print(1)", "eval(1)", "getattr(now, 1)", "min.__self__", "min(*kv)", "min(key=1)", "max(1, default=2)",
    "now if now else __builtins__", "1;2", "a\\\nb", "1 if 1 else 2 # x", "~1", "1 & 2", "1 | 2", "1 ^ 2",
    "1 @ 2", "1 is 1", "1 in now", "...", "None", "n0", "_", "𝐧𝐨𝐰", "ｎｏｗ", "now\u200b", "1_0", "0x10",
    "1j",     "`id`", "$x", "view.estimates", "scope.view", "decode.batch.real", "estimate.decode(1)(2)",
    "min(1, 2)(3)",
    "not", "if", "and and", "()", "min()", "-" * 300 + "1", "(" * 200 + "1" + ")" * 200, "1 + " * 300 + "1",
    "not " * 300 + "true", "1 if true else " * 100 + "1", "9" * 5000, "1e999999999", "x" * 5000, "min(" * 60,
]  # fmt: skip


@pytest.mark.parametrize("text", ESCAPES, ids=range(len(ESCAPES)))
def test_what_is_not_the_language_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        compiled(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / queue.requests", "division by zero"),
        ("1 // queue.requests", "division by zero"),
        ("decode.batch * 1e18 * 1e18 * 1e18 * 1e18 * " + "1e18 * " * 14 + "1e18", "too large"),
        ("candidate.new_tokens", "candidate.waiting"),
        ("candidate.time_left", "absent"),
        ("estimate.decode(0)", "at least 1 unit"),
        ("estimate.prefill_layer(4)", "prefill.pending"),
    ],
)
def test_a_value_that_is_not_there_is_a_rule_error(
    text: str, reason: str, make_view: Callable[..., View]
) -> None:
    with pytest.raises(RuleError, match=reason):
        compiled(text)(DecideScope(make_view()))


def test_estimates_that_are_unknown_or_no_numbers_are_rule_errors(make_view: Callable[..., View]) -> None:
    cold = DecideScope(make_view(estimates=Estimates()))
    assert compiled("estimate.known")(cold) is False
    with pytest.raises(RuleError, match="ask estimate"):
        compiled("estimate.decode(4)")(cold)
    for value in (float("nan"), float("inf"), -1.0):
        broken = Estimates(1, (DecodeModel(1, value, 0.0, 0.0, 1.0),), ())
        with pytest.raises(RuleError, match="not a time"):
            compiled("estimate.decode(4)")(DecideScope(make_view(estimates=broken)))


def test_the_cost_of_an_expression_is_bounded() -> None:
    assert "costs" in refusal(" + ".join(["estimate.decode(8)"] * 40))[1]
