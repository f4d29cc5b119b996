"""The predictor: what holds of every fit, and how far off it is on a simulated card."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.profile_check import DECODE_MAX, PREFILL_MAX, check_profile
from muxk.actors.profiling import measure
from muxk.kernel.estimates import DecodeModel, PrefillModel
from muxk.kernel.work import attention_pairs
from muxk.profiles.grid import FULL, SOLO_CONTEXT, SOLO_ROWS
from muxk.profiles.predictor import (
    CONTEXT_KNOTS,
    ROW_KNOTS,
    TILES,
    TOKEN_KNOTS,
    DecodeSample,
    PrefillSample,
    fit_decode,
    fit_prefill,
)

TIMES = st.floats(1.0, 1e9)
UNITS = st.integers(1, 200)
ROWS = st.integers(1, 600)
CONTEXT = st.integers(1, 1_000_000)
TOKENS = st.integers(1, 100_000)
DECODES = st.lists(st.builds(DecodeSample, UNITS, ROWS, CONTEXT, TIMES), min_size=1, max_size=25)
PREFILLS = st.lists(
    st.builds(PrefillSample, UNITS, TOKENS, st.integers(1, 10**10), TIMES), min_size=1, max_size=25
)


def one_row(new: int, reused: int) -> tuple[int, int]:
    return new, attention_pairs((new,), (reused,))


@settings(max_examples=25, deadline=None)
@given(DECODES, ROWS, CONTEXT, st.integers(0, 50), st.integers(0, 10_000))
def test_no_decode_step_is_negative_or_faster_with_more_load_or_with_fewer_units(
    samples: list[DecodeSample], rows: int, context: int, more_rows: int, more_context: int
) -> None:
    models = fit_decode(samples)
    for model in models:
        step_ns = model.step_ns(rows, context)
        assert step_ns >= 0.0
        assert model.step_ns(rows + more_rows, context + more_context) >= step_ns * (1 - 1e-9)
    for fewer, more in pairwise(models):
        assert fewer.step_ns(rows, context) >= more.step_ns(rows, context) * (1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(PREFILLS, TOKENS, st.integers(0, 100_000), st.integers(0, 5_000), st.integers(0, 5_000))
def test_no_prefill_is_negative_or_faster_with_more_load_or_with_fewer_units(
    samples: list[PrefillSample], new: int, reused: int, more: int, more_reused: int
) -> None:
    models = fit_prefill(samples)
    for model in models:
        layer_ns = model.layer_ns(*one_row(new, reused))
        assert layer_ns >= 0.0
        assert model.layer_ns(*one_row(new + more, reused + more_reused)) >= layer_ns * (1 - 1e-9)
    for fewer, many in pairwise(models):
        load = one_row(new, reused)
        assert fewer.layer_ns(*load) >= many.layer_ns(*load) * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(DECODES, PREFILLS)
def test_no_range_begins_with_a_jump(decodes: list[DecodeSample], prefills: list[PrefillSample]) -> None:
    ramps = [ramp for model in fit_decode(decodes) for ramp in (model.rows, model.context) if ramp]
    ramps += [model.tokens for model in fit_prefill(prefills) if model.tokens]
    for ramp in ramps:
        for knot in (*ROW_KNOTS, *CONTEXT_KNOTS, *TOKEN_KNOTS):
            before, after = ramp.at(knot - 1e-6), ramp.at(knot + 1e-6)
            steepest = max(ramp.slopes)
            assert after - before <= 3e-6 * steepest + 1e-9 * after


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    made = [DecodeModel(units, 5e6, 4e5 / units, 200.0 / units, guard=1.0) for units in (8, 16)]
    samples = [
        DecodeSample(model.units, rows, context, model.step_ns(rows, context))
        for model in made
        for rows in SOLO_ROWS
        for context in SOLO_CONTEXT
    ]
    for model, found in zip(made, fit_decode(samples), strict=True):
        for rows, context in ((3, 1500), (75, 60_000), (450, 300_000)):
            assert found.step_ns(rows, context) == pytest.approx(model.step_ns(rows, context), rel=1e-3)


def test_the_step_of_a_tile_is_where_the_tile_is() -> None:
    tile = TILES[0]
    made = PrefillModel(16, 1e4, 0.0, 0.01, scale=1.0, tiles=((tile, 500.0),))
    samples = [
        PrefillSample(16, new, pairs, made.layer_ns(new, pairs))
        for new, pairs in (one_row(new, 0) for new in (32, 64, 65, 128, 129, 200, 512, 513, 2048, 2049, 9000))
    ]
    (found,) = fit_prefill(samples)
    full, begun = found.layer_ns(*one_row(1024, 0)), found.layer_ns(*one_row(1025, 0))
    assert begun - full == pytest.approx(500.0 * tile, rel=0.05)


@pytest.mark.parametrize("card", ["a100", "h100"])
def test_held_out_shapes_are_predicted_as_well_as_the_paper_says(card: str) -> None:
    """A share of the shapes that `muxk profile --check` looks at, and no co-runs."""
    size = replace(FULL, new=(2048,), reused=(0,), rows=(1,), context=(2048,))
    profile = measure(open_gpu_backend(f"sim:{card}", "llama-3.1-8b", None, 5).backend, size)
    other_noise = open_gpu_backend(f"sim:{card}", "llama-3.1-8b", None, 6).backend
    long, decode, short = check_profile(other_noise, profile.estimates, drawn=10)
    assert long.largest <= PREFILL_MAX, long.worst
    assert decode.largest <= DECODE_MAX, decode.worst
    assert short.median < 0.15, "short prompts are reported, but not nonsense"


def test_a_finished_profile_is_read_without_scipy() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "import muxk.actors.profiling, muxk.profiles.profile_file, muxk.client.cli_profile\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
