"""Studies of many runs: the same whatever runs them, kept on disk, and ended at once."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest
from muxk.client import cell_process
from muxk.client.cell_pool import CellPool, Stopped
from muxk.client.cell_store import CellStore, code_version
from muxk.client.cells import Cell, Goal, Outcome, command_of, run_cell
from muxk.client.experiments import CellFailed, Lab, Sought, around
from muxk.client.goodput import Search, goodput
from muxk.client.turns import Turns
from study_data import short_requests


def cell_of(folder: Path, policy: str = "chunked") -> Cell:
    return Cell(policy, (("budget", "512"),), workload=str(short_requests(folder)), requests=12, rate=20.0)


def without_seconds(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(outcome, seconds=0.0)


def test_results_of_processes_side_by_side_are_those_of_runs_one_after_the_other(tmp_path: Path) -> None:
    cell = cell_of(tmp_path)
    search = Search(40.0, 1.0, 1000.0, tolerance=0.8, checks=())
    known: dict[tuple[float, int], Outcome] = {}

    def met(goal: Goal, rate: float, seed: int) -> bool:
        if (rate, seed) not in known:
            known[rate, seed] = run_cell(msgspec.structs.replace(cell, rate=rate, seed=seed))
        return known[rate, seed].meets(goal)

    with Lab(2) as lab:
        found = lab.goodputs([Sought(cell, goal, search, (0,)) for goal in Goal])
        outcomes = [without_seconds(one) for one in lab.run([cell, cell])]
    assert found == [goodput(partial(met, goal), search, (0,)) for goal in Goal]
    assert outcomes == [without_seconds(run_cell(cell))] * 2


def test_a_run_that_fails_and_a_process_that_dies_are_told_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = cell_of(tmp_path)
    with Lab(1) as lab:
        failed, went_well = lab.run([msgspec.structs.replace(good, policy="nothing"), good])
        assert "nothing" in failed.error
        assert went_well.figures["completed"] == 12
        with pytest.raises(CellFailed, match="nothing"):
            lab.goodput_of(msgspec.structs.replace(good, policy="nothing"), Goal.STRICT, around(1.0), [0])
    dies = "import sys; sys.stdin.readline(); print('out of memory', file=sys.stderr); sys.exit(7)"
    monkeypatch.setattr(cell_process, "COMMAND", (sys.executable, "-c", dies))
    with CellPool(1) as pool:
        for seed in (1, 2):
            died = pool.run(msgspec.structs.replace(good, seed=seed))
            assert "exit code 7: out of memory" in died.error
            assert not died.meets(Goal.STRICT)


def test_closing_ends_runs_and_wakes_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "import sys; sys.stdin.read()"
    monkeypatch.setattr(cell_process, "COMMAND", (sys.executable, "-c", waits))
    pool, ended = CellPool(1), []
    cell = cell_of(tmp_path)

    def ask(seed: int) -> None:
        try:
            pool.run(msgspec.structs.replace(cell, seed=seed))
        except Stopped:
            ended.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    pool.close()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(ended) == [0, 1, 2]


def test_outcomes_on_disk_are_found_again_until_anything_they_depend_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "mine.yaml"
    text = (
        "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: mine}\n"
        "spec: {extends: chunked, params: {budget: {type: number, default: 512}}}\n"
    )
    policy.write_text(text)
    cell = msgspec.structs.replace(cell_of(tmp_path, str(policy)), settings=(), requests=3)
    with CellPool(1, CellStore(tmp_path / "kept", "v1")) as pool:
        made = pool.run(cell)
        assert made.figures["completed"] == 3
    monkeypatch.setattr(cell_process, "COMMAND", (sys.executable, "-c", "raise SystemExit('was run')"))

    def again(version: str = "v1") -> Outcome:
        with CellPool(1, CellStore(tmp_path / "kept", version)) as pool:
            return pool.run(cell)

    assert again() == made
    assert "was run" in again("v2").error
    policy.write_text(text.replace("512", "256"))
    assert "was run" in again().error
    policy.write_text(text)
    assert again() == made
    CellStore(tmp_path / "kept", "v1").path_of(cell).write_bytes(b'{"cell": 1')
    assert "was run" in again().error


def test_the_version_of_the_code_is_that_of_its_files() -> None:
    assert code_version() == code_version()
    assert len(code_version()) == 16


def test_a_shipped_policy_is_told_the_tbt_slo_and_judged_by_it(tmp_path: Path) -> None:
    cell = msgspec.structs.replace(cell_of(tmp_path), tbt_ms=0.5, requests=10)
    outcome = run_cell(cell)
    assert outcome.figures["slo"]["tbt_ms"] == 0.5
    assert outcome.figures["verdicts"]["gaps_over_share"] == 1
    assert outcome.figures["policy_sha"] != run_cell(cell_of(tmp_path)).figures["policy_sha"]


def test_a_joint_goodput_needs_a_stable_queue_too() -> None:
    met = {"strict": False, "joint": True, "stable": False}
    assert not Outcome({"verdicts": met}).meets(Goal.JOINT)
    assert Outcome({"verdicts": {**met, "stable": True}}).meets(Goal.JOINT)


def test_the_command_of_a_cell_says_all_of_it() -> None:
    cell = Cell("my policy.yaml", (("budget", "512"),), tbt_ms=12.5, turns=Turns.CLOSED, rate=2.0, seed=3)
    assert command_of(cell) == (
        "muxk sim 'my policy.yaml' --set budget=512 --device sim:h200 --model qwen3-8b --workload sharegpt "
        "--rate 2 --requests 200 --tbt 12.5ms --ttft '1000ms + 1ms/token' --turns closed --seed 3"
    )
