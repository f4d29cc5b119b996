"""Rows of the running batch: who takes the next step, and who needs a page."""

from __future__ import annotations

from muxk.actors.decode_batch import DecodeBatch
from muxk.actors.decode_rows import GROW_AHEAD_TOKENS, Ending, Row
from muxk.actors.messages import GrowPages, Request, ReservedRequest, SamplingParams
from muxk.kernel.view import RequestClass
from muxk.kernel.work import PAGE_SIZE, int32_bytes

PROMPT = 20
CLASS = RequestClass("default", rank=0, tbt_slo_ns=10**8, ttft_slo_ns=10**9)


def joined(batch: DecodeBatch, request_id: int, max_tokens: int = 100, pages: int = 2) -> Row:
    params = SamplingParams(max_tokens, 0.0, 1.0, 0, 0, 0, (), True)
    prompt = int32_bytes(list(range(PROMPT)))
    request = Request(request_id, 0, 0, prompt, b"", params, 0, 0, in_class=CLASS, as_ids=True)
    return batch.add(ReservedRequest(request, tuple(range(1, pages + 1)), 0), 7, frozenset())


def step(batch: DecodeBatch, number: int, tokens: list[int]) -> list[int]:
    submitted = batch.submit(batch.ready(), number, 1, None)
    batch.launched(submitted.rows)
    return batch.advance(submitted.rows, int32_bytes(tokens))


def test_tokens_of_many_steps_are_each_rows_own_whenever_somebody_looks() -> None:
    batch = DecodeBatch()
    rows = [joined(batch, request_id) for request_id in (1, 2, 3)]
    for number in range(6):
        assert step(batch, number, [100 + number, 200 + number, 300 + number]) == []
    assert [row.count for row in rows] == [7, 7, 7]
    assert [row.ahead for row in rows] == [0, 0, 0]
    assert rows[1].generated == [7, *range(200, 206)]
    assert step(batch, 6, [1, 2, 3]) == []
    assert step(batch, 7, [4, 5, 6]) == []
    assert rows[2].generated == [7, *range(300, 306), 3, 6]


def test_the_last_token_of_any_row_is_told_apart() -> None:
    batch = DecodeBatch()
    joined(batch, 1, max_tokens=9)
    joined(batch, 2, max_tokens=5)
    others = [step(batch, number, [number, number]) for number in range(4)]
    assert others == [[], [], [], [1]]


def test_a_page_that_comes_after_the_end_of_its_row_brings_it_no_step() -> None:
    batch = DecodeBatch()
    row = joined(batch, 1)
    joined(batch, 2)
    for number in range(2 * PAGE_SIZE - PROMPT):
        step(batch, number, [5, 5])
    assert batch.ready() == []
    assert batch.take_wanting() == GrowPages((1, 2))
    assert batch.take_wanting() is None
    batch.end(row, Ending(keep=False, recompute=False))
    batch.add_page(row, 9)
    batch.deny_page(batch.rows[2])
    assert batch.ready() == []
    assert batch.take_wanting() == GrowPages((2,))
    assert batch.ending_rows() == [row]


def test_rows_that_soon_need_a_page_are_named_with_the_first_that_does() -> None:
    batch = DecodeBatch()
    for request_id, pages in ((1, 3), (2, 2), (3, 4)):
        joined(batch, request_id, pages=pages)
    for number in range(2 * PAGE_SIZE - PROMPT - GROW_AHEAD_TOKENS):
        step(batch, number, [5, 5, 5])
        assert batch.take_wanting() is None
    step(batch, 99, [5, 5, 5])
    assert batch.take_wanting() == GrowPages((2,), soon=(1,))


def test_where_there_are_not_plenty_of_pages_a_row_asks_only_when_it_has_to() -> None:
    batch = DecodeBatch()
    joined(batch, 1)
    for number in range(5):
        step(batch, number, [5])
    joined(batch, 2)
    asked = []
    for number in range(2 * PAGE_SIZE):
        if (wanting := batch.take_wanting()) is not None:
            asked.append((number, wanting))
            for request_id in wanting.request_ids:
                batch.add_page(batch.rows[request_id], 50 + number)
            for request_id in wanting.soon:
                batch.deny_page(batch.rows[request_id])
            if wanting.soon:
                batch.ask_apart()
        assert len(batch.ready()) == 2
        step(batch, 10 + number, [5, 5])
    assert asked == [
        (0, GrowPages((1,), soon=(2,))),
        (5, GrowPages((2,))),
        (16, GrowPages((1,), soon=(2,))),
        (21, GrowPages((2,))),
    ]


def test_a_batch_asks_for_pages_once_in_as_many_steps_as_a_page_has_slots() -> None:
    batch = DecodeBatch()
    steps, asked = 4 * PAGE_SIZE, 0
    for request_id in range(1, 9):
        joined(batch, request_id, pages=2 + request_id % 3)
    for number in range(steps):
        step(batch, number, [5] * 8)
        if (wanting := batch.take_wanting()) is not None:
            asked += 1
            for request_id in (*wanting.request_ids, *wanting.soon):
                batch.add_page(batch.rows[request_id], 50 + number)
        assert len(batch.ready()) == 8
    assert 2 <= asked <= 1 + steps // PAGE_SIZE
