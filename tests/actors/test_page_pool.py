"""The page pool: conservation, prefix reuse, eviction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from muxk.actors import page_chain
from muxk.actors.page_pool import AUDITED_PAGES, PagePool
from muxk.kernel.work import int32_bytes


def tokens(*values: int) -> bytes:
    return int32_bytes(list(values))


def run(start: int, count: int) -> bytes:
    return int32_bytes(np.arange(start, start + count))


def test_a_request_gets_pages_for_its_tokens_and_one_more() -> None:
    pool = PagePool(range(1, 11))
    assert pool.reserve(1, run(0, 15), spare=0) == 0
    assert len(pool.pages_of(1)) == 1
    assert pool.reserve(2, run(100, 16), spare=0) == 0
    assert len(pool.pages_of(2)) == 2
    assert (pool.used, pool.free) == (3, 7)


def test_only_full_pages_are_reused_and_at_least_one_token_is_left_to_compute() -> None:
    pool = PagePool(range(1, 20))
    pool.reserve(1, run(0, 40), spare=0)
    pool.publish(1, run(0, 40))
    assert pool.reserve(2, run(0, 40), spare=0) == 32
    assert pool.reserve(3, run(0, 32), spare=0) == 16
    assert pool.pages_of(2)[:2] == pool.pages_of(1)[:2]
    assert pool.pages_of(2)[2] != pool.pages_of(1)[2]


def test_kv_that_is_not_written_yet_is_not_shared() -> None:
    pool = PagePool(range(1, 20))
    pool.reserve(1, run(0, 40), spare=0)
    assert pool.reserve(2, run(0, 40), spare=0) == 0


def test_a_page_with_the_same_tokens_after_another_beginning_is_no_hit() -> None:
    pool = PagePool(range(1, 20))
    pool.reserve(1, run(0, 16) + run(500, 16), spare=0)
    pool.publish(1, run(0, 16) + run(500, 16))
    assert pool.reserve(2, run(1000, 16) + run(500, 16) + tokens(1), spare=0) == 0


class _SameForAll:
    """A hash under which all pages collide."""

    def __init__(self, digest_size: int) -> None:
        self._digest = bytes(digest_size)

    def update(self, chunk: bytes) -> None: ...

    def digest(self) -> bytes:
        return self._digest


def test_a_collision_of_the_hash_gives_out_no_foreign_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_chain, "blake2b", _SameForAll)
    pool = PagePool(range(1, 20))
    pool.reserve(1, run(0, 16) + tokens(1), spare=0)
    pool.publish(1, run(0, 16))
    assert pool.reserve(2, run(700, 16) + tokens(1), spare=0) == 0


def test_a_page_takes_the_place_of_its_double_that_was_evicted() -> None:
    pool = PagePool(range(1, 12))
    for request_id in (1, 2):
        pool.reserve(request_id, run(0, 40), spare=0)
    for request_id in (1, 2):
        pool.publish(request_id, run(0, 40))
    pool.release(1)
    assert pool.reserve(3, run(900, 120), spare=0) == 0, "it needs the pages that the first one left"
    assert pool.cached == 0
    pool.publish(2, run(0, 50))
    pool.check()
    pool.release(3)
    assert pool.reserve(4, run(0, 40), spare=0) == 32
    assert pool.pages_of(4)[:2] == pool.pages_of(2)[:2]


def test_released_pages_are_reused_until_somebody_needs_them() -> None:
    pool = PagePool(range(1, 5))
    pool.reserve(1, run(0, 40), spare=0)
    pool.publish(1, run(0, 40))
    pool.release(1)
    assert (pool.used, pool.cached, pool.free) == (0, 2, 2)
    assert pool.reserve(2, run(0, 40), spare=0) == 32
    pool.release(2)
    assert pool.reserve(3, run(900, 60), spare=0) == 0
    assert pool.cached == 0
    pool.release(3)
    assert pool.reserve(4, run(0, 40), spare=0) == 0


def test_eviction_takes_the_end_of_a_chain_before_its_beginning() -> None:
    pool = PagePool(range(1, 5))
    pool.reserve(1, run(0, 48), spare=0)
    pool.publish(1, run(0, 48))
    pool.release(1)
    pool.reserve(2, run(900, 30), spare=0)
    assert pool.reserve(3, run(0, 20), spare=0) == 16


def test_a_second_release_does_nothing() -> None:
    pool = PagePool(range(1, 5))
    pool.reserve(1, run(0, 10), spare=0)
    assert pool.release(1)
    assert not pool.release(1)
    assert not pool.release(99)
    assert pool.free == 4


def test_forgotten_pages_are_free_at_once_and_found_no_more() -> None:
    pool = PagePool(range(1, 11))
    pool.reserve(1, run(0, 40), spare=0)
    pool.publish(1, run(0, 40))
    pool.forget(1)
    pool.release(1)
    assert (pool.cached, pool.free) == (0, 10)
    assert pool.reserve(2, run(0, 40), spare=0) == 0


def test_to_forget_takes_nothing_from_others() -> None:
    pool = PagePool(range(1, 20))
    for request_id, prompt in (
        (1, run(0, 33)),
        (2, run(0, 32) + run(500, 33)),
        (3, run(0, 32) + run(500, 17)),
    ):
        pool.reserve(request_id, prompt, spare=0)
        pool.publish(request_id, prompt)
    pool.release(1)
    pool.forget(2)
    pool.release(2)
    assert pool.reserve(4, run(0, 33), spare=0) == 32, "the first request left it there"
    assert pool.reserve(5, run(0, 32) + run(500, 17), spare=0) == 48, "the third still holds it"
    assert pool.reserve(6, run(0, 32) + run(500, 33), spare=0) == 48, "the last page was of the second alone"


def test_the_check_sees_a_lost_page() -> None:
    pool = PagePool(range(1, 5))
    pool.reserve(1, run(0, 10), spare=0)
    pool._held.clear()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check()


def large_pool() -> PagePool:
    """With three requests, each of which holds more pages than are looked at in one moment."""
    pool = PagePool(range(1, 8 * AUDITED_PAGES))
    for request_id in (1, 2, 3):
        assert pool.reserve(request_id, run(request_id * 10**6, 20 * AUDITED_PAGES), spare=0) == 0
    return pool


def audited(pool: PagePool, times: int) -> None:
    for _ in range(times):
        pool.audit()


@pytest.mark.parametrize("wrong", ["not held", "cached too"])
def test_audits_of_a_large_pool_come_to_every_page_that_is_held(wrong: str) -> None:
    pool = large_pool()
    pages = 3 * len(pool.pages_of(1))
    rounds = pages // AUDITED_PAGES + 1
    audited(pool, 3 * rounds)
    page = pool.pages_of(3)[-1]
    if wrong == "not held":
        pool._references[page] = 0
    else:
        pool._cached[page] = None
    with pytest.raises(AssertionError, match=f"page {page}"):
        audited(pool, rounds)


def test_an_audit_of_a_pool_that_nobody_uses_looks_at_all_of_it() -> None:
    pool = large_pool()
    for request_id in (1, 2, 3):
        pool.release(request_id)
    pool.audit()
    pool._free.pop()
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="free twice"):
        pool.audit()


@settings(max_examples=60, stateful_step_count=60)
class PoolMachine(RuleBasedStateMachine):
    """Random life of requests over a small pool, some with shared beginnings."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(range(1, 24))
        self.live: dict[int, bytes] = {}
        self.next_id = 1

    @rule(begin=st.integers(0, 3), count=st.integers(1, 70), tail=st.integers(0, 5), spare=st.integers(0, 3))
    def reserve(self, begin: int, count: int, tail: int, spare: int) -> None:
        prompt = run(begin * 1000, count) + tokens(5000 + tail)
        reused = self.pool.reserve(self.next_id, prompt, spare)
        if reused is not None:
            assert reused % 16 == 0
            assert reused < count + 1
            assert len(self.pool.pages_of(self.next_id)) == (count + 1) // 16 + 1
            self.live[self.next_id] = prompt
        self.next_id += 1

    @rule(pick=st.integers(0, 50))
    def publish(self, pick: int) -> None:
        if self.live:
            request_id = list(self.live)[pick % len(self.live)]
            self.pool.publish(request_id, self.live[request_id])

    @rule(pick=st.integers(0, 50))
    def grow(self, pick: int) -> None:
        if self.live:
            request_id = list(self.live)[pick % len(self.live)]
            before = self.pool.available
            page = self.pool.grow(request_id)
            assert (page is None) == (before == 0)

    @rule(pick=st.integers(0, 50))
    def forget(self, pick: int) -> None:
        if self.live:
            self.pool.forget(list(self.live)[pick % len(self.live)])

    @rule(pick=st.integers(0, 50))
    def release(self, pick: int) -> None:
        if self.live:
            request_id = list(self.live)[pick % len(self.live)]
            assert self.pool.release(request_id)
            del self.live[request_id]

    @invariant()
    def whole(self) -> None:
        self.pool.check()
        assert self.pool.free + self.pool.used + self.pool.cached == self.pool.total


TestPoolMachine = PoolMachine.TestCase
