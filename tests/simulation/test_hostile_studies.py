"""Studies in bad company: damaged and shared stores, processes that die or hang, changing files, no room."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.policy_files import open_with_text
from muxk.client import cell_process
from muxk.client.cell_pool import CellPool
from muxk.client.cell_store import CellStore, StoreError
from muxk.client.cells import Cell, Outcome
from muxk.client.sim_report import rows
from muxk.client.sim_run import SimPlan, simulate
from muxk.client.workload_names import Traffic, find_workload
from muxk.client.written_files import check_files, write_files
from plugin_packages import install
from processes import ends
from study_data import short_requests
from typer import Exit

GOOD = Outcome({"verdicts": {"strict": True, "joint": True, "stable": True}}, seconds=0.5)
POLICY = "from muxk.policies.api import BasePolicy\n"


def answers(monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """Processes do this for each cell, whose line was read."""
    lines = [
        "import os, pathlib, sys, time",
        f"good = {msgspec.json.encode(GOOD)!r}",
        "out = sys.stdout.buffer",
    ]
    body = "\n    ".join((*statements, "out.flush()"))
    script = "\n".join([*lines, f"for line in sys.stdin.buffer:\n    {body}"])
    monkeypatch.setattr(cell_process, "COMMAND", (sys.executable, "-S", "-c", script))


ANSWER = r"out.write(good + b'\n')"


@contextmanager
def no_room_on_disk(after: int = 0) -> Iterator[None]:
    """Every byte that this process writes to a file beyond so many is one too many."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b'"strict":true', b'"strict":false'),
        lambda data: data.replace(b'"verdicts"', b'"verdict5"'),
        lambda data: b"{}",
        lambda data: b"[" * 100_000,
        lambda data: b"\xff\xfe\0",
    ],
)
def test_what_is_damaged_in_a_store_is_run_again(tmp_path: Path, damage: object) -> None:
    store, cell = CellStore(tmp_path, "v1"), Cell("chunked")
    store.keep(cell, GOOD)
    path = store.path_of(cell)
    assert store.find(cell) == GOOD
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    assert store.find(cell) is None
    store.keep(cell, GOOD)
    assert store.find(cell) == GOOD


def test_results_of_a_version_without_digests_are_taken_if_they_are_whole(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path, "v1"), Cell("chunked")
    kept = {"cell": msgspec.to_builtins(cell), "version": "v1", "outcome": msgspec.to_builtins(GOOD)}
    store.path_of(cell).write_bytes(msgspec.json.encode(kept))
    assert store.find(cell) == GOOD
    kept["outcome"] = msgspec.to_builtins(Outcome())
    store.path_of(cell).write_bytes(msgspec.json.encode(kept))
    assert store.find(cell) is None


def test_a_full_disk_loses_what_it_has_no_room_for_says_so_and_leaves_no_rest(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path, "v1"), Cell("chunked")
    with no_room_on_disk():
        store.keep(cell, GOOD)
        with pytest.raises(StoreError, match="takes no files: File too large"):
            CellStore(tmp_path, "v1")
    assert (store.lost, store.lost_why) == (1, os.strerror(errno.EFBIG))
    assert list(tmp_path.iterdir()) == []
    store.path_of(cell).mkdir()
    assert store.find(cell) is None
    store.keep(cell, GOOD)
    assert store.lost == 2
    with pytest.raises(StoreError, match="it is a file"):
        CellStore(Path(__file__), "v1")


def test_two_commands_share_a_store(tmp_path: Path) -> None:
    cells = [Cell("chunked", seed=seed) for seed in range(40)]
    wrong: list[Outcome | None] = []

    def work() -> None:
        store = CellStore(tmp_path, "v1")
        for cell in cells:
            if store.find(cell) is None:
                store.keep(cell, GOOD)
            found = store.find(cell)
            if found != GOOD:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(list(tmp_path.iterdir())) == len(cells)


