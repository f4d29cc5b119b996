"""Test files: what can be written, and how mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.policies.policy_test import read_tests
from muxk.policies.policy_test_spec import PolicyTest
from muxk.policies.problems import PolicyError, Problem

HEAD = "apiVersion: muxk/v1beta1\nkind: PolicyTest\nmetadata: {name: it}\nspec:\n"
POLICY = (
    "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: mine}\nspec: {extends: muxwise}\n"
)
LOAD = "  arrivals: [{name: chat, count: 3, prompt: 20, output: 5}]\n"


def spec(text: str) -> str:
    """A whole file from the sections of a spec, which are written flush left."""
    return HEAD + "".join(f"  {line}\n" for line in text.strip("\n").splitlines())


def only(text: str, directory: Path | None = None) -> PolicyTest:
    (test,) = read_tests(text, "a.test.yaml", directory)
    return test


def problems(text: str, directory: Path | None = None) -> tuple[Problem, ...]:
    with pytest.raises(PolicyError) as caught:
        read_tests(text, "a.test.yaml", directory)
    return caught.value.problems


def complaints(text: str, directory: Path | None = None) -> list[str]:
    return [f"{each.line}:{each.column}: {each.message} [{each.hint}]" for each in problems(text, directory)]


def test_every_mistake_of_a_file_is_told_in_one_run_with_its_place_and_a_remedy() -> None:
    text = spec("""
policy: muxwize
seeds: 4
device: {units: 0, kv_tokens: 4s, costs: {launch: 20, decode_saturation: 0.25}}
arrivals:
  - {name: chat, count: 3, every: 100, prompt: 20, output: 5}
  - {name: chat-1, prompt: 20, output: 5}
  - {name: long, at: 1s, prompt: 0, prefix: 1k from system}
actions:
  - {at: 2s, swap: chunkd}
expect:
  - tbt.mx <= 50ms
  - tbt.max <= 50
  - {for: chatt, that: requests == 3}
  - {at: 1s, that: tbt.max <= 50ms}
  - 1 < 2
