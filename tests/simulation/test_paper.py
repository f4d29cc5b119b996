"""`make paper`: ratios of the same seeds, what assumed constants do, and what the page says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from muxk.client.cells import opened_policy
from muxk.client.experiments import CellFailed
from muxk.client.goodput import Goodput, Limit, Search, SeedGoodput, combine, search_rate
from muxk.client.paper_effects import Subject, effects, movable
from muxk.client.paper_extras import Extra
from muxk.client.paper_moves import Moved, wanted
from muxk.client.paper_notes import EDITION, EDITION_VERSION, edition
from muxk.client.paper_off import off_section
from muxk.client.paper_report import _extras, _sweeps, is_close, may_be_close, off_figures
from muxk.client.paper_rows import AGENT_8B, FIGURES, SHAREGPT_8B, SHAREGPT_70B, System
from muxk.client.paper_study import Found, near, paired
from muxk.client.paper_trials import Bench, singles, trials

CHUNKED = next(f for f in FIGURES if f.setting is AGENT_8B and f.other is System.CHUNKED)


def goodput(*rates: float, first: int = 0) -> Goodput:
    return combine(
        [SeedGoodput(first + seed, rate, None, Limit.FOUND, (), ()) for seed, rate in enumerate(rates)]
    )


def found(ours: Goodput, other: Goodput) -> Found:
    return Found({(AGENT_8B, System.MUXWISE): ours, (AGENT_8B, System.CHUNKED): other})


def test_a_ratio_is_of_the_same_seed_so_that_its_interval_is_narrow_where_seeds_differ_alike() -> None:
    ratio = paired(goodput(10.0, 4.0, 7.0), goodput(5.0, 2.0, 3.5))
    assert ratio is not None
    assert ratio.of_seeds == (2.0, 2.0, 2.0)
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 2.0))


def test_seeds_that_only_one_of_the_two_has_do_not_count() -> None:
    ratio = paired(goodput(10.0, 4.0, 7.0), goodput(4.0, first=1))
    assert ratio is not None
    assert ratio.of_seeds == (1.0,)


@pytest.mark.parametrize("other", [goodput(5.0, 0.0), CellFailed("no room"), None])
def test_there_is_no_ratio_to_what_meets_its_slo_at_no_rate_or_failed(
    other: Goodput | CellFailed | None,
) -> None:
    assert paired(goodput(10.0, 4.0), other) is None


def test_a_figure_whose_mean_is_off_is_off_and_says_that_its_interval_reaches_the_paper_s() -> None:
    wide = found(goodput(10.0, 10.0, 10.0), goodput(9.0, 4.0, 9.0))
    assert not is_close(CHUNKED, wide)
    assert may_be_close(CHUNKED, wide)
    assert not may_be_close(CHUNKED, found(goodput(10.0, 10.1, 10.0), goodput(10.0, 10.1, 10.0)))
    of_two = found(goodput(10.0, 10.0), goodput(9.0, 4.0))
    assert not may_be_close(CHUNKED, of_two), "Student's t for two seeds reaches everything"


def test_a_search_near_a_rate_goes_in_small_steps() -> None:
    asked = []

    def met(rate: float, seed: int) -> bool:
        asked.append(rate)
        return rate < 12.0

    answer = search_rate(met, near(10.0, 0.08), 0)
    assert asked[:2] == [10.0, 12.5]
    assert 11.0 < answer.rate < 12.0
    with pytest.raises(Exception, match="a factor above"):
        Search(1.0, 0.5, 2.0, step=1.0)


def test_a_constant_of_what_a_system_does_not_have_moves_nothing_and_others_what_they_should() -> None:
    constants = movable()
    one_gpu = effects(Subject(SHAREGPT_8B, System.CHUNKED, 28.0, 512), constants)
    eight = effects(Subject(AGENT_8B, System.MUXWISE, 9.0), constants)
    assert not any(
        one_gpu[name] for name in constants if name.startswith(("all_reduce", "experts", "co_run"))
    )
    assert eight["prefill_attention.efficiency"] > 0.05 > eight["prefill_attention.floor_ns"]
    assert eight["co_run.interference"] > 0.0
    assert one_gpu["host.wakeup_ns"] < 0.01


def test_what_matters_is_run_at_both_ends_and_the_page_names_the_constants_of_the_range() -> None:
    both = found(goodput(10.0, 10.1), goodput(8.0, 8.1))
    ours = Moved(Subject(AGENT_8B, System.MUXWISE, 10.0), {"a.big": 0.2, "a.small": 0.01, "a.none": 0.0})
    other = Moved(Subject(AGENT_8B, System.CHUNKED, 8.0), {"a.big": 0.1, "a.small": 0.0, "a.none": 0.0})
    assert [(one is ours, name, factor) for one, name, factor in wanted([ours, other])] == [
        (True, "a.big", 0.7),
        (True, "a.big", 1.3),
        (False, "a.big", 0.7),
        (False, "a.big", 1.3),
    ]
    ours.rates.update({("a.big", 0.7): 8.0, ("a.big", 1.3): 12.0})
    other.rates.update({("a.big", 0.7): 8.0, ("a.big", 1.3): 0.0})
    both.moved = {(AGENT_8B, System.MUXWISE): ours, (AGENT_8B, System.CHUNKED): other}
    page = "\n".join(off_section(both, off_figures(both)))
    assert "ours 1.25 (-52%)" in page
    assert "**1.00** (`a.big` x 0.7) to **inf** (`a.big` x 1.3)" in page
    assert "in no formula of what runs: `a.none`; too little: `a.small` 1.0%." in page


def test_every_trial_is_a_policy_that_compiles_and_differs_from_the_one_that_ships(tmp_path) -> None:  # type: ignore[no-untyped-def]
    bench = Bench(tmp_path, {})
    cells = [cell for trial in trials(bench) for cell in (trial.ours, trial.theirs) if cell is not None]
    cells += [cell for single in singles(bench) for cell in (single.cell, single.than) if cell is not None]
    copies = {cell.policy for cell in cells if cell.policy.endswith(".yaml")}
    assert len(copies) >= 5
    for cell in cells:
        policy = opened_policy(cell).policy
        assert policy.tbt_slo_ns == round((cell.tbt_ms or 0) * 1e6)


def test_runs_of_other_code_are_not_said_to_be_those_of_the_page_in_the_repository() -> None:
    page = Path(__file__).parents[2] / "docs" / "paper.md"
    assert edition(EDITION_VERSION) == EDITION
    assert EDITION.strip() in page.read_text("utf-8")
    other = edition("0123abcd")
    assert "0123abcd" in other
    assert EDITION.strip().splitlines()[0] not in other


def test_a_setting_may_have_fewer_seeds_and_the_page_says_what_was_not_swept() -> None:
    both = Found({}, {AGENT_8B: {256: 1.0, 512: 2.0}, SHAREGPT_8B: {256: 3.0}})
    both.batches = {SHAREGPT_8B: {512: 24.0, 2048: 28.0}}
    page = "\n".join(_sweeps(both))
    assert "| 8B, 8xA100, toolagent, TBT 50 ms | 1 | **2** |" in page
    assert "| 8B, one A100, sharegpt, TBT 50 ms | **3** | - |" in page
    assert "| 8B, one A100, sharegpt, TBT 50 ms | 24 | **28** |" in page
    assert (both.best_batch(SHAREGPT_8B), both.best_batch(AGENT_8B)) == (2048, None)


def test_chunked_prefill_has_the_budget_that_the_paper_prints_and_elsewhere_the_best_of_the_sweep() -> None:
    swept = Found({}, {AGENT_8B: {256: 1.0, 512: 2.0}, SHAREGPT_70B: {256: 13.5, 512: 16.0}})
    assert (swept.budget(AGENT_8B), swept.budget(SHAREGPT_70B)) == (512, 256)


def test_the_range_of_a_figure_names_the_constants_at_its_ends() -> None:
    figure = Extra(9, "preemption", 1.96, "x", 1.0, "P99 TTFT a prompt token, without over with")
    ranges = {"preemption": {("a.big", 0.7): 1.5, ("a.big", 1.3): 0.9, ("b.other", 0.7): 1.1}}
    page = "\n".join(_extras([figure], ranges))
    assert "Range over 2 assumed constants" in page
    assert "0.9 (`a.big` x 1.3) to 1.5 x (`a.big` x 0.7)" in page


def test_a_constant_whose_search_failed_for_one_of_the_two_gives_no_end_of_a_range() -> None:
    both = found(goodput(10.0, 10.1), goodput(8.0, 8.1))
    effects_of = {"a.big": 0.2, "b.big": 0.2}
    ours = Moved(Subject(AGENT_8B, System.MUXWISE, 10.0), effects_of)
    other = Moved(Subject(AGENT_8B, System.CHUNKED, 8.0), effects_of)
    both.moved = {(AGENT_8B, System.MUXWISE): ours, (AGENT_8B, System.CHUNKED): other}
    assert "was not run." in "\n".join(off_section(both, off_figures(both)))
    ours.rates.update({("a.big", 0.7): 2.0, ("b.big", 0.7): 9.0})
    other.rates["b.big", 0.7] = 9.0
    page = "\n".join(off_section(both, off_figures(both)))
    assert "of 1 constants that were run: **1.00** (`b.big` x 0.7) to **1.00**" in page
    assert "`a.big` 0" not in page
