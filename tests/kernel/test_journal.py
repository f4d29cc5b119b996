"""The journal of decisions: what it keeps, what it lets go, and the file it can be written to."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from muxk.kernel.decider import Decider
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.journal import Forgotten, Journal, OrderQuestion, Record
from muxk.kernel.policy import PolicyBook, PolicyText
from muxk.kernel.record_frames import NotARecording
from muxk.kernel.record_reader import read_recording
from muxk.kernel.recording import Recorder
from muxk.kernel.view import DecodeView, KvView, QueueView, RequestView, View
from muxk.kernel.work import Split
from muxk.policies.engine import compile_policy

MS = 1_000_000
TEXT = """
apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: mine}
spec: {extends: muxwise}
"""
ESTIMATES = Estimates(4, (DecodeModel(1, 5e6, 0, 0, 1.0),), (PrefillModel(1, 1e6, 0, 0, 1.0),))


def view(now_ns: int, batch: int = 1, estimates: Estimates = ESTIMATES) -> View:
    return View(
        now_ns=now_ns,
        units_total=8,
        splits=tuple(Split(units, 8 - units) for units in range(1, 8)),
        split=Split(8, 8),
        layers=4,
        decode=DecodeView(batch, 100, True, False, 0),
        running=None,
        parked=None,
        candidate=None,
        prefill_in_flight=0,
        queue=QueueView(0, 0),
        kv=KvView(100, 100),
        estimates=estimates,
    )


def request(request_id: int, arrival_ns: int = 0) -> RequestView:
    return RequestView(request_id, arrival_ns, 1000 * MS, 100, 0, 16, 7, 0, 0)


def decider(journal: Journal | None = None) -> tuple[Decider, PolicyBook]:
    book = PolicyBook(journal)
    text = PolicyText(TEXT, "mine.yaml")
    sha = book.add(compile_policy(text.source, text.filename), text)
    return Decider(book, sha, "arbiter", lambda: 77), book


def test_equal_decisions_in_a_row_are_one_record_with_its_first_and_latest_view() -> None:
    asks, book = decider()
    for now_ns in (10, 20, 30):
        asks.decide(view(now_ns))
    asks.retain(request(1))
    asks.decide(view(40))
    asks.decide(view(50, batch=0))
    runs = [record for record in book.journal.snapshot() if record.point == "decide"]
    assert [(run.count, run.at_ns, run.last_at_ns) for run in runs] == [(4, 10, 40), (1, 50, 50)]
    assert runs[0].view == view(10)
    assert runs[0].last_view == view(40)
    assert runs[0].answer == asks.policy.decide(view(10))


def test_the_ring_is_bounded_and_a_run_that_left_it_begins_again() -> None:
    asks, book = decider(Journal(records=4))
    asks.decide(view(1))
    for number in range(4):
        asks.retain(request(number))
    assert [record.point for record in book.journal.snapshot()] == 4 * ["retain"]
    asks.decide(view(2))
    assert len(book.journal) == 4
    assert book.journal.snapshot()[-1].view == view(2)


def test_old_questions_about_many_requests_lose_them_and_keep_the_head_of_their_answer() -> None:
    asks, book = decider(Journal(requests=100))
    for _ in range(4):
        asks.order([request(number, arrival_ns=number) for number in range(40)], now_ns=5 * MS)
    first, *_, last = book.journal.snapshot()
    assert first.view == Forgotten(5 * MS, 40)
    assert len(first.answer.order) == 16
    assert isinstance(last.view, OrderQuestion)
    assert len(last.view.requests) == len(last.answer.order) == 40


def test_the_service_of_classes_is_kept_as_it_was_when_it_was_asked() -> None:
    asks, book = decider()
    service = {"default": 10.0}
    asks.order([request(1)], now_ns=0, service=service)
    service["default"] = 99.0
    assert book.journal.snapshot()[0].view.service == {"default": 10.0}


def test_keeping_a_decision_costs_little_beside_making_it() -> None:
    asks, book = decider()
    answers = [asks.policy.decide(view(1)), asks.policy.decide(view(1, batch=0))]
    journal, seen = book.journal, view(1)
    spent_ns = []
    for _ in range(20):
        began_ns = time.thread_time_ns()
        for number in range(500):
            journal.note_run("arbiter", "sha", number, seen, answers[number % 2], None)
        spent_ns.append((time.thread_time_ns() - began_ns) / 500)
    assert min(spent_ns) < 3000  # about 700 ns on a quiet machine


# --- the file ---


def recorded(path: Path, asks: Decider, book: PolicyBook, **options: Any) -> Recorder:
    recorder = Recorder(path, book, "1.2.3", **options)
    book.journal.sink = recorder
    asks.decide(view(10 * MS))
    asks.decide(view(20 * MS))
    asks.order([request(7), request(8)], now_ns=25 * MS, service={"default": 2.0})
    recorder.name_request(7, 2, "chat")
    other = msgspec.structs.replace(ESTIMATES, layers=5)
    asks.decide(view(30 * MS, batch=0, estimates=other))
    recorder.write(recorder.take())
    return recorder


def same(left: Record, right: Record) -> bool:
    fields = ("at_ns", "actor", "point", "sha", "view", "answer", "last_at_ns", "last_view", "count")
    return all(
        msgspec.to_builtins(getattr(left, f)) == msgspec.to_builtins(getattr(right, f)) for f in fields
    )


def test_a_recorded_run_reads_back_as_it_was(tmp_path: Path) -> None:
    asks, book = decider()
    book.journal.zero_ns = 3
    recorded(tmp_path / "run", asks, book).close()
    read = read_recording(tmp_path / "run", 100)
    assert (read.header.muxk, read.header.zero_ns, read.cut_off) == ("1.2.3", 3, False)
    assert read.names == {7: "chat[0]", 8: "chat[1]"}
    assert read.policies[asks.policy.sha] == PolicyText(TEXT, "mine.yaml", {})
    written = sorted(read.records, key=lambda record: record.at_ns)
    assert len(written) == 3
    assert all(map(same, written, book.journal.snapshot()))


def test_a_file_that_was_cut_off_anywhere_tells_what_is_whole(tmp_path: Path) -> None:
    asks, book = decider()
    recorded(tmp_path / "run", asks, book).close()
    whole = (tmp_path / "run").read_bytes()
    counts = []
    for length in range(200, len(whole), 97):
        (tmp_path / "part").write_bytes(whole[:length])
        counts.append(len(read_recording(tmp_path / "part", 100).records))
    assert counts == sorted(counts)
    assert counts[-1] >= 2
    assert read_recording(tmp_path / "part", 100).cut_off


def test_a_second_run_is_appended_after_the_last_whole_frame_and_is_the_one_that_is_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    asks, book = decider()
    recorded(path, asks, book).close()
    first = path.read_bytes()
    path.write_bytes(first[:-3])
    asks, book = decider()
    book.journal.zero_ns = 9
    recorded(path, asks, book).close()
    read = read_recording(path, 100)
    assert (read.header.zero_ns, len(read.records), read.cut_off) == (9, 3, False)
    assert path.stat().st_size < 2 * len(first)
    assert path.stat().st_mode & 0o077 == 0


def test_recording_stops_at_its_bound_and_says_so(tmp_path: Path) -> None:
    asks, book = decider()
    recorder = recorded(tmp_path / "run", asks, book, bytes_max=3000)
    for number in range(50):
        asks.retain(request(number))
    recorder.write(recorder.take())
    assert "reached its bound of 3000 bytes" in recorder.describe()["stopped"]
    assert (tmp_path / "run").stat().st_size <= 3000
    asks.retain(request(1))
    assert recorder.take() == []
    recorder.close()
    assert not read_recording(tmp_path / "run", 100).cut_off


@pytest.mark.parametrize("content", [b"hello, this is no recording", b"\x00\x00\x00\x03abc", b"\xff" * 64])
def test_another_file_is_neither_overwritten_nor_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(NotARecording, match="no recorded run"):
        Recorder(path, decider()[1], "1")
    with pytest.raises(NotARecording, match="no recorded run"):
        read_recording(path, 10)
    assert path.read_bytes() == content


def test_questions_about_requests_are_let_go_with_their_records() -> None:
    """Else small ones stay until all of them together hold too many requests, which takes long."""
    asks, book = decider(Journal(records=4))
    questions = [[request(number)] for number in range(20)]
    for question in questions:
        asks.order(question, now_ns=0)
        asks.retain(question[0])
    kept = [record.view.requests for record in book.journal.snapshot() if record.point == "order"]
    assert kept == questions[-2:]
    held = [question for question in questions if len(gc.get_referrers(question)) > 1]
    assert len(held) <= 2
    assert book.journal._requests == 2