""")
    assert complaints(text) == [
        "5:11: there is no policy 'muxwize' [did you mean 'muxwise'?]",
        "6:3: unknown key 'seeds' in the spec of a test [did you mean 'seed'?]",
        "7:19: units must be a whole number from 1 to 256, not '0' []",
        "7:33: kv_tokens must be a number, not '4s' []",
        "7:53: launch must be a duration, not '20' [write 20ms or 20s]",
        "7:76: decode_saturation must be a percentage, not '0.25' [such as 25%]",
        "9:37: every must be a duration, not '100' [write 100ms or 100s]",
        "10:14: the name of a group must not end in a number after '-' "
        "[requests of a group get such names: chat-1, chat-2, ...]",
        "11:7: a group of arrivals needs 'output' []",
        "11:36: prompt must be a whole number from 1 to 1,048,576, not '0' []",
        "11:47: prefix must be a count 'of' a name, not '1k from system' "
        "[such as 1k of system: requests that name 'system' begin with the same tokens]",
        "13:22: there is no policy 'chunkd' [did you mean 'chunked'?]",
        "15:7: unknown name 'tbt.mx' in an expectation [did you mean 'tbt.max'?]",
        "16:18: a duration can not be compared with a number [a time needs a unit, such as 50ms or 2s]",
        "17:13: there is no group of arrivals 'chatt' [did you mean 'chat'?]",
        "18:22: 'tbt.max' is not known in an expectation with 'at' [it is known in an expectation]",
        "19:7: this says nothing about the run [" + f"names here: {', '.join(names_of_requests())}]",
    ]


def names_of_requests() -> list[str]:
    from muxk.policies.expectations import OF_REQUESTS, PLACES

    return list(PLACES[OF_REQUESTS])


def test_a_problem_shows_the_line_with_a_caret() -> None:
    text = spec("policy: muxwise\narrivals: [{name: a, prompt: 2, output: 2}]\nexpect: [tbt.max <= 5 ms]")
    (problem,) = problems(text)
    assert str(problem).splitlines()[:3] == [
        "a.test.yaml:7:25: an operator is missing before 'ms'",
        "    7 |   expect: [tbt.max <= 5 ms]",
        "      |                         ^",
    ]


def test_a_file_without_the_required_sections_says_which() -> None:
    assert [each.message for each in problems(spec("seed: 1"))] == [
        "'policy' is missing, and no policy is in this file",
        "a test needs 'arrivals'",
        "a test needs 'expect'",
    ]


def test_what_is_neither_a_policy_nor_a_test_is_told() -> None:
    text = spec("policy: muxwise\n" + "expect: [finished == 3]").replace("PolicyTest", "PolicyTset") + LOAD
    (problem,) = problems(text)
    assert (problem.message, problem.hint) == (
        "kind must be PolicyTest, not 'PolicyTset'",
        "did you mean 'PolicyTest'?",
    )


def test_a_test_without_a_policy_takes_the_one_of_its_file() -> None:
    text = POLICY + "---\n" + spec("expect: [finished == 3]") + LOAD
    assert only(text).choice.policy.name == "mine"
    other = POLICY.replace("mine", "other")
    (problem,) = problems(f"{POLICY}---\n{other}---\n{spec('expect: [finished == 3]')}{LOAD}")
    assert "several policies are in this file" in problem.message
    named = f"{POLICY}---\n{other}---\n{spec('policy: other')}  expect: [finished == 3]\n{LOAD}"
    assert only(named).choice.policy.name == "other"


def test_places_in_the_second_document_are_those_of_the_file() -> None:
    broken = POLICY.replace("muxwise", "muxwize")
    text = f"# a comment\n---\n{broken}---\n{spec('policy: muxwise')}  expect: [finshed == 3]\n{LOAD}"
    found = complaints(text)
    line = text.splitlines().index("  expect: [finshed == 3]") + 1
    assert found[0].startswith("6:17: there is no shipped policy 'muxwize' to extend")
    assert found[1].startswith(f"{line}:12: unknown name 'finshed'")


def test_a_policy_is_found_beside_the_test(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(POLICY, encoding="utf-8")
    text = spec("policy: mine.yaml\nexpect: [finished == 3]") + LOAD
    assert only(text, tmp_path).choice.policy.name == "mine"
    assert complaints(text, tmp_path / "elsewhere")[0].startswith("5:11: there is no policy 'mine.yaml'")
    misspelt = text.replace("mine.yaml", "mine.yml")
    assert complaints(misspelt, tmp_path) == [
        "5:11: there is no policy 'mine.yml' [did you mean 'mine.yaml'?]"
    ]


def test_mistakes_of_a_policy_beside_the_test_are_told_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(POLICY + "extra: 1\n", encoding="utf-8")
    (problem,) = problems(spec("policy: mine.yaml\nexpect: [finished == 3]") + LOAD, tmp_path)
    assert problem.file == str(tmp_path / "mine.yaml")
    assert problem.line == 5


def test_a_wrong_setting_is_told_where_it_is_written() -> None:
    text = spec("policy: chunked\nset: {budgett: 64}\nexpect: [finished == 3]") + LOAD
    assert complaints(text) == ["6:18: unknown param 'budgett' [did you mean 'budget'?]"]
    text = spec("policy: chunked\nset: {budget: 0}\nexpect: [finished == 3]") + LOAD
    assert complaints(text)[0].startswith("6:17: '0' is below the least value")


def test_rules_and_classes_that_the_policy_does_not_have_are_told() -> None:
    text = spec("""
policy: muxwise
expect:
  - {rule: split/bestfit, that: hits > 0}
  - {class: chatty, that: finished == 3}
""")
    found = complaints(text + LOAD)
    assert found[0] == "7:14: the policy has no rule 'split/bestfit' [did you mean 'split/best-fit'?]"
    assert found[1].startswith("8:15: the policy has no class 'chatty'")


def test_rules_of_a_policy_that_comes_later_may_be_named() -> None:
    text = spec("""
