"""Generated policies and expressions: no crash, no hang, no answer that a device can not follow.

2,000 examples in a test run; `make fuzz` makes it 100,000. What is generated follows from the tables of the
language, see tests/policy_generator.py.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from expression_generator import EXPRESSIONS, Declared, ExpressionWriter
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from muxk.policies.answers import POINTS
from muxk.policies.checking import check_policy
from muxk.policies.engine import CompiledPolicy, compile_policy, shipped_policies
from muxk.policies.expressions import compile_expression
from muxk.policies.loader import normalise
from muxk.policies.marks import Scalar, Style
from muxk.policies.names import PLACES, vocabulary
from muxk.policies.problems import PolicyError, Problem, Report, RuleError, Source
from muxk.policies.units import Type
from policy_generator import ANSWERS, hostile_policy, nearly_right_policy, right_policy
from policy_views import ViewMaker, ask_everything

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


EXAMPLES = int(os.environ.get("MUXK_FUZZ", "2000"))
"""Policies and expressions that this file generates; `make fuzz` asks for 100,000."""
LONGEST_S = 1.0
"""Of one thread's own time, for anything that is done with one text."""
POLICIES_SHARE = 0.06
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""The text follows from a seed; a smaller seed is not a smaller text."""
seeds = st.integers(0, 2**64 - 1)


class Progress:
    """Tells how far a long run is, and what was the slowest."""

    def __init__(self, what: str, examples: int) -> None:
        self._what, self._examples = what, examples
        self._done, self._accepted, self._slowest_s = 0, 0, 0.0

    def note(self, accepted: bool, seconds: float) -> None:
        self._done += 1
        self._accepted += accepted
        self._slowest_s = max(self._slowest_s, seconds)
        if EXAMPLES > 2000 and self._done % 1000 == 0:
            print(f"{self}", file=sys.__stderr__, flush=True)

    def __str__(self) -> str:
        share = self._accepted / max(1, self._done)
        slowest = f"slowest {self._slowest_s * 1000:.0f} ms"
        return f"{self._done:,} of {self._examples:,} {self._what}: {share:.0%} accepted, {slowest}"


POLICY_EXAMPLES = int(EXAMPLES * POLICIES_SHARE)
policies_progress = Progress("policies", POLICY_EXAMPLES)
expressions_progress = Progress("expressions", EXAMPLES - POLICY_EXAMPLES)


@contextlib.contextmanager
def no_hang(text: str) -> Iterator[Callable[[], float]]:
    """Fails when the block takes longer than it may, in the thread's own time.

    Without collections of garbage: after 80,000 examples, which hypothesis keeps, one takes a second.
    """
    gc.disable()
    start, took = time.thread_time(), 0.0
    try:
        yield lambda: took
        took = time.thread_time() - start
    finally:
        gc.enable()
    assert took < LONGEST_S, f"{took:.1f} s for {text!r}"


def check_places(problems: Sequence[Problem], text: str) -> None:
    """Every problem stands in the file or in the shipped one that it extends, and says something."""
    lines = normalise(text).split("\n")
    assert problems
    for problem in problems:
        assert problem.message.strip()
        assert problem.message.isprintable(), problem.message
        assert problem.column >= 1
        if problem.file == "fuzz.yaml":
            assert 1 <= problem.line <= len(lines), problem
            assert problem.source_line == lines[problem.line - 1]
            assert problem.column <= len(problem.source_line) + 1, problem
        else:
            assert problem.file.removesuffix(".yaml") in (*shipped_policies(), "defaults")
    assert str(PolicyError(problems)).endswith(("error", "errors"))


@settings(max_examples=POLICY_EXAMPLES, deadline=None, phases=WITHOUT_SHRINKING, suppress_health_check=SLOW)
@given(seed=seeds)
def test_a_policy_is_compiled_or_refused_with_places_within_a_second_and_always_the_same(seed: int) -> None:
    random = Random(seed)
    text = random.choice((right_policy, nearly_right_policy, nearly_right_policy, hostile_policy))(random)
    with no_hang(text) as seconds:
        compiled_one = outcome(text)
    with no_hang(text):
        checked = check_policy(text, "fuzz.yaml")
    policies_progress.note(isinstance(compiled_one, CompiledPolicy), seconds())
    if isinstance(compiled_one, PolicyError):
        assert checked.policy is None
        check_places(compiled_one.problems, text)
        assert set(compiled_one.problems) <= set(checked.problems), "the same mistakes each time"
        return
    assert checked.policy is not None
    assert checked.policy.sha == compiled_one.sha
    if checked.problems:
        check_places(checked.problems, text)
    for calm in (True, False):
        ask_everything(compiled_one, ViewMaker(random, calm))


@settings(
    max_examples=EXAMPLES - POLICY_EXAMPLES,
    deadline=None,
    phases=WITHOUT_SHRINKING,
    suppress_health_check=SLOW,
)
@given(seed=seeds)
def test_an_expression_has_a_value_of_its_type_or_an_error_or_a_reported_problem(seed: int) -> None:
    random = Random(seed)
    place, wanted = random.choice(tuple(PLACES)), random.choice(EXPRESSIONS)
    declared = Declared({"share": Type.PERCENT, "burst": Type.NUMBER, "patience": Type.DURATION})
    slips = random.choice([0.0, 0.0, 0.05, 0.3])
    text = ExpressionWriter(random, declared, slips).write(wanted, place, random.choice([1, 2, 3, 5]))
    report = Report()
    scalar = Scalar(text, Style.PLAIN, Source("fuzz.yaml", text).mark(0), 0, len(text))
    scopes = [ViewMaker(random, calm).scope(place) for calm in (True, False)]
    with no_hang(text) as seconds:
        expression = compile_expression(scalar, Type.ANY, vocabulary(place, declared.constants), report)
        for scope in scopes if expression is not None else ():
            with contextlib.suppress(RuleError):
                check_value(expression(scope), expression.type)
    expressions_progress.note(expression is not None, seconds())
    if expression is None:
        check_places(report.problems, text)
        return
    assert not report
    assert expression.type in EXPRESSIONS


def outcome(text: str) -> CompiledPolicy | PolicyError:
    try:
        return compile_policy(text, "fuzz.yaml")
    except PolicyError as error:
        return error


def check_value(value: Any, type_: Type) -> None:
    if type_ is Type.BOOL:
        assert isinstance(value, bool)
    elif type_ is Type.NAME:
        assert isinstance(value, str)
    else:
        assert isinstance(value, int | float)
        assert not isinstance(value, bool)
        assert math.isfinite(value)


def test_policies_that_are_meant_to_be_right_are_right() -> None:
    refused = []
    for seed in range(60):
        text = right_policy(Random(seed))
        if isinstance(result := outcome(text), PolicyError):
            refused.append(f"{text}\n{result}")
    assert len(refused) <= 3, "\n".join(refused[:3])


def test_every_decision_point_of_the_language_is_generated() -> None:
    assert set(ANSWERS) == set(POINTS)
    assert set(EXPRESSIONS) == set(Type) - {Type.ANY}
