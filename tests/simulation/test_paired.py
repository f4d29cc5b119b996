"""Goodputs compared seed by seed: what the intervals of two means do not tell apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from muxk.client.cells import Cell, Goal
from muxk.client.compare import Entry
from muxk.client.contenders import Contender
from muxk.client.goodput import Goodput, Limit, SeedGoodput, combine
from muxk.client.paired import in_words, paired_ratio


def goodput_of(rates: Sequence[float], limit: Limit = Limit.FOUND) -> Goodput:
    return combine([SeedGoodput(seed, rate, None, limit, (), ()) for seed, rate in enumerate(rates)])


def entry_of(label: str, found: Goodput) -> Entry:
    return Entry(
        Contender(label, label, (), "sim:h200"), "loogle", Cell(label), goodputs={Goal.STRICT: found}
    )


def test_who_is_behind_with_every_seed_is_told_apart_although_the_seeds_differ_more_than_the_two_do() -> None:
    first, behind = goodput_of([0.5, 0.8, 1.1]), goodput_of([0.42, 0.66, 0.9])
    assert behind.high > first.low
    ratio = paired_ratio(behind, first)
    assert ratio is not None
    assert ratio.mean == pytest.approx((0.84 + 0.825 + 0.818) / 3, abs=1e-3)
    assert ratio.tells_apart
    same = entry_of("same", goodput_of([0.6, 0.7, 1.1]))
    (line,) = in_words([entry_of("muxwise", first), entry_of("chunked", behind), same], Goal.STRICT)
    assert line.startswith("loogle, strict, as a share of what muxwise carries with the same seed")
    assert "chunked 0.83 (0.80-0.86); " in line
    assert line.endswith(", not told apart.")


def test_a_bound_a_failure_and_one_seed_have_no_share() -> None:
    first = goodput_of([0.5, 0.8])
    assert paired_ratio(goodput_of([0.5, 0.8], Limit.ABOVE_HIGHEST), first) is None
    assert paired_ratio(goodput_of([0.0, 0.8], Limit.BELOW_LOWEST), first) is None
    assert paired_ratio(first, goodput_of([0.0, 0.8], Limit.BELOW_LOWEST)) is None
    assert paired_ratio(None, first) is None
    assert paired_ratio(goodput_of([0.5]), goodput_of([0.5])) is None
    assert list(in_words([entry_of("alone", first)], Goal.STRICT)) == []
