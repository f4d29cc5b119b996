"""Mistakes in policy files: where they are shown, and that one run shows all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from muxk.policies.engine import compile_policy, load_policy
from muxk.policies.problems import PolicyError, Problem

Text = Callable[[str], str]


def problems(text: str, settings: dict[str, str] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(PolicyError) as raised:
        compile_policy(text, "p.yaml", settings)
    return raised.value.problems


def places(found: tuple[Problem, ...]) -> list[tuple[int, int]]:
    return [(problem.line, problem.column) for problem in found]


FIVE_MISTAKES = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: five}
spec:
  slo: {tbt: 100}
  limts: {queue: 3}
  split:
    - name: first
      when: >-
        decode.batch == 0 and
        prefil.pending
      then: {prefill: all}
    - {name: second, when: "queue.tokens > 1", then: {decode: all}}
  retain: kep
"""


def test_five_mistakes_in_one_file_give_five_errors_in_one_run() -> None:
    found = problems(FIVE_MISTAKES)
    assert places(found) == [(5, 14), (6, 3), (11, 9), (13, 7), (14, 11)]
    assert "needs a unit" in found[0].hint
    assert found[1].hint == "did you mean 'limits'?"
    assert found[2].hint == "did you mean 'prefill.pending'?"
    assert "catch-all" in found[3].message
    assert found[4].hint == "did you mean 'keep'?"


NEWCOMER = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: first-try}
spec:
  extends: muxwise
  slo: {tbt: 50}
  limit: {queue: 100}
  order:
    - {name: soon, then: {by: request.deadline}}
    - {name: short, when: queue.requests > 10, then: {by: request.prompt_tokens}}
  preempt:
    - {name: short-first, when: candidate.tokens < 1k, then: park}
