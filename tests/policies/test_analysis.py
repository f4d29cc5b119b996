"""Warnings of policies: what is told. That nothing is told that is not so: `test_analysis_truth.py`."""

from __future__ import annotations

import pytest
from muxk.policies.checking import check_policy
from muxk.policies.engine import shipped_policies
from muxk.policies.problems import Severity
from muxk.policies.shipped_files import shipped_text
from policy_texts import LAST, codes, policy, split, told


@pytest.mark.parametrize("name", [*shipped_policies(), "defaults"])
def test_a_shipped_policy_gives_no_warning_and_no_note(name: str) -> None:
    assert check_policy(shipped_text(name), f"{name}.yaml").problems == ()


@pytest.mark.parametrize("name", shipped_policies())
def test_a_policy_that_only_extends_a_shipped_one_gives_no_warning(name: str) -> None:
    assert codes(policy(f"extends: {name}")) == []


@pytest.mark.parametrize(
    "condition",
    [
        "queue.tokens < 0",
        "decode.batch > 5 and decode.batch < 3",
        "decode.batch == 3 and decode.batch != 3",
        "queue.requests == 2.5",
        "1 < queue.requests < 2",
        "running.active and not running.active",
        "kv.free > kv.total",
        "kv.free < 10% * kv.total and kv.free > 20% * kv.total",
        "(decode.batch > 3 or kv.free < 2) and decode.batch < 2 and kv.free > 7",
        "not (decode.batch > 3 or decode.batch <= 3)",
        "min(decode.batch, kv.free) < 0",
        "candidate.fits and not candidate.waiting",
        "prefill.pending and not (running.active or parked.waiting or candidate.waiting)",
        "estimate.known and estimate.decode(4) < 0ms",
        "decode.idle > 5ms and decode.idle < 1ms",
        "decode.waiting == decode.in_flight and decode.waiting and not decode.in_flight",
        "decode.batch > kv.free and kv.free >= decode.batch",
        "(decode.batch if decode.waiting else kv.free) < 0",
        "false",
    ],
)
def test_a_condition_that_can_not_hold_is_told(condition: str) -> None:
    assert "never-true" in codes(split(condition))


@pytest.mark.parametrize(
    "condition",
    [
        "decode.batch < 1 and kv.free > 0",
        "decode.batch != 3 and decode.batch != 4",
        "kv.free < kv.total",
        "kv.free < 20% * kv.total and kv.free > 10% * kv.total",
        "decode.batch - kv.free < 0",
        "queue.requests > 2 or kv.free < 3",
        "decode.idle > 1ms and decode.idle < 5ms",
        "running.active or parked.waiting",
        "running.active and running.depth == 0",
        "candidate.waiting and running.active and candidate.new_tokens < running.new_tokens",
        "not candidate.waiting or candidate.new_tokens > 5",
        "candidate.new_tokens > 5 if candidate.fits else decode.batch > 3",
        "estimate.known and estimate.decode(4) < slo.tbt",
        "decode.batch % 2 == 1",
        "0 < decode.batch < 8",
    ],
)
def test_an_ordinary_condition_gives_no_warning(condition: str) -> None:
    assert codes(split(condition)) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("decode.batch == 0", "decode.batch == 0"),
        ("decode.batch == 0", "decode.batch < 1 and kv.free < 5"),
        ("kv.free < 20% * kv.total", "kv.free < 10% * kv.total"),
        ("queue.tokens > 10", "queue.tokens > 20 or queue.tokens == 15"),
        ("decode.batch > 3 or kv.free < 5", "decode.batch > 7"),
        ("not decode.waiting", "not decode.waiting and decode.batch > 3"),
        ("decode.batch <= kv.free", "kv.free > decode.batch"),
        ("decode.idle > 1ms", "decode.idle >= 1500us"),
    ],
)
def test_a_rule_that_an_earlier_one_covers_is_told_with_the_line_of_that(first: str, second: str) -> None:
    (problem,) = check_policy(split("queue.requests > 99", first, second)).problems
    assert (problem.line, problem.code, problem.severity) == (8, "unreachable-rule", Severity.WARNING)
    assert "rule 'r1' on line 7" in problem.hint


def test_the_catch_all_is_told_when_the_rules_before_it_cover_every_case() -> None:
    found = told(split("decode.batch == 0", "decode.batch > 0"))
    assert found == [(8, 7, "unreachable-rule")]


