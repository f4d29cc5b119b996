"""The report over several runs, and the load that it is made of."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
import typer
from muxk.client.bench import BenchPlan, PolicyChoice, RunResult, details, turn
from muxk.client.cli_bench import parse_longs
from muxk.client.figures import phase_figures, run_ratios
from muxk.client.records import LONG, SHORT, Phase, Record
from muxk.client.report import as_json, spread, summary, table
from muxk.client.workload import LongPrompts, MixedLoad, Prompts
from rich.console import Console

MS = 1_000_000


def result(policy: str, run: int, long_ttft_ms: int) -> RunResult:
    records = [
        Record(SHORT, 32, 0, [at * MS for at in range(0, 2000, 20)], [1] * 100),
        Record(LONG, 1500, 1000 * MS, [(1000 + long_ttft_ms) * MS], [1]),
    ]
    phases = [Phase("solo", 0, 1000 * MS), Phase("mixed", 1000 * MS, 2000 * MS)]
    solo, mixed = (phase_figures(records, phase, 100.0) for phase in phases)
    cut = {phase.name: details(records, phase) for phase in phases}
    return RunResult(policy, run, "sim:8", "sim", solo, mixed, run_ratios(solo, mixed), 0.5, {}, cut, 1500)


def test_the_spread_is_the_median_between_the_least_and_the_most() -> None:
    shown = spread([3.0, 1.0, 8.0])
    assert shown is not None
    assert (shown.median, shown.min, shown.max) == (3.0, 1.0, 8.0)
    assert spread([]) is None


def test_long_ttft_is_compared_with_inflight_in_the_same_run() -> None:
    results = [
        result("muxwise", 0, 200),
        result("inflight", 0, 100),
        result("inflight", 1, 200),
        result("muxwise", 1, 300),
    ]
    shown = summary(results, 100.0)
    assert (shown["muxwise"]["ttft_long_to_inflight"].max, shown["muxwise"]["ttft_long_to_inflight"].min) == (
        2.0,
        1.5,
    )
    assert shown["inflight"]["ttft_long_to_inflight"].median == 1.0


def test_the_table_has_a_column_for_each_policy_and_tells_the_spread() -> None:
    console = Console(file=io.StringIO(), width=120)
    results = [result("muxwise", 0, 200), result("muxwise", 1, 300), result("inflight", 0, 100)]
    console.print(table(results, 100.0))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "muxwise" in text
    assert "250 (200..300)" in text
    assert "gaps over 100 ms" in text


def test_json_has_the_keys_that_scripts_read() -> None:
    plan = BenchPlan((PolicyChoice("muxwise"),), 1, MixedLoad(), 100.0)
    report = json.loads(as_json(plan, [result("muxwise", 0, 200)], "muxk bench"))
    mixed = report["runs"][0]["phases"]["mixed"]
    for key in ("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"):
        assert key in mixed
    for key in ("request_throughput", "request_goodput", "output_throughput", "ttfts", "itls", "latencies"):
        assert key in mixed
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99")} <= set(mixed)
    assert mixed["ttfts"] == [0.2]
    assert report["summary"]["1500"]["muxwise"]["solo_step_ms"]["median"] == 20.0
    assert msgspec.json.decode(msgspec.json.encode(report)) == report


def test_policies_take_turns_in_going_first() -> None:
    assert [turn(("a", "b", "c"), run)[0] for run in range(4)] == ["a", "b", "c", "a"]
    assert sorted(turn(("a", "b", "c"), 2)) == ["a", "b", "c"]


def test_prompts_are_the_same_for_a_seed_and_all_distinct() -> None:
    one, same, other = Prompts(49152, 1), Prompts(49152, 1), Prompts(49152, 2)
    drawn = [tuple(one.draw(32)) for _ in range(100)]
    assert drawn == [tuple(same.draw(32)) for _ in range(100)]
    assert len({*drawn, tuple(other.draw(32))}) == 101
    assert all(32 <= token < 49152 for prompt in drawn for token in prompt)


def test_a_policy_of_the_bench_may_bring_params() -> None:
    choice = PolicyChoice.parse(" chunked:budget=64 ")
    assert (choice.policy, choice.settings, choice.label) == (
        "chunked",
        {"budget": "64"},
        "chunked budget=64",
    )
    assert PolicyChoice.parse("muxwise").label == "muxwise"


def test_each_length_of_long_prompts_is_a_phase_with_its_own_interval() -> None:
    assert parse_longs("200,6000", "2,45", "20") == (
        LongPrompts(200, 2.0, 20.0),
        LongPrompts(6000, 45.0, 20.0),
    )
    assert parse_longs("1500", "10", "0") == ()
    for wrong in (("1500", "10,20", "5"), ("long", "10", "5"), ("0", "10", "5"), ("10", "nan", "5")):
        with pytest.raises(typer.Exit):
            parse_longs(*wrong)