"""


def test_a_newcomer_learns_of_five_mistakes_in_one_run_each_with_place_and_remedy() -> None:
    told = [(p.line, p.column, p.message, p.hint) for p in problems(NEWCOMER)]
    assert told == [
        (6, 14, "this must be a duration, not a number", "a time needs a unit, such as 50ms or 2s"),
        (7, 3, "unknown key 'limit' in spec", "did you mean 'limits'?"),
        (10, 7, "this rule of order can never be reached",
         "rule 'soon' before it always matches; give that one a 'when'"),
        (12, 7, "the last rule of preempt must always match: it is the catch-all",
         "end with a rule that has no 'when', such as - {name: otherwise, then: ...}, or with - base"),
        (12, 33, "unknown name 'candidate.tokens' in preempt", "did you mean 'candidate.new_tokens'?"),
    ]  # fmt: skip


def test_an_error_reads_as_place_line_caret_and_hint() -> None:
    with pytest.raises(PolicyError) as raised:
        compile_policy(FIVE_MISTAKES, "five.yaml")
    shown = str(raised.value).splitlines()
    assert shown[4:8] == [
        "five.yaml:6:3: unknown key 'limts' in spec",
        "    6 |   limts: {queue: 3}",
        "      |   ^",
        "      hint: did you mean 'limits'?",
    ]
    assert shown[-1] == "5 errors"


@pytest.mark.parametrize(
    ("spec", "place", "message"),
    [
        ("slo: {tbt: 0ms}", (5, 14), "more than 0"),
        ("slo: {ttft: 10}", (5, 15), "needs a unit"),
        ("slo: {ttft: 10ms/tok}", (5, 15), "not a time"),
        ("slo: {ttft: 1s + 2s}", (5, 15), "two terms"),
        ("limits: {backlog: 9}", (5, 21), "from 1 to 4"),
        ("limits: {queue: 1.5}", (5, 19), "whole number"),
        ("limits: {queue: decode.batch}", (5, 19), "not known in limits"),
        ("limits: {decode_floor: 3}", (5, 26), "must be a duration"),
        ("on_error: panic", (5, 13), "default, next or base"),
        ("classes: []", (5, 12), "1 to 32 classes"),
        ("extends: muxwize", (5, 12), "no shipped policy"),
        ("split: []", (5, 10), "must always match"),
        ("split: [{name: a, then: {decode: all}}, {name: b, then: {decode: all}}]", (5, 43), "be reached"),
        ("split: [{name: a, when: true, then: {decode: all}}, {name: b, then: 1}]", (5, 55), "be reached"),
        ("split: [{then: {decode: all}}]", (5, 11), "needs 'name'"),
        ("split: [{name: a}]", (5, 11), "needs 'then'"),
        ("split: [{name: a b, then: {decode: all}}]", (5, 18), "name must be a word"),
        ("split: {decode: most, prefill: all}", (5, 10), "overlap"),
        ("split: {decode: rest, prefill: rest}", (5, 10), "rest"),
        ("split: {decode: none}", (5, 10), "neither"),
        ("split: {}", (5, 10), "neither"),
        ("split: {prefill: fastest}", (5, 20), "for decode"),
        ("split: {decode: fewest where units > 1, prefill: rest}", (5, 10), "needs `otherwise`"),
        ("split: {decode: {}, prefill: rest}", (5, 19), "not a mapping"),
        ("split: {decode: {fewest: units > 1}, otherwise: {decode: all}}", (5, 19), "fewest where units > 1"),
        ("split: {decode: fewest units > 1, prefill: rest}", (5, 19), "write fewest where units > 1"),
        ("split: {decode: fewest, prefill: rest}", (5, 19), "write fewest where estimate.decode(units)"),
        ("split: {decode: fewest where unitz > 1, prefill: rest}", (5, 32), "did you mean 'units'"),
        ("split: {decode: fitt, prefill: rest}", (5, 19), "did you mean 'fit'"),
        ("split: {decode: half, prefill: rest}", (5, 19), "a percentage, or all, rest, none"),
        ("split: {decode: fit}", (5, 10), "`fit` needs `otherwise`"),
        ("slice: {layers: al}", (5, 19), "did you mean 'all'"),
        ("slice: {tokens: some}", (5, 19), "'some' is no number of tokens"),
        ("slice: {tokens: 1 + some}", (5, 23), "known here: now, units.*, layers.*"),
        ("split: {decode: rest, prefill: fit, otherwise: {decode: all}}", (5, 34), "`fit` is for decode"),
        ("split: {decode: fit, prefill: rest}", (5, 10), "needs `otherwise`"),
        ("split: {decode: all, otherwise: {decode: all}}", (5, 35), "`otherwise` is for `fewest`"),
        ("split: {decode: units, prefill: rest}", (5, 19), "known in fewest"),
        ("split: {decode: 50ms, prefill: rest}", (5, 19), "must be a number"),
        ("split: {decode: now > now, prefill: rest}", (5, 19), "must be a number"),
        ("slice: {layers: {a: b}}", (5, 19), "an expression is expected"),
        ("slice: {}", (5, 10), "needs 'layers' or 'tokens'"),
        ("slice: {tokens: 50ms}", (5, 19), "must be a number"),
        ("slice: {token: 3}", (5, 11), "did you mean 'tokens'"),
        ("slice: {fuse: decode}", (5, 17), "needs 'tokens'"),
        ("slice: {tokens: 3, fuse: prefill}", (5, 28), "fuse must be decode"),
        ("slice: {tokens: 3, fuse: true}", (5, 28), "fuse must be decode"),
        ("slice: {tokens: 3, layers: 2, fuse: decode}", (5, 39), "'layers' do not go together"),
        ("slice: {layers: estimate.chunk(3)}", (5, 19), "takes 2 arguments"),
        ("slice: {layers: 'estimate.chunk(3, 4)'}", (5, 38), "'time' of estimate.chunk must be a duration"),
        ("slice: all", (5, 10), "must be a mapping"),
        ("preempt: true", (5, 12), "park or continue"),
        ("form: {requests: 3}", (5, 9), "needs 'tokens'"),
        ("order: {by: []}", (5, 15), "sort keys"),
        ("order: {by: request.deadlin}", (5, 15), "unknown name"),
        ("order: []", (5, 10), "must always match"),
        ("admit: [{name: a, then: {refuse: ''}}]", (5, 36), "reason"),
        ("admit: {accept: hello}", (5, 11), "refuse or shed"),
        ("retain: [keep]", (5, 12), "must be a mapping"),
        ("params: {a: {type: text, default: 1}}", (5, 22), "needs a type"),
        ("params: {a: {type: number}}", (5, 15), "needs a default"),
        ("params: {a: {type: percent, default: 3}}", (5, 40), "percentage"),
        ("params: {a: {type: duration, default: 3}}", (5, 41), "a duration is expected"),
        ("params: {a: {type: bool, default: on}}", (5, 37), "true or false"),
        ("params: {a: {type: number, default: 3, max: 2}}", (5, 39), "above"),
        ("params: {a-b: {type: number, default: 3}}", (5, 12), "name must be"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_section_is_told_at_its_place(
    spec: str, place: tuple[int, int], message: str, policy_text: Text
) -> None:
    found = problems(policy_text(spec))
    told = [problem for problem in found if message in problem.message + problem.hint]
    assert places(tuple(told))[:1] == [place], found


def test_a_misspelt_when_is_not_taken_for_a_catch_all(policy_text: Text) -> None:
    rules = "preempt:\n  - {name: a, wen: candidate.waiting, then: park}\n  - {name: b, then: continue}\n"
    (problem,) = problems(policy_text(rules))
    assert problem.message == "unknown key 'wen' in a rule of preempt"


@pytest.mark.parametrize(
    ("spec", "place", "whose"),
    [
        (
            "params:\n  p: {type: number, default: 1, description: of prompts, not of chat, by day}\n",
            (6, 60),
            "description",
        ),
        (
            "split:\n  - {name: a, when: 'true', then: {decode: max(2, 3), prefill: rest}}\n",
            (6, 53),
            "decode",
        ),
    ],
)
def test_a_text_that_a_comma_cut_in_two_is_told_once(
    spec: str, place: tuple[int, int], whose: str, policy_text: Text
) -> None:
    torn = [problem for problem in problems(policy_text(spec)) if problem.code == "torn-text"]
    (problem,) = torn
    assert (problem.line, problem.column) == place
    assert problem.hint == f"put quotes around the text of '{whose}'"


def test_a_misspelt_key_without_a_value_is_not_taken_for_a_torn_text(policy_text: Text) -> None:
    (problem,) = problems(policy_text("slo: {tbt: 50ms, tfft: , ttft: 1s}\n"))
    assert problem.hint == "did you mean 'ttft'?"


def test_two_rules_with_one_name_are_refused(policy_text: Text) -> None:
    rules = "preempt:\n  - {name: a, when: candidate.waiting, then: park}\n  - {name: a, then: continue}\n"
    (problem,) = problems(policy_text(rules))
    assert (problem.line, problem.message) == (7, "preempt has two rules named 'a'")


@pytest.mark.parametrize("text", ["- a\n", "x\n", "spec: 3\n", "apiVersion: v2\nkind: x\nspec: {}\n"])
def test_a_file_that_is_no_policy_is_refused(text: str) -> None:
    assert problems(text)


def test_params_are_settable_and_settings_are_checked(policy_text: Text) -> None:
    spec = (
        "params:\n  floor: {type: duration, default: 1s, min: 10ms, max: 5s}\n"
        "  eager: {type: bool, default: false}\n"
        "limits: {decode_floor: 2 * params.floor}\n"
        "preempt:\n  - {name: a, when: params.eager, then: park}\n  - {name: b, then: continue}\n"
    )
    text = policy_text(spec)
    assert compile_policy(text).limits.decode_floor_ns == 2_000_000_000
    assert compile_policy(text, settings={"floor": "20ms"}).limits.decode_floor_ns == 40_000_000
    assert [rule.label for rule in compile_policy(text).points["preempt"].rules] == ["preempt/b"]
    eager = compile_policy(text, settings={"eager": "true"})
    assert [rule.label for rule in eager.points["preempt"].rules] == ["preempt/a"]
    assert eager.sha != compile_policy(text).sha
    (unknown,) = problems(text, {"flor": "20ms"})
    assert (unknown.file, unknown.hint) == ("--set", "did you mean 'floor'?")
    (low,) = problems(text, {"floor": "1ms"})
    assert (low.file, low.source_line, low.column) == ("--set", "floor=1ms", 7)
    (bare,) = problems(text, {"floor": "20"})
    assert "unit" in bare.hint


def test_a_policy_that_extends_another_restates_only_what_differs(policy_text: Text) -> None:
    child = compile_policy(policy_text("extends: muxwise\nslo: {tbt: 50ms}\npreempt: continue\n"))
    parent = load_policy("muxwise")
    assert child.tbt_slo_ns == 50_000_000
    assert child.ttft == parent.ttft
    assert [rule.label for rule in child.points["split"].rules] == [
        rule.label for rule in parent.points["split"].rules
    ]
    assert [rule.label for rule in child.points["preempt"].rules] == ["preempt/always"]


def test_the_sha_follows_what_a_policy_says_not_its_layout(policy_text: Text) -> None:
    one = compile_policy(policy_text("slo: {tbt: 50ms, ttft: 1s}\nretain: free"))
    other = compile_policy(
        policy_text("retain: 'free'   # a comment\nslo:\n  ttft: 1s\n  tbt: 50ms"), "b.yaml"
    )
    different = compile_policy(policy_text("slo: {tbt: 51ms, ttft: 1s}\nretain: free"))
    assert one.sha == other.sha
    assert one.sha != different.sha
    assert len(one.sha) == 64


def test_files_that_can_not_be_read_are_policy_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path, Path("muxwize")):
        with pytest.raises(PolicyError, match=r":1:1: can not be read"):
            load_policy(path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(PolicyError, match="UTF-8"):
        load_policy(tmp_path / "latin.yaml")
    (tmp_path / "nul.yaml").write_bytes(b"a: \x00")
    with pytest.raises(PolicyError, match="character"):
        load_policy(tmp_path / "nul.yaml")


def test_a_policy_is_found_by_path_and_by_name(tmp_path: Path, policy_text: Text) -> None:
    (tmp_path / "mine.yaml").write_text(policy_text("retain: free"))
    assert load_policy(tmp_path / "mine.yaml").name == "test"
    assert load_policy(str(tmp_path / "mine.yaml")).name == "test"
    assert load_policy("inflight").name == "inflight"


NEAR_MISSES = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: near}
spec:
  extends: muxwse
  params: {burst: {type: numbr, default: 1}}
  order: request.arrival
  form:
    - {when: true, then: {requests: 4, tokens: 2k}}
    - {name: more, then: {requests: 4, tokens: 2k}}
"""


def test_near_misses_are_told_with_what_was_meant() -> None:
    hints = {problem.line: problem.hint for problem in problems(NEAR_MISSES)}
    assert hints == {
        5: "did you mean 'muxwise'?",
        6: "did you mean 'number'?",
        7: "known here: by",
        9: "",
        10: "the rule on line 9 before it always matches; give that one a 'when'",
    }
