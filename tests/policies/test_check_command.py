"""`muxk check`: what people, scripts and CI read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from muxk.client import cli
from muxk.policies.engine import shipped_policies
from muxk.policies.problems import MAX_PROBLEMS
from typer.testing import CliRunner, Result

HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: mine, version: '1.2'}\nspec:\n"
GOOD = """\
  extends: muxwise
  params:
    burst: {type: percent, default: 90%}
    floor: {type: duration, default: 1s}
  classes:
    - {name: chat, when: request.class == 'chat', slo: {tbt: 30ms, ttft: 300ms}, share: 3}
    - {name: batch, max_wait: 60s}
  limits: {decode_floor: params.floor, queue: 512}
  split:
    - {name: full, when: kv.free < params.burst * kv.total, then: {decode: all}}
    - {name: rest, then: {prefill: all}}
"""
ODD = """\
  slice:
    - {name: a, when: decode.batch < 0, then: {layers: 2}}
    - {name: b, then: {layers: 1}}
"""
ODD_RETAIN = """\
  retain:
    - {name: a, when: request.pages < 0, then: free}
    - {name: b, then: keep}
"""
CHAT = "chat (tbt 30ms, ttft 300ms, share 3)"
FIVE_MISTAKES = """\
  limts: {queue: 3}
  slo: {tbt: 100}
  split:
    - {name: first, when: prefil.pending, then: {prefill: all}}
    - {name: second, when: decode.batch == 0, then: {decode: all}}
  slice:
    - {name: always, then: {layers: 1}}
    - {name: never, when: decode.batch == 0, then: {layers: all}}
"""
TEST = """\
apiVersion: muxk/v1beta1
kind: PolicyTest
metadata: {name: it-works}
spec:
  policy: muxwise
  arrivals: [{name: chat, prompt: 20, output: 3}]
  expect: [finished == 1]