def test_what_comes_after_a_condition_that_always_holds_is_told_once() -> None:
    assert told(split("decode.batch >= 0", "kv.free > 3")) == [(6, 24, "always-true")]


def test_a_param_is_not_taken_for_its_value() -> None:
    params = "params:\n  least: {type: number, default: 0, min: 0}"
    assert codes(split("decode.batch < params.least", more=params)) == ["switched-off"]


def test_a_rule_behind_a_switch_is_told_only_where_someone_turned_the_switch_off() -> None:
    text = split("params.on and decode.batch > 2", more="params:\n  on: {type: bool, default: %s}")
    assert codes(text % "false") == []
    (note,) = check_policy(text % "true", settings={"on": "false"}).problems
    assert (note.code, note.line) == ("switched-off", 6)


def test_the_bounds_of_a_param_count() -> None:
    params = "params:\n  least: {type: number, default: 5, min: 2, max: 8}"
    assert codes(split("params.least > 8 and decode.batch > 1", more=params)) == ["never-true"]
    assert codes(split("params.least > 7 and decode.batch > 1", more=params)) == ["switched-off"]


@pytest.mark.parametrize(
    ("condition", "column"),
    [
        ("queue.tokens > 10 and queue.tokens > 5", 47),
        ("decode.batch > 3 or decode.batch > 5", 45),
        ("kv.free < 5 and (decode.batch > 3 or decode.batch >= 4)", 62),
        ("decode.batch >= 0 and kv.free < 3", 25),
        ("decode.waiting and kv.free < 3 and decode.waiting", 60),
    ],
)
def test_a_part_that_never_matters_is_told_at_its_place(condition: str, column: int) -> None:
    assert told(split(condition)) == [(6, column, "redundant-condition")]


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ('split:\n  - {name: a, when: "running.depth == 0", then: {prefill: all}}\n  - ' + LAST, (6, 24)),
        ('split:\n  - {name: a, when: "queue.tokens > 3", then: {decode: running.requests, prefill: rest}}\n'
         f"  - {LAST}", (6, 58)),
        ("slice: {tokens: candidate.new_tokens}", (5, 19)),
        ('slice:\n  - {name: a, when: "parked.age > 1s or parked.waiting", then: {layers: 1}}\n'
         "  - {name: b, then: {layers: 2}}", (6, 24)),
        ("variables: {old: running.age}\n"
         'split:\n  - {name: a, when: "vars.old > 1s", then: {prefill: all}}\n  - ' + LAST, (7, 24)),
    ],
)  # fmt: skip
def test_a_batch_that_may_be_absent_needs_its_guard(spec: str, place: tuple[int, int]) -> None:
    assert told(policy(spec)) == [(*place, "unguarded-batch")]


@pytest.mark.parametrize(
    "spec",
    [
        'preempt:\n  - {name: a, when: "running.depth == 0 and candidate.requests < 3", then: park}\n'
        "  - {name: b, then: continue}",
        'split:\n  - {name: a, when: "not running.active", then: {prefill: all}}\n'
        '  - {name: b, when: "running.depth == 0", then: {decode: all}}\n  - ' + LAST,
        'split:\n  - {name: a, when: "candidate.fits", then: {decode: candidate.requests, prefill: rest}}\n'
        f"  - {LAST}",
        'slice:\n  - {name: a, when: "not (parked.waiting or candidate.waiting)", '
        "then: {tokens: running.new_tokens}}\n  - {name: b, then: {layers: 2}}",
    ],
)
def test_a_guard_may_stand_before_or_follow_from_the_point(spec: str) -> None:
    assert codes(policy(spec)) == []


def test_a_variable_may_hold_its_own_guard() -> None:
    variables = (
        "variables:\n  full: estimate.known and estimate.decode(2) > slo.tbt\n"
        "  old: running.active and running.age > 1s"
    )
    assert codes(split("vars.full", "not vars.full and vars.old", more=variables)) == []
    bare = "variables:\n  full: estimate.decode(2) > slo.tbt"
    assert told(split("estimate.known and vars.full", more=bare)) == []
    assert told(split("decode.batch > 2 and vars.full", more=bare)) == [(6, 46, "unguarded-estimate")]