policy: chunked
actions: [{at: 1s, swap: muxwise}]
expect: [{rule: split/best-fit, that: hits > 0}]
""")
    assert only(text + LOAD).swaps[0].choice.policy.name == "muxwise"


def test_kinds_of_expectations_do_not_mix() -> None:
    text = spec("policy: muxwise\nexpect: [{at: 1s, for: chat, that: live == 3}]") + LOAD
    assert "6:26: 'at' and 'for' do not go together [write two expectations]" in complaints(text)


def test_requests_can_be_named_one_by_one_as_far_as_there_are_any() -> None:
    text = spec("policy: muxwise\nexpect: [{for: [chat-1, chat-3], that: finished == 2}]") + LOAD
    assert only(text).expectations[0].groups == ("chat-1", "chat-3")
    for name in ("chat-4", "chat-0", "chat-01", "chat-", "chat-³"):
        assert "there is no group of arrivals" in complaints(text.replace("chat-3", name))[0]


def test_ranges_are_two_values_in_order() -> None:
    text = spec(
        "policy: muxwise\nexpect: [finished == 1]\narrivals: [{name: a, prompt: 1k to 2k, output: 4}]"
    )
    assert (only(text).arrivals[0].prompt.least, only(text).arrivals[0].prompt.most) == (1000, 2000)
    assert "prompt goes from more to less" in complaints(text.replace("1k to 2k", "2k to 1k"))[0]


def test_costs_of_the_device_keep_parts_of_a_nanosecond() -> None:
    text = spec("policy: muxwise\nexpect: [finished == 3]\ndevice: {costs: {prefill_pair: 0.2ns}}") + LOAD
    assert only(text).device.costs.prefill_pair_ns == 0.2
    assert only(text.replace("0.2ns", "2.5us")).device.costs.prefill_pair_ns == 2500


def test_requests_of_a_test_are_bounded() -> None:
    many = (
        "arrivals: [{name: a, count: 9k, prompt: 2, output: 4}, {name: b, count: 9k, prompt: 2, output: 4}]"
    )
    text = spec(f"policy: muxwise\nexpect: [finished == 1]\n{many}")
    (problem,) = problems(text)
    assert problem.message == "18,000 requests are more than 10,000"
    (problem,) = problems(text.replace("count: 9k, prompt: 2,", "count: 9, prompt: 1M,"))
    assert problem.message == "up to 18,000,000 prompt tokens in all are more than 8,388,608"


def test_two_tests_of_one_name_are_told() -> None:
    one = spec("policy: muxwise\nexpect: [finished == 3]") + LOAD
    (problem,) = problems(f"{one}---\n{one}")
    assert (problem.message, problem.hint) == ("two tests are named 'it'", "the other is on line 3")


def test_what_would_happen_after_the_timeout_is_told() -> None:
    text = spec("""
policy: muxwise
timeout: 1s
arrivals: [{name: a, at: 2s, prompt: 2, output: 4}]
actions: [{at: 3s, swap: chunked}]
expect: [{at: 4s, that: live == 0}]
""")
    assert [each.message for each in problems(text)] == [
        "'a' arrives after the timeout of the test",
        "the swap to chunked is after the timeout of the test",
        "this moment is after the timeout of the test",
    ]


def test_a_text_that_a_comma_cut_in_two_is_explained() -> None:
    text = spec("policy: muxwise\nexpect: [{that: finished == 3, because: no, really}]") + LOAD
    assert complaints(text) == [
        "6:47: inside { } a comma ends a text [put quotes around the text of 'because']",
    ]
    text = spec("policy: muxwise\nexpect: [{that: max(tbt.max, ttft.max) < 1s}]") + LOAD
    assert complaints(text) == [
        "6:32: inside { } a comma ends a text [put quotes around the text of 'that']",
    ]


WHOLE = spec("policy: muxwise\nexpect: [{for: chat, that: tbt.p99 <= 5ms}, {at: 1s, that: live == 0}]") + LOAD
PIECES = [
    ": ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    ",",
    "'",
    "\n",
    "  ",
    "---\n",
    "1e9",
    "-1",
    "%",
    "5ms",
    "spec",
    "\t",
    "#",
    "&a",
]


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 9), st.sampled_from(PIECES)), max_size=4
    )
)
def test_a_damaged_file_is_read_or_refused_with_places(edits: list[tuple[int, int, str]]) -> None:
    text = WHOLE
    for at, cut, piece in edits:
        text = text[:at] + piece + text[at + cut :]
    try:
        told: tuple[Problem, ...] = ()
        read_tests(text, "a.test.yaml")
    except PolicyError as error:
        told = error.problems
    assert all(each.line >= 1 and each.message for each in told)


BROKEN = "  arrivals: {}\n  expect: 3\n  device: []\n  actions: x\n  set: 4\n"


@pytest.mark.parametrize("text", ["", "[]", "a: b", "a: [", HEAD, HEAD + BROKEN, "---\n" + HEAD + "---\n[1]"])
def test_broken_files_are_refused_with_a_place(text: str) -> None:
    assert all(each.line >= 1 and each.message for each in problems(text))
