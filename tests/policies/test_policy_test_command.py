"""`muxk test`: which files it finds, what it prints, and how it exits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from muxk.client.cli import build_app
from muxk.client.policy_test_files import matches
from typer.testing import CliRunner, Result

HEAD = "apiVersion: muxk/v1beta1\nkind: PolicyTest\nmetadata: {name: NAME, description: what it shows}\n"
SPEC = """spec:
  policy: muxwise
  device: {units: 4, layers: 4, kv_tokens: 4k}
  arrivals: [{name: chat, count: 2, prompt: 20, output: 5}]
  expect: [EXPECT]
"""
Muxk = Callable[..., Result]


def write(path: Path, *tests: tuple[str, str]) -> None:
    """A file of tests, each a name and an expectation."""
    documents = [HEAD.replace("NAME", name) + SPEC.replace("EXPECT", expect) for name, expect in tests]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("---\n".join(documents), encoding="utf-8")


@pytest.fixture
def muxk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Muxk:
    """Run a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    app = build_app()
    return lambda *arguments: CliRunner().invoke(app, ["test", *arguments], catch_exceptions=False)


def timeless(text: str) -> str:
    return re.sub(r"=+ (.*) in [0-9.]+s =+", r"\1", text)


GOOD = ("good", "finished == 2")
BAD = ("bad", "tbt.max <= 1ns")


def test_all_tests_below_a_folder_run_and_the_output_is_that_of_pytest(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "b" / "two.test.yaml", GOOD, ("also-good", "failed == 0"))
    write(tmp_path / "one.test.yaml", GOOD)
    write(tmp_path / ".hidden" / "no.test.yaml", BAD)
    write(tmp_path / "node_modules" / "no.test.yaml", BAD)
    result = muxk()
    assert result.exit_code == 0
    assert timeless(result.output).splitlines() == [
        "================================== muxk test ===================================",
        "collected 3 tests in 2 files",
        "",
        "one.test.yaml .                                                           [ 33%]",
        "b/two.test.yaml ..                                                        [100%]",
        "3 passed",
    ]


def test_a_failure_is_shown_with_its_place_values_and_exit_code_1(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "a.test.yaml", BAD, GOOD)
    result = muxk("a.test.yaml")
    assert result.exit_code == 1
    lines = timeless(result.output).splitlines()
    assert "a.test.yaml F.                                                            [100%]" in lines
    at = lines.index("a.test.yaml:8:12: expected tbt.max <= 1ns")
    assert lines[at - 4].strip("_") == " bad "
    assert lines[at - 3 : at - 1] == ["what it shows", "policy muxwise"]
    assert lines[at + 1] == "    8 |   expect: [tbt.max <= 1ns]"
    assert lines[at + 3].startswith("      tbt.max = ")
    assert lines[at + 4].startswith("      longest gap: chat-")
    assert lines[-2].startswith("FAILED a.test.yaml::bad - tbt.max <= 1ns (tbt.max = ")
    assert lines[-1] == "1 failed, 1 passed"


def test_a_wrong_file_is_exit_code_2_and_the_others_still_run(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "bad.test.yaml", ("bad", "tbt.mx <= 1ns"))
    write(tmp_path / "good.test.yaml", GOOD)
    result = muxk()
    assert result.exit_code == 2
    assert "bad.test.yaml:8:12: unknown name 'tbt.mx' in an expectation" in result.output
    assert "hint: did you mean 'tbt.max'?" in result.output
    assert timeless(result.output).splitlines()[-1] == "1 passed, 1 error"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("muxwize", "there is no such file, folder or shipped policy"),
        ("policy.yaml", "there is no test in this file"),
        (".", "no tests ran"),
    ],
)
def test_nothing_to_run_is_exit_code_2(argument: str, message: str, muxk: Muxk, tmp_path: Path) -> None:
    policy = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: p}\nspec: {}\n"
    (tmp_path / "policy.yaml").write_text(policy, encoding="utf-8")
    result = muxk(argument)
    assert result.exit_code == 2
    assert message in result.output


def test_a_policy_file_stands_for_the_tests_beside_it(muxk: Muxk, tmp_path: Path) -> None:
    policy = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: p}\nspec: {}\n"
    (tmp_path / "mine.yaml").write_text(policy, encoding="utf-8")
    write(tmp_path / "mine.test.yaml", GOOD)
    assert "mine.test.yaml ." in muxk("mine.yaml").output


def test_a_shipped_policy_has_its_tests_by_name(muxk: Muxk) -> None:
    result = muxk("inflight", "-v")
    assert result.exit_code == 0
    assert "inflight.test.yaml::decode-stalls-by-the-whole-prompt PASSED" in result.output


def test_k_chooses_tests_by_words_of_their_names(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "a.test.yaml", GOOD, BAD)
    result = muxk("-k", "not bad")
    assert result.exit_code == 0
    assert timeless(result.output).splitlines()[-1] == "1 passed, 1 deselected"
    assert muxk("-k", "elsewhere").exit_code == 2


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("chat", True),
        ("Chat and SLO", True),
        ("chat and not slo", False),
        ("long or chat", True),
        ("long or not chat", False),
        ("not long and not ttft", True),
        ("long and chat or slo", True),
    ],
)
def test_words_of_k_join_as_in_pytest(words: str, chosen: bool) -> None:
    assert matches("a.test.yaml::chat-keeps-its-slo", words) is chosen


