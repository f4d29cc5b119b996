"""What studies say: names as they stand, whose SLOs count, rules that failed, how long it takes, colours."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from muxk.client import cell_worker, compare_html, compare_report, tune_report
from muxk.client.cells import Cell, Goal, Outcome
from muxk.client.cli import build_app
from muxk.client.compare import AtRate, Entry, Study
from muxk.client.contenders import Contender
from muxk.client.forecast import Forecast
from muxk.client.goodput import Search, runs_left, search_rate
from muxk.client.param_grid import parse_grid
from muxk.client.run_notes import RunNotes
from muxk.client.study_progress import left_in_words
from muxk.client.terminal import described_tasks, plain_console
from muxk.client.tune import Score, Tuning
from muxk.client.tune_by import By
from muxk.kernel.idle import Cause
from rich.progress import Progress
from study_data import short_requests
from typer.testing import CliRunner, Result

HOSTILE = "a[/b]</script>:smile:<b>"
CLIENT = Path(compare_html.__file__).parent


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), arguments, env={"COLUMNS": "200"})


def outcome(idle: dict[str, float], splits: dict[str, float]) -> Outcome:
    figures: dict[str, Any] = dict.fromkeys(compare_report.MEANS, 1.0)
    causes = {cause: {"unit_seconds": seconds} for cause, seconds in idle.items()}
    figures |= {
        "verdicts": {"strict": True, "joint": True, "stable": True, "gaps_over_share": 0.0},
        "slo": {"tbt_ms": 50.0},
        "split_residency_ms": splits,
        "idle": {"unit_seconds": 10.0, "causes": causes},
    }
    return Outcome(figures, ((1e6, 5),), ((1e6, 5),))


def study_of(*labels: str) -> tuple[Study, list[Entry]]:
    contenders = tuple(Contender(label, label, (), "sim:h200") for label in labels)
    template = Cell("", model=HOSTILE, requests=10)
    study = Study(contenders, (HOSTILE,), (), template, (0,), (Goal.STRICT,), 0.03)
    return study, [Entry(one, HOSTILE, study.cell(one, HOSTILE)) for one in contenders]


def test_names_that_look_like_markup_are_shown_as_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, entries = study_of(HOSTILE)
    entries[0].at.append(AtRate(1.0, [outcome({"drain": 1.0}, {"1+1": 5.0})]))
    console = plain_console()
    with console.capture() as captured:
        for table in compare_report.tables(study, entries, console):
            console.print(table)
        tuning = Tuning(
            study.template, tuple(parse_grid([f"{HOSTILE}=1,2"])), By.STRICT, None, (0,), 0.1, False
        )
        console.print(tune_report.table(tuning, [Score(((HOSTILE, "[/red]"),), 1.0, 1.0, 1.0, 10)]))
    assert captured.get().count(HOSTILE) >= 4
    assert "[/red]" in captured.get()
    with Progress(described_tasks(), console=plain_console()) as bars:
        bars.add_task(HOSTILE)
    assert HOSTILE in capsys.readouterr().out
    trace = tmp_path / "p[/q].csv"
    trace.parent.mkdir()
    short_requests(tmp_path).rename(trace)
    done = invoked("sim", "chunked", "--workload", str(trace), "--rate", "30", "--requests", "2")
    assert done.exit_code == 0, done.output
    assert "p[/q].csv" in done.output.replace("\n", "")


def test_every_console_and_bar_of_the_commands_is_made_where_markup_is_off() -> None:
    made = re.compile(r"\bConsole\(|from_markup|task\.description")
    found = [path.name for path in sorted(CLIENT.glob("*.py")) if made.search(path.read_text("utf-8"))]
    assert found == ["terminal.py"]


def test_no_name_gets_out_of_its_place_in_the_report() -> None:
    turned = f"{HOSTILE}\u202e\u200b\x1b"
    study, entries = study_of(turned)
    entries[0].error = turned
    page = compare_html.page(study, entries, (turned,), compare_report.Origin(("muxk", turned), "1", "2"))
    assert "script" not in page.replace("&lt;/script&gt;", "")
    assert "<b>" not in page
    assert "U+202EU+200BU+001B" in page
    assert [letter for letter in page if not letter.isprintable() and letter != "\n"] == []


def colours(page: str) -> dict[str, set[str]]:
    """By name in legends and bars: the colours that it has."""
    found: dict[str, set[str]] = {}
    in_legends = r'fill="(#\w+)"></rect><text[^>]*><title>([^<]*)</title>'
    in_stacks = r'fill="(#\w+)"><title>([^<]*) [\d.]+%</title>'
    for colour, name in re.findall(in_legends, page) + re.findall(in_stacks, page):
        found.setdefault(name, set()).add(colour)
    return found


def test_causes_splits_and_policies_keep_their_colours_through_a_report() -> None:
    study, entries = study_of("one", "two", "three")
    entries[0].error = "it failed"
    every = {cause.value: float(place + 1) / 10 for place, cause in enumerate(Cause)}
    splits = {f"{place}+1": float(place) for place in range(1, 12)}
    for rate, idle, shown in (
        (1.0, {"host": 3.0, "drain": 1.0}, {"1+1": 9.0, "2+1": 1.0}),
        (2.0, {"drain": 3.0, "no work": 2.0}, {"2+1": 9.0, "1+1": 1.0}),
        (3.0, every, splits),
    ):
        for entry in entries[1:]:
            entry.at.append(AtRate(rate, [outcome(idle, shown)]))
    found = colours(compare_html.page(study, entries, (), compare_report.Origin((), "", "")))
    assert {name for name, seen in found.items() if len(seen) != 1} == set()
    assert {cause.value for cause in Cause} <= found.keys()
    causes = [found[cause.value].copy().pop() for cause in Cause]
    assert len(set(causes)) == len(causes)
    assert found["two"] != found["three"]
    assert found["1+1"] != found["2+1"]


def test_a_rule_that_fails_in_a_run_is_told(tmp_path: Path) -> None:
    policy = tmp_path / "fails.yaml"
    policy.write_text(
        "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: fails}\n"
        "spec: {extends: chunked, order: {by: 1 / (request.prompt_tokens - request.prompt_tokens)}}\n"
    )
    trace = str(short_requests(tmp_path))
    done = invoked("sim", str(policy), "--workload", trace, "--rate", "30", "--requests", "2")
    assert done.exit_code == 0, done.output
    assert "a rule failed and others answered in its place: order/always: division by zero" in done.output


def test_policies_that_are_judged_by_slos_of_their_own_are_told_apart() -> None:
    study, entries = study_of("one", "two")
    for entry, tbt_ms in zip(entries, (50.0, 20.0), strict=True):
        made = outcome({}, {})
        made.figures["slo"] = {"tbt_ms": tbt_ms}
        entry.at.append(AtRate(1.0, [made]))
    told = [note for note in compare_report.notes(study, entries) if "same TBT SLO" in note]
    assert told == ["Not all are judged by the same TBT SLO: one 50 ms, two 20 ms. --tbt judges all by one."]
    assert not [note for note in compare_report.notes(study, entries[:1]) if "same TBT SLO" in note]


def test_notes_say_whose_slos_count_and_how_often_rules_failed() -> None:
    notes = RunNotes()
    for name, count in (("b", 2), ("b", 3), ("a", 0)):
        errors = {"order: division by zero": count} if count else {}
        notes.add(name, {"policy_errors": errors, "classes": {}})
    notes.add("a", {"classes": {"chat": {"slo": {"tbt_ms": 20.0}}, "batch": {"slo": {"tbt_ms": 1.5}}}})
    notes.add("c", {})
    first, second = notes.lines()
    assert first.startswith(
        "a has classes: strict, joint and goodputs judge each class by its own TTFT and TBT"
    )
    assert "(TBT: batch 1.5 ms, chat 20 ms), whatever --tbt" in first
    assert second.startswith("b: 5 times a rule failed")


def test_the_time_that_is_left_is_learned_from_the_runs() -> None:
    forecast, cell = Forecast(2), Cell("chunked", requests=100)
    assert forecast.left(0.0).runs == 0
    forecast.ran(cell, 1.0)  # the first run, with all requests at once
    forecast.plan(((cell, 20),), 20.0, at_s=10.0)
    first = forecast.left(10.0)
    assert (first.done, first.runs, first.seconds) == (0, 20, pytest.approx(10.0))
    forecast.search("one", cell, 8)
    assert forecast.left(10.0).runs == 20  # its runs were among those planned
    for left, at_s in ((6, 16.0), (4, 22.0)):  # they take 6 s each, two at a time
        for _ in range(2):
            forecast.ran(cell, 6.0)
        forecast.search("one", cell, left)
        then = forecast.left(at_s)
    assert then.runs == 16
    assert 30 < then.seconds < 50  # 16 runs of about 5 s on two processes
    forecast.search("one", cell, 0)
    for _ in range(12):
        forecast.came(cell)
    assert forecast.left(60.0).runs == 0
    assert left_in_words(then).startswith("4 of about 20 runs, ")


def test_runs_that_were_kept_take_no_time() -> None:
    forecast, cell = Forecast(1), Cell("chunked")
    forecast.plan(((cell, 100),), 500.0, at_s=0.0)
    for _ in range(50):
        forecast.ran(cell, 5.0)
        forecast.came(cell)
    assert forecast.left(0.1).seconds < 50


@pytest.mark.parametrize("limit", [0.3, 3.7, 50.0])
def test_a_search_knows_about_how_many_runs_it_still_makes(limit: float) -> None:
    search = Search(4.0, 4 / 1024, 4 * 1024.0, 0.03, checks=(1.2, 1 / 1.2))
    met: dict[float, bool] = {}
    guesses: list[int] = []

    def run(rate: float, seed: int) -> bool:
        guesses.append(runs_left(met, search))
        met[rate] = rate <= limit
        return met[rate]

    found = search_rate(run, search, 0)
    made = len(found.runs)
    assert abs(guesses[0] - made) <= 4
    assert all(abs(guess - (made - place)) <= 1 for place, guess in enumerate(guesses) if place > made - 6)


def test_a_process_says_of_each_cell_that_it_began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(cell: Cell, progress: Any) -> Outcome:
        for _ in range(3):
            progress(None, 0.0, 0)
        return Outcome(error=f"{cell.seed}")

    cells = b"\n".join(msgspec.json.encode(Cell("chunked", seed=seed)) for seed in (1, 2))
    monkeypatch.setattr(cell_worker, "run_cell", run)
    monkeypatch.setattr(sys, "argv", ["cell_worker", str(os.getppid())])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(cells)))
    with (tmp_path / "said").open("wb") as said:
        monkeypatch.setattr(sys, "stdout", said)
        cell_worker.main()
        monkeypatch.undo()
    lines = (tmp_path / "said").read_bytes().splitlines()
    assert [line[:1] for line in lines] == [b"", b"{", b"", b"{"]


def test_a_process_says_once_a_second_that_its_simulation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said, clock = io.BytesIO(), iter([5.0, 5.5, 6.0, 6.1, 8.0])
    monkeypatch.setattr(cell_worker, "monotonic", lambda: next(clock))
    heart = cell_worker.Heart(said)
    for _ in range(5):
        heart.beat(None, 0.0, 0)
    assert said.getvalue() == b"\n\n\n"
