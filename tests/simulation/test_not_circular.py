"""An estimator that was measured on one card, used on cards that are off: the SLO is still met."""

from __future__ import annotations

from dataclasses import replace

import pytest
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.profiling import measure
from muxk.client.not_circular import ASKED, LOAD, Setting, run_at
from muxk.kernel.estimates import Estimates
from muxk.profiles.gpu import load_gpu
from muxk.profiles.grid import QUICK
from muxk.profiles.perturbation import WORST, perturbed

SETTING = Setting("sim:a100", "llama-3.1-8b", "sharegpt", "20ms", 50)
RATE = 4.0
"""Requests a second that are met on the card that was measured."""


@pytest.fixture(scope="module")
def estimates() -> Estimates:
    size = replace(QUICK, repeats=1, rows=(1, 64), context=(2048, 32768))
    return measure(open_gpu_backend(SETTING.device, SETTING.model).backend, size).estimates


def test_the_slo_is_met_on_cards_that_are_off_at_a_little_less_load(estimates: Estimates) -> None:
    measured = run_at(SETTING, RATE, estimates, SETTING.device)
    assert measured.kept, "the queue's stability needs more requests than this: the command looks at it"
    for seed in (WORST,):
        found = run_at(SETTING, LOAD * RATE, estimates, f"{SETTING.device},off={ASKED}%:{seed}")
        assert found.kept, found
        assert found.p99_tbt_ms != measured.p99_tbt_ms, "it is another card"


def test_a_card_is_off_by_the_share_that_was_asked_in_each_group_as_its_seed_says() -> None:
    card = load_gpu("a100")
    for seed in (1, 2, 3, WORST):
        other = perturbed(card, 0.15, seed)
        assert other == perturbed(card, 0.15, seed)
        assert other.card == card.card, "what the data sheet says"
        for theirs, ours in (
            (other.gemm.floor_ns, card.gemm.floor_ns),
            (other.prefill_attention.efficiency, card.prefill_attention.efficiency),
            (other.co_run.interference, card.co_run.interference),
        ):
            assert theirs / ours in (pytest.approx(1.15), pytest.approx(1 / 1.15))
    assert perturbed(card, 0.15, 1) != perturbed(card, 0.15, 2)
    assert perturbed(card, 0.15, WORST).co_run.interference > card.co_run.interference
    assert perturbed(card, 0.0, 1) == card