def test_x_stops_at_the_first_failure(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "a.test.yaml", GOOD, BAD, ("after", "failed == 0"))
    result = muxk("-x", "-v")
    assert result.exit_code == 1
    assert "::after" not in result.output
    assert timeless(result.output).splitlines()[-1] == "1 failed, 1 passed, 1 not run"


def test_another_policy_can_be_run_under_the_same_tests(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "a.test.yaml", ("split", "fused.steps == 0"), ("rule", "requests == 2"))
    text = (tmp_path / "a.test.yaml").read_text(encoding="utf-8")
    rule = "{rule: split/best-fit, that: hits == 0}"
    (tmp_path / "a.test.yaml").write_text(text.replace("requests == 2", rule), encoding="utf-8")
    result = muxk("--policy", "chunked", "--set", "budget=64", "-v")
    assert "the policy chunked has no rule 'split/best-fit'" in result.output
    assert result.exit_code == 1
    assert muxk("--policy", "chunkd").exit_code == 2
    assert muxk("--set", "budget=64").exit_code == 2


def test_rules_that_never_fired_are_shown(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "a.test.yaml", GOOD)
    lines = muxk("--rules").output.splitlines()
    at = lines.index("policy   rules  fired  never fired")
    row = lines[at + 1]
    assert row.startswith("muxwise ")
    assert "split/best-fit" in row
    assert "split/no-decode-batch" not in row
    assert "admit/never-fits" not in row, "what it inherits is not its own"


def test_rules_of_two_policies_of_one_name_are_counted_apart(muxk: Muxk, tmp_path: Path) -> None:
    for folder, point in (("a", "preempt: continue"), ("b", "order: {by: request.arrival}")):
        write(tmp_path / folder / "it.test.yaml", GOOD)
        path = tmp_path / folder / "it.test.yaml"
        path.write_text(path.read_text(encoding="utf-8").replace("muxwise", "mine.yaml"), encoding="utf-8")
        head = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: mine}\n"
        (tmp_path / folder / "mine.yaml").write_text(f"{head}spec:\n  {point}\n", encoding="utf-8")
    output = muxk("--rules").output
    assert re.search(r"mine\.yaml \(a/mine\.yaml\) +1 +0%  preempt/always", output)
    assert re.search(r"mine\.yaml \(b/mine\.yaml\) +1 +100%  -", output)


def test_json_holds_everything_and_is_the_same_each_time_but_for_the_seconds(
    muxk: Muxk, tmp_path: Path
) -> None:
    write(tmp_path / "a.test.yaml", GOOD, BAD)
    write(tmp_path / "b.test.yaml", ("bad", "tbt.mx <= 1ns"))
    first, again = (muxk("--json", "--rules").stdout for _ in range(2))
    seconds = re.compile(r'"seconds": [0-9.e-]+')
    assert seconds.sub("", first) == seconds.sub("", again)
    document = json.loads(first)
    assert {key: document["summary"][key] for key in ("passed", "failed", "errors")} == {
        "passed": 1,
        "failed": 1,
        "errors": 1,
    }
    good, bad = document["tests"]
    assert (good["id"], good["outcome"], good["policy"], good["requests"]) == (
        "a.test.yaml::good",
        "passed",
        "muxwise",
        2,
    )
    (failure,) = bad["failures"]
    assert (failure["expected"], failure["line"]) == ("tbt.max <= 1ns", 17)
    assert failure["values"].keys() == {"tbt.max"}
    assert document["errors"][0]["hint"] == "did you mean 'tbt.max'?"
    assert "split/best-fit" in document["rules"][0]["never_fired"]


def test_junit_has_a_case_for_each_test_and_each_wrong_file(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "a.test.yaml", GOOD, BAD)
    write(tmp_path / "b.test.yaml", ("bad", "tbt.mx <= 1ns"))
    assert muxk("--junit", "report.xml").exit_code == 2
    suite = ElementTree.parse(tmp_path / "report.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    failure = cases["bad"].find("failure")
    assert failure is not None
    assert "longest gap: chat-" in (failure.text or "")
    assert cases["good"].find("failure") is None
    error = cases["reading"].find("error")
    assert error is not None
    assert "unknown name 'tbt.mx'" in (error.get("message") or "")


def test_a_run_that_is_recorded_can_be_explained_and_does_not_differ(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "one.test.yaml", BAD)
    plain = muxk("one.test.yaml")
    for _ in range(2):
        recorded = muxk("one.test.yaml", "--record", "run.rec")
        assert recorded.exit_code == 1
        assert timeless(recorded.output) == timeless(plain.output)
        explained = CliRunner().invoke(
            build_app(), ["explain", "chat-2", "--record", "run.rec", "--last", "200"]
        )
        assert explained.exit_code == 0
        assert explained.output.count("admission  admit") == 1, "the last run of the file"
        assert "slice/" in explained.output
        assert "only answers" not in explained.output, "the policy is in the file"


def test_one_test_is_recorded_and_into_no_other_file(muxk: Muxk, tmp_path: Path) -> None:
    write(tmp_path / "two.test.yaml", GOOD, ("better", "finished == 2"))
    several = muxk("two.test.yaml", "--record", "run.rec")
    assert several.exit_code == 2
    assert "choose one with -k" in several.output
    assert not (tmp_path / "run.rec").exists()
    (tmp_path / "notes.txt").write_text("dear diary", encoding="utf-8")
    foreign = muxk("two.test.yaml", "-k", "better", "--record", "notes.txt")
    assert foreign.exit_code == 2
    assert "no recorded run" in foreign.output
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "dear diary"
