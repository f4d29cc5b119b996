"""`muxk tune`: which values are tried, how long, and what is said of the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from muxk.client import cli_tune
from muxk.client.cells import Cell, Outcome
from muxk.client.cli import build_app
from muxk.client.experiments import CellFailed, Lab, Sought
from muxk.client.goodput import Goodput, Limit, SeedGoodput, combine
from muxk.client.param_grid import GridError, parse_grid
from muxk.client.tune import Round, Score, Tuning, rounds, tune
from muxk.client.tune_by import By
from study_data import short_requests
from typer.testing import CliRunner


def values(text: str) -> list[str]:
    return [value for settings in parse_grid([text]) for _, value in settings]


def test_values_are_listed_or_ranges_that_add_or_multiply() -> None:
    assert values("budget=512, 64,512") == ["512", "64"]
    assert values("budget=64..1024*4") == ["64", "256", "1024"]
    assert values("decode_share=10%..40%+15%") == ["10%", "25%", "40%"]
    assert values("gap=0.1ms..0.3ms+0.1ms,1s") == ["0.1ms", "0.2ms", "0.3ms", "1s"]
    assert parse_grid(["a=1,2", "b=x"]) == [(("a", "1"), ("b", "x")), (("a", "2"), ("b", "x"))]


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["budget"], "expected NAME=VALUES"),
        (["budget=1..8"], "is no range"),
        (["budget=1ms..8s+1ms"], "is no range"),
        (["budget=8..1+1"], "never gets"),
        (["budget=1..8*1"], "never gets"),
        (["budget=1..9.9.9+1"], "is no range"),
        (["budget=1,,2"], "missing"),
        (["a=1", "a=2"], "there twice"),
        (["a=1..100000+1"], "more than 1000"),
        (["a=1..900+1", "b=1..900+1"], "810,000 combinations"),
    ],
)
def test_what_is_no_grid_is_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(GridError, match=complaint):
        parse_grid(texts)


class MadeUpLab:
    """Goodput is the value of `x`; long runs take 10 off the largest one. Values under 0 fail."""

    jobs = 1

    def __init__(self) -> None:
        self.searched: list[tuple[int, int | None]] = []

    def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        return [Outcome({"request_throughput": 1.0}) for _ in cells]

    def goodputs(self, sought: Sequence[Sought]) -> list[Goodput | CellFailed]:
        return [self._goodput(one) for one in sought]

    def _goodput(self, sought: Sought) -> Goodput | CellFailed:
        x = int(dict(sought.cell.settings)["x"])
        self.searched.append((x, sought.cell.requests))
        if x < 0:
            return CellFailed("below 0")
        rate = float(x - 10 if x == 12 and sought.cell.requests == 360 else x)
        return combine([SeedGoodput(0, rate, rate, Limit.FOUND, (), ())])


def tuning(halving: bool, low: int = -1) -> Tuning:
    candidates = tuple((("x", str(x)),) for x in range(low, 13))
    return Tuning(Cell("mine", requests=360), candidates, By.STRICT, None, (0,), 0.03, halving)


def test_the_whole_grid_is_searched_in_full_and_failures_come_last() -> None:
    lab = MadeUpLab()
    scores = tune(cast(Lab, lab), tuning(halving=False))
    # 12 is worth 2 in long runs, and comes before 2 only if it is the earlier one.
    assert [int(score.settings[0][1]) for score in scores] == [*range(11, 1, -1), 12, 1, 0, -1]
    assert scores[-1].error == "below 0"
    assert {requests for _, requests in lab.searched} == {360}
    assert len(lab.searched) == 14


def test_halving_gives_long_runs_to_the_better_third_only() -> None:
    lab = MadeUpLab()
    assert rounds(tuning(halving=True)) == [Round(14, 40), Round(5, 120), Round(2, 360)]
    scores = tune(cast(Lab, lab), tuning(halving=True))
    assert [x for x, requests in lab.searched if requests == 360] == [11, 12]
    assert [(int(score.settings[0][1]), score.requests) for score in scores[:3]] == [
        (11, 360),
        (12, 360),
        (10, 120),
    ]
    assert len(scores) == 14


def tune_command(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["tune", *arguments], env={"COLUMNS": "160"})


def test_the_best_is_shown_with_its_interval_and_as_options(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shared = ("chunked", "--param", "budget=32,4096", "--workload", str(short_requests(tmp_path)))
    shared = (*shared, "--by", "p99-ttft", "--rate", "14", "--requests", "25", "--seeds", "2", "--jobs", "1")
    done = tune_command(*shared, "--cache", str(tmp_path / "kept"), "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "best: --set budget=4096" in done.output
    made = json.loads(out.read_bytes())["candidates"]
    assert [one["settings"]["budget"] for one in made] == ["4096", "32"]
    assert made[0]["low"] < made[0]["value"] < made[0]["high"]
    assert (made[0]["keeps_up"], made[1]["keeps_up"]) == (True, False)
    assert "the queue grows" in done.output
    written = tune_command(*shared, "--cache", str(tmp_path / "kept"), "--write")
    assert written.stdout == "--set budget=4096\n"


def test_what_meets_the_objectives_at_no_rate_is_not_called_best(capsys: pytest.CaptureFixture[str]) -> None:
    scores = [Score((("x", "1"),), 0.0, 0.0, 0.0, 60)]
    cli_tune._report(tuning(halving=False), scores, (), False, None)
    said = capsys.readouterr().out
    assert "never met" in said
    assert "there is no best one" in said
    assert "runs of 60 requests say little of a queue" in said
    cli_tune._report(tuning(halving=False), scores, (), True, None)
    assert capsys.readouterr().out == ""
    assert not scores[0].is_found(By.STRICT)
    assert scores[0].is_found(By.P99_TBT)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--param", "budgt=1"), "did you mean 'budget'?"),
        (("--param", "budget=64,0"), "below the least value"),
        (("--param", "budget=64", "--by", "p99-tbt"), "needs --rate"),
        (("--param", "budget=64", "--rate", "-1"), "--rate: rate is -1.0"),
        (("--param", "budget=64.."), "is no range"),
    ],
)
def test_what_can_not_be_tuned_is_refused_before_anything_runs(
    arguments: tuple[str, ...], complaint: str
) -> None:
    done = tune_command("chunked", *arguments)
    assert done.exit_code == 2, done.output
    assert complaint in done.output
