"""`muxk compare --quick` on workloads with long answers: what is cut, what is not, and that it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from muxk.client import first_look
from muxk.client.cell_pool import CellPool
from muxk.client.cells import Cell, Goal, run_cell
from muxk.client.cli import build_app
from muxk.client.cli_compare import QUICK
from muxk.client.compare import Entry, Study
from muxk.client.compare_report import notes
from muxk.client.contenders import Contender
from muxk.client.first_look import OUTPUT_MAX, cut_of, search_of
from muxk.client.synthetic import NAMES
from muxk.client.workload_names import Traffic, find_workload
from study_data import short_requests
from typer.testing import CliRunner

REQUESTS = int(QUICK["requests"])


def test_of_the_workloads_only_openthoughts_has_answers_too_long_for_a_first_look() -> None:
    cuts = {name: cut_of(find_workload(name, Traffic(1.0)), REQUESTS) for name in NAMES}
    cut = cuts.pop("openthoughts")
    assert not any(cuts.values())
    assert cut is not None
    assert 5 <= cut.requests <= 15
    assert OUTPUT_MAX <= cut.output_tokens < 2 * OUTPUT_MAX


def test_a_rate_at_which_figures_are_taken_is_searched_from_unless_it_is_too_high_to_say_anything() -> None:
    assert search_of(0.23, (), 0.2).start == 0.23
    assert search_of(0.23, (0.1, 0.2), 0.2).start == 0.1
    assert search_of(0.23, (5.0,), 0.2).start == search_of(0.23, (5.0,), 0.2).highest == 0.23
    assert search_of(0.23, (1e-6,), 0.2).start == search_of(0.23, (1e-6,), 0.2).lowest


def test_a_first_look_says_what_it_cut_and_tries_no_rate_at_which_the_rest_comes_within_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_look, "OUTPUT_MAX", 20)  # answers of the trace have two or three tokens
    monkeypatch.setattr(CellPool, "run", lambda pool, cell: run_cell(cell))  # here, to start no process
    trace, out = str(short_requests(tmp_path, rows=80)), tmp_path / "out.json"
    words = ["inflight", "--quick", "--workload", trace, "--rate", "1000", "--goal", "strict"]
    words += ["--tolerance", "0.5", "--kv-tokens", "600000"]
    done = CliRunner().invoke(
        build_app(), ["compare", *words, "--jobs", "1", "--json", str(out)], env={"COLUMNS": "500"}
    )
    assert done.exit_code == 0, done.output
    assert "an answer has 2 tokens on average, so runs have 8 requests in place of 60" in done.output
    assert "runs of 60 requests say little" not in done.output
    entry = json.loads(out.read_bytes())["entries"][0]
    assert entry["requests"] == 8
    assert entry["rates"][0]["seeds"][0]["num_prompts"] == 8
    assert "--requests 8" in entry["rates"][0]["command"]
    # Its first tokens take some 15 ms, so that eight requests in that time are some hundred a second.
    tried = [rate for rate, _ in entry["goodput"]["strict"]["seeds"][0]["runs"]]
    assert max(tried) < 1000


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["compare", "inflight"], 1),
        (["tune", "chunked", "--param", "budget=64"], 1),
        (["diff", "inflight", "chunked", "--rate", "9"], 2),
    ],
)
def test_where_no_request_is_completed_the_reason_stands_in_the_place_of_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], code: int
) -> None:
    monkeypatch.setattr(CellPool, "run", lambda pool, cell: run_cell(cell))
    words = ["--workload", str(short_requests(tmp_path)), "--kv-tokens", "16", "--requests", "3"]
    done = CliRunner().invoke(build_app(), [*command, *words], env={"COLUMNS": "300"})
    assert done.exit_code == code
    assert "request; the first was told: prompt_token_ids has 200 tokens" in done.output


def test_where_everything_failed_nothing_is_said_of_figures_that_are_not_there() -> None:
    contender, cell = Contender("muxwise", "muxwise", (), "sim:h200"), Cell("muxwise", requests=60)
    study = Study((contender,), ("sharegpt",), (), cell, (0,), (Goal.STRICT,), 0.2, quick=True)
    failed = Entry(contender, "sharegpt", cell, error="it does not fit")
    assert list(notes(study, [failed])) == []
    assert list(notes(study, [failed, Entry(contender, "sharegpt", cell)])) != []
