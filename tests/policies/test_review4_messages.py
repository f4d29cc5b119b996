"""Messages that a newcomer ran into, and that said something else than what was wrong."""

from __future__ import annotations

import pytest
from muxk.policies.engine import compile_policy
from muxk.policies.policy_test import read_tests
from muxk.policies.problems import PolicyError, Problem

POLICY = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: p}
spec:
  extends: muxwise
  variables: {load: decode.batch(2)}
  split:
    - {name: a, when: decode.batch(3) > 2, then: {decode: all}}
    - {name: b, when: vars.load > 2, then: {decode: all}}
    - base
"""
TEST = """apiVersion: muxk/v1beta1
kind: PolicyTest
metadata: {name: t}
spec:
  policy: muxwise
  arrivals: [{name: a, prompt: 5, output: 5}, {name: a, prompt: 5, output: 5}]
  expect: ["tbt.p99(a) <= 50ms"]
"""


def problems(error: pytest.ExceptionInfo[PolicyError]) -> list[tuple[int, int, str, str]]:
    def told(problem: Problem) -> tuple[int, int, str, str]:
        return problem.line, problem.column, problem.message, problem.hint

    return [told(problem) for problem in error.value.problems]


def test_a_name_that_is_called_is_told_as_no_function_and_not_as_unknown() -> None:
    with pytest.raises(PolicyError) as error:
        compile_policy(POLICY, "p.yaml", {})
    told = "'decode.batch' is no function", "write decode.batch without ( )"
    assert problems(error) == [(6, 21, *told), (8, 23, *told)]


def test_of_two_groups_with_one_name_the_second_is_the_mistake() -> None:
    with pytest.raises(PolicyError) as error:
        read_tests(TEST, "t.test.yaml", None, None)
    twice, called = problems(error)[:2]
    assert twice == (6, 47, "two groups of arrivals are named 'a'", "the other is on line 6")
    assert called[2:] == ("'tbt.p99' is no function", "write tbt.p99 without ( )")