def test_a_policy_that_changes_while_it_runs_is_told_and_nothing_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("one")
    answers(monkeypatch, f"pathlib.Path({str(policy)!r}).write_text('another')", ANSWER)
    store = CellStore(tmp_path / "kept", "v1")
    with CellPool(1, store) as pool:
        during, after = (pool.run(Cell(str(policy), seed=seed)) for seed in (0, 1))
        other = pool.run(Cell("chunked"))
    assert f"{policy} changed while the study ran" in during.error
    assert f"{policy} changed while the study ran" in after.error
    assert other == GOOD
    assert store.find(Cell(str(policy), seed=0)) is None
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_policy_in_python_is_one_of_the_files_that_results_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install(tmp_path / "site", "fickle", {"fickle": "fickle:Fickle"}, {"fickle": POLICY})
    monkeypatch.syspath_prepend(folder)
    store, cell = CellStore(tmp_path / "kept", "v1"), Cell("fickle")
    store.keep(cell, GOOD)
    assert store.find(cell) == GOOD
    (folder / "fickle.py").write_text(POLICY + "# and more\n")
    assert store.find(cell) is None
    # It may leave something behind, so each of its cells has a process of its own.
    answers(monkeypatch, r"out.write(good.replace(b'0.5', b'%d' % os.getpid()) + b'\n')")
    with CellPool(1) as pool:
        assert len({pool.run(Cell("fickle", seed=seed)).seconds for seed in (0, 1)}) == 2
        assert len({pool.run(Cell("chunked", seed=seed)).seconds for seed in (0, 1)}) == 1


def test_a_process_that_is_killed_costs_one_run_which_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "b'\"seed\":3' in line and os.kill(os.getpid(), 9)", ANSWER)
    with CellPool(1) as pool:
        died, next_one = (pool.run(Cell("chunked", rate=2.5, seed=seed)) for seed in (3, 4))
    assert died.error == ("the process that ran chunked on sharegpt at 2.5/s with seed 3 ended with signal 9")
    assert next_one == GOOD


def test_a_policy_that_hangs_is_ended_and_one_that_is_slow_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(
        monkeypatch, r"out.write(b'\n' * 5)", "out.flush()", "b'hangs' in line and time.sleep(99)", ANSWER
    )
    monkeypatch.setattr(cell_process, "SILENCE_S", 0.05)
    with CellPool(1) as pool:
        hung = pool.run(Cell("hangs", rate=1.0))
        monkeypatch.setattr(cell_process, "SILENCE_S", 60.0)
        slow = pool.run(Cell("chunked"))
    assert "the run of hangs on sharegpt at 1/s with seed 0 was ended" in hung.error
    assert "a policy that does not return" in hung.error
    assert slow == GOOD


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="it looks for processes in /proc")
def test_a_process_whose_parent_is_killed_ends_whatever_it_does() -> None:
    hangs = (
        "import os, sys; from muxk.client import orphans; orphans.LOOK_EVERY_S = 0.01\n"
        "orphans.end_with(os.getppid()); print(os.getpid(), flush=True)\nwhile True: pass"
    )
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {hangs!r}]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        assert ends(child)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_process_that_can_not_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_process, "COMMAND", ("/nowhere/at/all",))
    with CellPool(1) as pool:
        assert "no process could be started for it: No such file" in pool.run(Cell("chunked")).error


def test_where_files_can_not_be_written_is_found_out_before_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, absent = tmp_path / "there.json", tmp_path / "absent.html"
    there.write_text("kept")
    check_files(("--json", there), ("--html", absent), ("--json", Path("/dev/full")), ("--html", None))
    assert there.read_text() == "kept"
    assert not absent.exists()
    for files, complaint in (
        ((("--json", tmp_path / "no" / "x"),), "there is no folder"),
        ((("--json", tmp_path),), "that is a folder"),
        ((("--json", there), ("--html", tmp_path / "." / "there.json")), "--json is the same file"),
        ((("--json", Path("/proc/x.json")),), "it can not be written"),
    ):
        with pytest.raises(Exit):
            check_files(*files)
        assert complaint in capsys.readouterr().err
    assert not write_files(("--json", Path("/dev/full"), b"x"), ("--html", absent, b"page"))
    assert "--json /dev/full: No space left on device" in capsys.readouterr().err
    assert absent.read_bytes() == b"page"  # the one that fails does not take the others with it


def test_a_record_that_a_full_disk_cuts_off_is_told(tmp_path: Path) -> None:
    trace, record = short_requests(tmp_path), tmp_path / "run.record"
    gpu, opened = open_gpu_backend("sim:h200", "qwen3-8b"), open_with_text("chunked", {})
    plan = SimPlan(opened, gpu, find_workload(str(trace), Traffic(30.0)), 2, None, record=record)
    with no_room_on_disk(4096):
        run = simulate(plan)
    assert run.record_ended == "it can not be written: File too large"
    assert ("note", f"the record of decisions ends early: {run.record_ended}") in rows(plan, run)


def test_output_to_a_full_disk_ends_with_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "muxk.client.cli", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "muxk: the output can not be written: No space left on device\n"
