"""Rows that get a page before they need it: only where there are plenty, and nobody loses one for it."""

from __future__ import annotations

import pytest
from by_hand import Sent, decode_by_hand, joining, request
from muxk.actors.decode import Decode
from muxk.actors.kv_pool import PLENTY, KvPool
from muxk.actors.messages import GrowPages, PagesGrown, ReleasePages, ReservePages
from muxk.actors.refs import Refs
from muxk.kernel.messages import StepLaunched
from muxk.kernel.work import PAGE_SIZE

ROWS = 4


def pool_by_hand(free: int) -> tuple[Sent, KvPool]:
    """With ROWS requests of a page each, and so many pages that nobody has."""
    sent, pool = Sent(), KvPool(Refs(), {0: range(1, 1 + ROWS + free)})
    pool.context = sent  # type: ignore[assignment]
    for request_id in range(1, 1 + ROWS):
        assert pool.state.pool.reserve(request_id, b"\0" * 4 * (PAGE_SIZE - 1), spare=0) is not None
    assert pool.state.pool.available == free
    return sent, pool


@pytest.mark.parametrize(
    ("free", "early"), [(PLENTY * 4, 3), (PLENTY * 3, 2), (PLENTY + 1, 0), (1, 0)], ids=str
)
def test_one_page_in_so_many_goes_to_rows_that_do_not_need_it_yet(free: int, early: int) -> None:
    sent, pool = pool_by_hand(free)
    pool.on_grow_pages(GrowPages((1,), soon=(2, 3, 4)))
    [grown] = sent.of(PagesGrown)
    soon = (2, 3, 4)
    assert grown.request_ids == (1, *soon[:early])
    assert (grown.denied, grown.later) == ((), soon[early:])
    pool.state.pool.check()


def test_who_needs_a_page_is_denied_and_who_does_not_is_told_later() -> None:
    sent, pool = pool_by_hand(0)
    pool.on_grow_pages(GrowPages((1,), soon=(2,)))
    assert sent.of(PagesGrown) == [PagesGrown((), (), denied=(1,), later=(2,))]


def test_no_page_is_taken_early_while_a_prompt_waits_for_pages() -> None:
    sent, pool = pool_by_hand(40)
    waiting = request(9, max_tokens=5, prompt_tokens=100 * PAGE_SIZE)
    pool.on_reserve_pages(ReservePages((waiting,)))
    pool.on_grow_pages(GrowPages((1,), soon=(2, 3)))
    [grown] = sent.of(PagesGrown)
    assert (grown.request_ids, grown.later) == ((1,), (2, 3))


def stalled_row(decode: Decode) -> None:
    """Request 1 has no slot left, and what it asked for is still under way."""
    decode.on_join_decode(joining(request(1, max_tokens=50, prompt_tokens=14), (1,), 97))
    for step_id in (1, 2):
        decode.on_step_launched(StepLaunched(step_id, version=1))
    assert decode.state.batch.stalled


def test_nobody_is_evicted_because_there_are_not_plenty() -> None:
    sent, decode = decode_by_hand()
    stalled_row(decode)
    decode.on_join_decode(joining(request(2, max_tokens=9, prompt_tokens=10), (2, 3), 98))
    decode.on_pages_grown(PagesGrown((), (), denied=(), later=(2,)))
    assert not sent.of(ReleasePages)
    assert decode.state.recomputes == 0
    decode.on_pages_grown(PagesGrown((), (), denied=(1,)))
    assert decode.state.recomputes == 1