"""


def check(*arguments: str | Path, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli.build_app(), ["check", *map(str, arguments)], input=typed)


def data(*arguments: str | Path, typed: str | None = None) -> Any:
    return json.loads(check(*arguments, "--json", typed=typed).stdout)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def test_the_five_mistakes_of_a_newcomer_are_five_errors_with_place_and_remedy(file: Path) -> None:
    file.write_text(HEAD + FIVE_MISTAKES, encoding="utf-8")
    shown = check(file)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    for place, message, hint in [
        ("5:3", "unknown key 'limts'", "did you mean 'limits'?"),
        ("6:14", "this must be a duration", "a time needs a unit, such as 50ms"),
        ("8:27", "unknown name 'prefil.pending'", "did you mean 'prefill.pending'?"),
        ("9:7", "the last rule of split must always match", "end with a rule that has no 'when'"),
        ("12:7", "this rule of slice can never be reached", "rule 'always' before it always matches"),
    ]:
        assert f"{file}:{place}: {message}" in shown.stderr
        assert f"hint: {hint}" in shown.stderr
    assert shown.stderr.rstrip().endswith("5 errors")


def test_the_codes_of_mistakes_are_stable_words(file: Path) -> None:
    file.write_text(HEAD + FIVE_MISTAKES, encoding="utf-8")
    codes = [problem["code"] for problem in data(file)["problems"]]
    assert codes == ["unknown-key", "wrong-type", "unknown-name", "no-catch-all", "unreachable-rule"]


def test_a_good_file_says_what_it_changes(file: Path) -> None:
    file.write_text(HEAD + GOOD, encoding="utf-8")
    shown = check(file, "--set", "burst=50%")
    assert (shown.exit_code, shown.stderr) == (0, "no errors, no warnings\n")
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"{file}: ok (mine 1.2, ")
    assert [line.split(maxsplit=1) for line in lines[1:]] == [
        ["extends", "muxwise"],
        ["answers", "split (2 rules)"],
        [
            "classes",
            "chat (tbt 30ms, ttft 300ms, share 3); batch (tbt 100ms, ttft 10ms/token, max_wait 1min)",
        ],
        [
            "params",
            "layers = true, polling = true, preemption = true, batch_tokens = 512, burst = 50%, floor = 1s",
        ],
        ["limits", "backlog 2, decode_ahead 1, decode_floor 1s, queue 512, preemptions 16, parked 1GiB"],
    ]


def test_a_warning_is_shown_and_fails_only_with_strict(file: Path) -> None:
    file.write_text(HEAD + ODD, encoding="utf-8")
    shown = check(file)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"{file}: ok (mine 1.2, ")
    assert shown.stderr.splitlines() == [
        f"{file}:6:23: warning: this condition can never hold",
        "    6 |     - {name: a, when: decode.batch < 0, then: {layers: 2}}",
        "      |                       ^",
        "      hint: take the rule out, or correct what it asks for",
        "1 warning",
    ]
    assert check(file, "--strict").exit_code == 1


def test_a_note_does_not_fail_even_with_strict(file: Path) -> None:
    fit = "  split: {decode: fit, prefill: rest, otherwise: {decode: most, prefill: rest}}\n"
    file.write_text(HEAD + fit, encoding="utf-8")
    shown = check(file, "--strict")
    assert (shown.exit_code, "note: 'estimate.decode' has no value" in shown.stderr) == (0, True)


def test_json_has_everything_for_scripts(file: Path) -> None:
    file.write_text(HEAD + GOOD + ODD_RETAIN, encoding="utf-8")
    found = data(file, "--set", "floor=2s")
    assert (found["ok"], found["errors"], found["warnings"], found["notes"]) == (True, 0, 1, 0)
    assert found["problems"] == [
        {
            "file": str(file),
            "line": 17,
            "column": 23,
            "severity": "warning",
            "code": "never-true",
            "message": "this condition can never hold",
            "hint": "take the rule out, or correct what it asks for",
        }
    ]
    (policy,) = found["files"][0]["policies"]
    assert policy.pop("sha")
    assert policy == {
        "name": "mine",
        "version": "1.2",
        "extends": "muxwise",
        "points": ["split", "retain"],
        "classes": ["chat", "batch"],
        "params": {
            "layers": "true",
            "polling": "true",
            "preemption": "true",
            "batch_tokens": "512",
            "burst": "90%",
            "floor": "2s",
        },
    }


def test_sarif_names_each_rule_and_place(file: Path, tmp_path: Path) -> None:
    file.write_text(HEAD + ODD, encoding="utf-8")
    report = tmp_path / "report.sarif"
    assert check(file, "--sarif", report).exit_code == 0
    (run,) = json.loads(report.read_text(encoding="utf-8"))["runs"]
    assert run["tool"]["driver"]["rules"] == [{"id": "never-true"}]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("never-true", "warning")
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == str(file)
    assert place["region"] == {"startLine": 6, "startColumn": 23}
    assert check(file, "--sarif", tmp_path / "no" / "such").exit_code == 2


def test_a_policy_can_come_from_a_pipe() -> None:
    shown = check("-", typed=HEAD + "  retain: kep\n")
    assert (shown.exit_code, "<stdin>:5:11: " in shown.stderr) == (1, True)
    assert check("-", typed=HEAD + GOOD).exit_code == 0


def test_tests_and_several_documents_are_checked(file: Path) -> None:
    file.write_text(f"{HEAD}{ODD}---\n{TEST}---\n{TEST.replace('it-works', 'again')}", encoding="utf-8")
    shown = check(file)
    assert shown.exit_code == 0
    assert f"{file}: ok (2 tests: it-works, again)" in shown.stdout
    assert f"{file}:6:23: warning: " in shown.stderr
    file.write_text(TEST.replace("finished", "finishd").replace("prompt", "promt"), encoding="utf-8")
    shown = check(file)
    assert shown.exit_code == 1
    assert f"{file}:6:27: unknown key 'promt'" in shown.stderr
    assert f"{file}:7:12: unknown name 'finishd'" in shown.stderr


def test_several_files_are_checked_in_one_run(file: Path, tmp_path: Path) -> None:
    file.write_text(HEAD + "  retain: kep\n", encoding="utf-8")
    found = data(file, "muxwise", tmp_path / "nothing.yaml")
    assert [one["file"] for one in found["files"]] == [str(file), "muxwise", str(tmp_path / "nothing.yaml")]
    assert [problem["line"] for problem in found["problems"]] == [5, 1]
    assert (found["ok"], found["errors"]) == (False, 2)


def test_every_shipped_policy_passes_strictly() -> None:
    shown = check(*shipped_policies(), "--strict")
    assert (shown.exit_code, shown.stderr) == (0, "no errors, no warnings\n")


def test_an_earlier_version_is_a_warning_with_the_remedy(file: Path) -> None:
    file.write_text(HEAD.replace("v1beta1", "v1alpha1") + "  retain: keep\n", encoding="utf-8")
    shown = check(file)
    assert (shown.exit_code, f"{file}:1:13: warning: muxk/v1alpha1" in shown.stderr) == (0, True)
    assert "muxk migrate --write" in shown.stderr


@pytest.mark.parametrize(
    "text", ["", "---\n---\n", "[" * 3000, "a: &x [*x]", "\x00", "kind: PolicyTest\n", "{}"]
)
def test_no_file_makes_it_fall_over(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    shown = check(file)
    assert (shown.exit_code, shown.exception.__class__) == (1, SystemExit)
    file.write_bytes(b"\xff\xfe\x00")
    assert check(file).exit_code == 1
    assert check(file.parent).exit_code == 1


def test_a_file_full_of_mistakes_is_bounded(file: Path) -> None:
    file.write_text(HEAD + "".join(f"  key{i}: 1\n" for i in range(3000)), encoding="utf-8")
    assert data(file)["errors"] == MAX_PROBLEMS


EXAMPLES = [
    file
    for file in sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
    if not file.stem.endswith(("-wrong", "-careless"))
]
"""The others are shown for what is wrong with them."""


@pytest.mark.parametrize("example", EXAMPLES, ids=[file.name for file in EXAMPLES])
def test_an_example_gives_no_warning_and_no_note(example: Path) -> None:
    shown = check(example, "--strict")
    assert (shown.exit_code, shown.stderr) == (0, "no errors, no warnings\n")
