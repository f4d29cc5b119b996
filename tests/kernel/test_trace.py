"""The trace's ring, formatting and hash."""

from __future__ import annotations

from muxk.kernel.trace import Trace


class Rude:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_the_ring_keeps_the_newest_records_in_order() -> None:
    trace = Trace(3)
    for value in range(10):
        trace.record(value, "sent", "a", "Word", value)
    assert [record.detail for record in trace.recent(100)] == [7, 8, 9]
    assert [record.detail for record in trace.recent(2)] == [8, 9]
    assert trace.recent(0) == []


def test_a_record_prints_on_one_line_whatever_its_detail() -> None:
    trace = Trace()
    trace.record(12, "handled", "arbiter", "ItemDone", "x" * 10_000)
    trace.record(13, "handled", "arbiter", "ItemDone", Rude())
    trace.record(14, "started", "arbiter", "generation 1")
    long, rude, plain = map(str, trace.recent(3))
    assert len(long) < 300
    assert "repr failed" in rude
    assert plain.split() == ["14", "started", "arbiter", "generation", "1"]


def test_the_hash_depends_on_time_receiver_and_payload() -> None:
    hashes = set()
    for delivery in ((1, "a", b"x"), (2, "a", b"x"), (1, "b", b"x"), (1, "a", b"y")):
        trace = Trace(hashed=True)
        trace.mix(*delivery)
        hashes.add(trace.hash)
    assert len(hashes) == 4


def test_without_a_hash_mixing_costs_and_gives_nothing() -> None:
    trace = Trace()
    trace.mix(1, "a", b"x")
    assert trace.hash == ""