def test_an_earlier_rule_guards_nothing_if_it_may_fail_and_the_next_is_asked() -> None:
    rules = (
        "split:\n"
        '  - {name: a, when: "not running.active and 1 / kv.free < 1", then: {prefill: all}}\n'
        '  - {name: b, when: "running.depth == 0", then: {decode: all}}\n'
        f"  - {LAST}"
    )
    assert codes(policy(rules)) == ["unguarded-batch"]


def test_a_rule_behind_one_that_may_fail_is_reached_with_on_error_next() -> None:
    rules = ("10 / kv.free > 1", "10 / kv.free > 2")
    assert codes(split(*rules)) == ["unreachable-rule"]
    assert codes(split(*rules, more="on_error: next")) == []


def test_estimates_before_anything_was_measured_are_a_note() -> None:
    fit = "split: {decode: fit, prefill: rest, otherwise: {decode: most, prefill: rest}}"
    (problem,) = check_policy(policy(fit)).problems
    assert (problem.code, problem.severity) == ("unguarded-estimate", Severity.NOTE)


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("units >= 1", "always-true"),
        ("units < 0", "never-true"),
        ("decode.batch > 3", "fewest-without-units"),
        ("units >= 2 and decode.batch > 3", None),
    ],
)
def test_what_fewest_asks_depends_on_the_split_that_is_tried(condition: str, code: str | None) -> None:
    fallback = "otherwise: {decode: most, prefill: rest}"
    spec = f"split: {{decode: fewest where {condition}, prefill: rest, {fallback}}}"
    assert codes(policy(spec)) == ([] if code is None else [code])


@pytest.mark.parametrize(
    ("spec", "code", "line"),
    [
        ("params:\n  gone: {type: number, default: 1}", "unused-param", 6),
        ("variables:\n  gone: queue.tokens + 1", "unused-variable", 6),
        ("params:\n  one: {type: number, default: 1, min: 1, max: 1}\n"
         "form: {requests: params.one, tokens: 9}",
         "fixed-param", 6),
        ("classes:\n  - {name: a, when: request.priority < 3}\n  - {name: b}", "idle-classes", 6),
        ("classes:\n  - {name: a, when: request.priority < 3, share: 2}\n"
         "  - {name: b, when: request.priority < 2}\n  - {name: c}", "unreachable-class", 7),
        ("classes:\n  - {name: a, when: request.priority < 3 and request.priority > 4, share: 2}\n"
         "  - {name: c}", "never-true", 6),
        ("extends: inflight\nclasses:\n  - {name: a, when: request.priority < 3, slo: {tbt: 9ms}}\n"
         "  - {name: c}", "unread-slo", 7),
        ("extends: chunked\nclasses:\n  - {name: a, when: request.priority < 3, slo: {ttft: 9ms}}\n"
         "  - {name: c}", "unread-slo", 7),
    ],
)  # fmt: skip
def test_what_nobody_reads_is_told(spec: str, code: str, line: int) -> None:
    assert [(problem[0], problem[2]) for problem in told(policy(spec))] == [(line, code)]


def test_a_class_of_a_known_set_is_used_up() -> None:
    spec = (
        "classes:\n  - {name: a, when: request.priority < 3, share: 2}\n  - {name: b}\n"
        "admit:\n"
        "  - {name: x, when: request.class == 'a', then: accept}\n"
        "  - {name: y, when: request.class == 'b', then: accept}\n"
        "  - {name: z, then: accept}"
    )
    assert told(policy(spec)) == [(11, 7, "unreachable-rule")]


def test_classes_with_slos_that_rules_read_give_no_warning() -> None:
    spec = (
        "extends: muxwise\nclasses:\n  - {name: a, when: request.class == 'a', slo: {tbt: 20ms, ttft: 1s}}\n"
        "  - {name: b, max_wait: 60s}"
    )
    assert codes(policy(spec)) == []


def test_an_earlier_version_is_told_at_the_place_in_the_file() -> None:
    text = split("kv.free < 5 and kv.free < 4KiB and not (kv.free < 5)").replace("v1beta1", "v1alpha1")
    assert told(text) == [(1, 13, "old-api-version"), (6, 60, "never-true")]


def test_reasoning_about_a_hostile_policy_ends() -> None:
    parts = [f"(decode.batch > {i} or kv.free < {i} or queue.tokens == {i})" for i in range(8)]
    text = split(*(" and ".join(parts) + f" and queue.requests != {i}" for i in range(40)))
    assert check_policy(text).policy is not None
