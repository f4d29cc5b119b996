"""Warnings of policies: what is told, and that nothing is told that is not so."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, View
from muxk.kernel.work import Split
from muxk.policies.checking import CheckedPolicy, check_policy
from muxk.policies.engine import compile_policy, shipped_policies
from muxk.policies.formulas import Budget, Numbers, Words, contradictory
from muxk.policies.problems import Severity
from muxk.policies.shipped_files import shipped_text

MS = 1_000_000
HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: test}\nspec:\n"
LAST = "{name: last, then: {prefill: all}}"


def policy(spec: str) -> str:
    return HEAD + "".join(f"  {line}\n" for line in spec.splitlines())


def split(*conditions: str, more: str = "") -> str:
    """A policy whose split asks conditions in turn; rule i is on line 6 + i."""
    rules = [
        f'  - {{name: r{i}, when: "{when}", then: {{prefill: all}}}}' for i, when in enumerate(conditions)
    ]
    return policy("\n".join(["split:", *rules, f"  - {LAST}", more]).rstrip())


def told(text: str) -> list[tuple[int, int, str]]:
    """Line, column and code of every problem; the text has no errors."""
    checked = check_policy(text)
    assert checked.policy is not None, "\n".join(map(str, checked.problems))
    return [(problem.line, problem.column, problem.code) for problem in checked.problems]


def codes(text: str) -> list[str]:
    return [code for _, _, code in told(text)]


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


# --- nothing is told that is not so ---

NAMES = ("decode.batch", "queue.requests", "kv.free", "kv.total", "prefill.in_flight", "units.total")
FLAGS = ("decode.waiting", "running.active", "candidate.waiting", "candidate.fits", "prefill.pending")
small = st.integers(0, 4).map(str)
values = st.one_of(
    st.sampled_from(NAMES),
    st.builds("{} + {}".format, st.sampled_from(NAMES), small),
    st.builds("{} - {}".format, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.builds("{} * {}".format, small, st.sampled_from(NAMES)),
    st.builds("min({}, {})".format, st.sampled_from(NAMES), small),
    st.builds("clamp({}, 1, {})".format, st.sampled_from(NAMES), small),
    st.builds("({} if {} else {})".format, small, st.sampled_from(FLAGS), st.sampled_from(NAMES)),
    st.just("10 / queue.requests"),
    st.just("params.n"),
    st.just("vars.two"),
)
SHARES = st.sampled_from(["50% * kv.total", "kv.total * 0.25"])
signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
batches = st.builds("running.depth {} {}".format, signs, small)
atoms = st.one_of(
    st.builds("{} {} {}".format, values, signs, small),
    st.builds("{} {} {}".format, values, signs, values),
    st.builds(
        "{} {} {}".format,
        st.sampled_from(NAMES),
        signs,
        SHARES,
    ),
    st.builds("{} <= {} < {}".format, small, st.sampled_from(NAMES), small),
    st.sampled_from(FLAGS),
    st.builds("{} {} {}ms".format, st.just("decode.idle"), signs, small),
    batches,
)
conditions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + " and ".join(parts) + ")"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + " or ".join(parts) + ")"),
        inner.map("not ({})".format),
        st.builds("({}) == ({})".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, st.sampled_from(FLAGS), inner),
    ),
    max_leaves=6,
)
MORE = "params: {n: {type: number, default: 2, min: 1, max: 3}}\nvariables: {two: 2 * decode.batch}"


def batch(dice: random.Random) -> PrefillView:
    return PrefillView(1, 1, dice.randint(0, 40), 0, 10, 3, 0, 10 * MS, dice.randint(0, 2), 0)


def some_views(count: int, seed: int) -> list[View]:
    """Views with small numbers, so that comparisons hit their edges."""
    dice = random.Random(seed)
    estimates = Estimates(4, (DecodeModel(1, 1e6, 1.0, 1.0, 1.0),), (PrefillModel(1, 1e5, 1.0, 1.0, 1.0),))
    found = []
    for _ in range(count):
        total = dice.randint(1, 4)
        units = dice.randint(1, 4)
        decode = DecodeView(dice.randint(0, 4), 4, dice.random() < 0.5, False, dice.randint(0, 4) * MS)
        batches = [batch(dice) if dice.random() < 0.5 else None for _ in range(3)]
        found.append(
            View(
                100 * MS, units, tuple(Split(n, units - n) for n in range(1, units)), Split(units, units), 4,
                decode, *batches, dice.randint(0, 4), QueueView(dice.randint(0, 4), dice.randint(0, 40)),
                KvView(total, dice.randint(0, total)), estimates,
            )
        )  # fmt: skip
    return found


VIEWS = some_views(100, 7)


def fired(checked: CheckedPolicy) -> list[str]:
    """The rule of split that answers each view."""
    assert checked.policy is not None
    return [checked.policy.decide(view).rules[0] for view in VIEWS]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(conditions, min_size=1, max_size=4), st.sampled_from(["default", "next", "base"]), st.booleans()
)
def test_a_rule_that_is_told_never_to_match_never_answers(
    rules: list[str], on_error: str, extends: bool
) -> None:
    more = f"{MORE}\non_error: {on_error}" + ("\nextends: muxwise" if extends else "")
    for n in ("1", "3"):
        checked = check_policy(split(*rules, more=more), settings={"n": n})
        answers = fired(checked)
        for problem in checked.problems:
            rule = "last" if problem.line == 6 + len(rules) else f"r{problem.line - 6}"
            if problem.code in ("never-true", "unreachable-rule", "switched-off"):
                assert f"split/{rule}" not in answers, problem
            if problem.code == "always-true":
                later = [f"split/r{i}" for i in range(problem.line - 5, len(rules))]
                assert not any(answer in [*later, "split/last"] for answer in answers), problem


def answers_of(condition: str) -> list[Any]:
    compiled = compile_policy(split(condition, more=MORE))
    return [compiled.decide(view).rules[0] for view in VIEWS]


@settings(max_examples=60, deadline=None)
@given(st.lists(atoms.filter(lambda atom: atom.count("<") < 2), min_size=2, max_size=4), st.booleans())
def test_a_part_that_is_told_never_to_matter_can_go(parts: list[str], is_and: bool) -> None:
    word = " and " if is_and else " or "
    offsets = [len(word.join([*parts[:i], ""])) for i in range(len(parts))]
    whole = word.join(parts)
    found = check_policy(split(whole, more=MORE)).problems
    idle = [problem.column for problem in found if problem.code == "redundant-condition"]
    kept = [part for part, offset in zip(parts, offsets, strict=True) if offset + 25 not in idle]
    pairs = zip(answers_of(whole), answers_of(word.join(kept)), strict=True)
    assert all(a == b for a, b in pairs if "split/default" not in (a, b))


@settings(max_examples=60, deadline=None)
@given(conditions)
def test_a_batch_without_a_warning_is_never_absent(condition: str) -> None:
    checked = check_policy(split(condition, more=MORE))
    if "unguarded-batch" not in [problem.code for problem in checked.problems]:
        assert checked.policy is not None
        errors = [error for view in VIEWS for error in checked.policy.decide(view).errors]
        assert not any("absent" in error for error in errors)


def test_the_views_reach_the_edges() -> None:
    hit: Callable[[str], bool] = lambda when: "split/r0" in fired(check_policy(split(when)))  # noqa: E731
    assert all(hit(f"{name} == {value}") for name in NAMES[:3] for value in (0, 1, 3))
    assert hit("running.active and running.depth == 2")
    assert len({msgspec.json.encode(view) for view in VIEWS}) > 60


def test_domains_know_their_ends() -> None:
    whole = Numbers(low=0, whole=True)
    assert whole.meet("<", 1) == Numbers(0, 0, whole=True)
    assert whole.meet("!=", 0).meet("<=", 1).meet("!=", 1) is None  # type: ignore[union-attr]
    assert Numbers(low=0).meet("<", 1) is not None
    assert Numbers().meet(">=", 3).meet("<=", 3).meet("!=", 3) is None  # type: ignore[union-attr]
    assert Words(("a", "b")).meet("!=", "a").meet("!=", "b") is None  # type: ignore[union-attr]
    assert Words().meet("!=", "a") is not None


def test_a_question_that_takes_too_long_counts_as_possible() -> None:
    budget = Budget(0)
    assert not contradictory([], budget)


def test_every_code_is_documented() -> None:
    root = Path(__file__).parents[2]
    sources = [
        (root / "policies" / f"{name}.py").read_text("utf-8") for name in ("analysis", "rule_analysis")
    ]
    found = {code for source in sources for code in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', source)}
    text = (root / "docs" / "warnings.md").read_text(encoding="utf-8")
    assert len(found) > 8
    assert [code for code in sorted(found) if f"`{code}`" not in text] == []
