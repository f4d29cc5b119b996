"""`muxk diff`: which decisions change, the rules behind them, and an exit code for scripts."""

from __future__ import annotations

import json
from pathlib import Path

from muxk.client.cli import build_app
from study_data import short_requests
from typer.testing import CliRunner, Result

MINE = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: mine}
spec:
  extends: chunked
  order: {by: ORDER}
"""


def diff(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["diff", *arguments], env={"COLUMNS": "200"})


def test_decisions_that_change_are_shown_with_rule_and_values_of_both(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = diff(
        *("chunked:budget=128", "chunked:budget=512", "--trace", str(short_requests(tmp_path))),
        *("--rate", "30", "--requests", "20", "--first", "2", "--json", str(out)),
    )
    assert done.exit_code == 1, done.output
    assert "OLD  slice/always [chunked.yaml:" in done.output
    assert "params.budget = 128" in done.output
    assert "params.budget = 512" in done.output
    made = json.loads(out.read_bytes())
    assert made["points"]["slice"]["differed"] == made["points"]["slice"]["asked"] > 0
    assert made["points"]["split"]["differed"] == made["points"]["order"]["differed"] == 0
    assert len(made["first"]) == 2
    assert 0 <= made["first"][0]["at_ns"] <= made["first"][1]["at_ns"]
    # What a larger budget is for, and what it costs.
    assert made["after"]["p99_ttft_ms"] < made["before"]["p99_ttft_ms"]
    assert made["after"]["max_itl_ms"] > made["before"]["max_itl_ms"]


def test_a_policy_that_says_the_same_in_other_words_changes_nothing(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE.replace("ORDER", "request.arrival + 0ms"))
    done = diff(
        "chunked", str(mine), "--trace", str(short_requests(tmp_path)), "--rate", "30", "--requests", "8"
    )
    assert done.exit_code == 0, done.output
    assert "does the same" in done.output


def test_an_order_that_changes_is_told_with_the_requests_and_their_keys(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE.replace("ORDER", "request.prompt_tokens"))
    done = diff(
        "chunked", str(mine), "--trace", str(short_requests(tmp_path)), "--rate", "2000", "--requests", "12"
    )
    assert done.exit_code == 1, done.output
    assert "order of admission: order" in done.output
    assert "request.prompt_tokens = " in done.output
    assert "1. r" in done.output


def test_what_can_not_be_compared_is_trouble_and_not_a_difference(tmp_path: Path) -> None:
    assert diff("chunked", "chunkt").exit_code == 2
    assert diff("chunked", "chunked@sim:a100").exit_code == 2
    assert diff("chunked", "muxwise", "--trace", str(tmp_path / "none.csv")).exit_code == 2
    unfit = diff("chunked", "muxwise", "--model", "llama-3.1-70b", "--device", "sim:a100")
    assert unfit.exit_code == 2
    assert "does not fit" in unfit.output
