"""Costs of work items: monotone, continuous where nothing is tiled, and what does not fit is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.profiles.cost import DoesNotFit, RooflineCost, kv_pages, open_gpu
from muxk.profiles.gpu import (
    ELEMENTWISE,
    GpuError,
    elementwise_ns,
    known_gpus,
    load_gpu,
    read_gpu,
    smooth_max,
)
from muxk.profiles.operators import ShapeError, known_models, load_shape
from muxk.profiles.scaling import scaled

COSTS = {
    (gpu, model, tp): RooflineCost(load_gpu(gpu), load_shape(model), tp)
    for gpu, model, tp in (
        ("a100", "llama-3.1-70b", 8),
        ("h100", "llama-3.1-8b", 1),
        ("h200", "qwen3-8b", 1),
        ("h200", "qwen3-235b-a22b", 8),
    )
}
CARDS = {name: load_gpu(name) for name in known_gpus()}
CHOSEN = some.sampled_from(sorted(COSTS)).map(COSTS.__getitem__)
TOKENS = some.integers(0, 8192)


def load(rows: int, context: int, new: int, reused: int, layers: int = 4) -> ItemLoad:
    chunk = (1, new, new * (new + 1) // 2 + new * reused, new + reused) if new else (0, 0, 0, 0)
    return ItemLoad(layers, rows, context, *chunk, rows + new, rows + bool(new))


@settings(max_examples=150, deadline=None)
@given(CHOSEN, some.integers(0, 256), TOKENS, TOKENS, some.integers(1, 100), some.integers(8, 131))
def test_fewer_units_and_more_work_never_take_less_time(
    cost: RooflineCost, rows: int, new: int, context: int, more: int, units: int
) -> None:
    units = min(units, cost.units - 1)
    rows = rows or (not new)
    ns = cost.total_ns(load(rows, rows * context, new, context), units)
    assert ns > 0
    assert cost.total_ns(load(rows, rows * context, new, context), units + 1) <= ns * (1 + 1e-9)
    bigger = (
        load(rows + more, (rows + more) * context, new, context),
        load(rows, rows * (context + more), new, context),
        load(rows, rows * context, new, context + more),
        load(rows, rows * context, new, context, layers=5),
    )
    for other in bigger:
        assert cost.total_ns(other, units) >= ns * (1 - 1e-9)
    if new:
        assert cost.total_ns(load(rows, rows * context, new + more, context), units) >= ns * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(CHOSEN, some.integers(1, 256), some.integers(1, 2_000_000), some.integers(8, 108))
def test_time_is_continuous_in_the_context(cost: RooflineCost, rows: int, context: int, units: int) -> None:
    one, next_ = (cost.total_ns(load(rows, total, 0, 0), units) for total in (context, context + 1))
    assert next_ / one - 1 < 1e-3


@settings(max_examples=100, deadline=None)
@given(CHOSEN, some.integers(1, 256), some.integers(0, 4096), some.integers(8, 108))
def test_a_phase_draws_no_more_than_its_sms_can(cost: RooflineCost, rows: int, new: int, units: int) -> None:
    for phase in cost.phases(load(rows, rows * 2048, new, 512), units):
        assert phase.ns > 0
        assert phase.bytes / phase.ns <= cost.profile.card.bandwidth


def test_a_fused_step_costs_less_than_its_parts_and_more_than_each() -> None:
    for cost in COSTS.values():
        both = cost.total_ns(load(32, 32 * 1024, 512, 0), cost.units)
        step, chunk = (cost.total_ns(x, cost.units) for x in (load(32, 32 * 1024, 0, 0), load(0, 0, 512, 0)))
        assert max(step, chunk) < both < step + chunk


def test_all_reduce_is_paid_only_with_more_than_one_gpu_and_divides_the_rest() -> None:
    shape, profile = load_shape("llama-3.1-70b"), load_gpu("h100")
    times = {tp: RooflineCost(profile, shape, tp).total_ns(load(0, 0, 8192, 0), 132) for tp in (1, 2, 4, 8)}
    assert times[1] > times[2] > times[4] > times[8] > times[1] / 8
    assert len(RooflineCost(profile, shape, 1).phases(load(0, 0, 64, 0), 132)) == 3
    assert len(RooflineCost(profile, shape, 8).phases(load(0, 0, 64, 0), 132)) == 4


@settings(max_examples=150, deadline=None)
@given(
    some.sampled_from([(gpu, kernel) for gpu in known_gpus() for kernel in ELEMENTWISE]),
    some.integers(1, 8192),
    some.integers(64, 65_536),
    some.floats(1.0, 3.0),
    some.integers(8, 107),
)
def test_a_stream_takes_longer_for_more_bytes_more_rows_and_on_fewer_sms(
    which: tuple[str, str], rows: int, width: int, more: float, units: int
) -> None:
    """Also where it grows out of the L2 cache, and on SMs that draw less than the card gives."""
    profile, kernel, moved = CARDS[which[0]], which[1], float(rows * width)
    ns = elementwise_ns(profile, kernel, rows, moved, units)
    assert elementwise_ns(profile, kernel, rows, moved * more, units) >= ns * (1 - 1e-9)
    assert elementwise_ns(profile, kernel, rows * more, moved, units) >= ns * (1 - 1e-9)
    assert elementwise_ns(profile, kernel, rows, moved, units + 1) <= ns * (1 + 1e-9)
    assert elementwise_ns(profile, kernel, rows, moved * (1 + 1e-6), units) < ns * (1 + 1e-4), "no step"
    assert ns >= moved / (profile.card.bandwidth * units / profile.partition.saturating_units) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_a_norm_in_the_l2_cache_is_faster_a_byte_than_a_long_one_by_what_was_measured(name: str) -> None:
    """1.27 times on the A100, 1.2 to 1.4 on the H100 by the width of a row, floors included."""
    profile = load_gpu(name)
    small, large = profile.card.l2_bytes * 0.5, profile.card.l2_bytes * 3.0
    speeds = [
        moved / elementwise_ns(profile, "norm", 1, moved, profile.card.units) for moved in (small, large)
    ]
    assert 1.1 < speeds[0] / speeds[1] < 1.4


def test_narrow_rows_cost_more_a_byte_and_a_moved_constant_never_makes_time_negative() -> None:
    a100 = load_gpu("a100")
    narrow, wide = (elementwise_ns(a100, "activation", rows, 6e7, 108) for rows in (14_536, 1_817))
    assert narrow > 1.2 * wide
    fast = scaled(a100, "elementwise.cached_gain", 10.0)
    assert elementwise_ns(fast, "norm", 64, 1e6, 108) > 0


def test_what_was_kept_is_what_would_be_found_again() -> None:
    cost, fresh = COSTS["h200", "qwen3-8b", 1], RooflineCost(load_gpu("h200"), load_shape("qwen3-8b"), 1)
    for _ in range(2):
        assert cost.phases(load(17, 5000, 300, 64), 96) == fresh.phases(load(17, 5000, 300, 64), 96)


def test_the_kv_pool_is_what_weights_and_reserve_leave() -> None:
    profile, shape = load_gpu("h200"), load_shape("qwen3-8b")
    pages = kv_pages(profile, shape, 1)
    used = shape.weight_bytes(1) + profile.memory.reserve_bytes + pages * 16 * shape.kv_bytes_per_token(1)
    page = 16 * shape.kv_bytes_per_token(1)
    assert profile.card.memory_bytes - page < used <= profile.card.memory_bytes
    assert open_gpu(profile, shape).pages == pages


def test_a_model_that_does_not_fit_is_refused_with_the_bytes() -> None:
    with pytest.raises(
        DoesNotFit, match=r"does not fit on a100 with tp=1: of 85,899,345,920 .* 141,107,396,608"
    ):
        kv_pages(load_gpu("a100"), load_shape("llama-3.1-70b"), 1)
    with pytest.raises(DoesNotFit, match="KV pages do not fit"):
        open_gpu(load_gpu("a100"), load_shape("llama-3.1-8b"), pages=1 << 30)
    with pytest.raises(ShapeError, match="tp=3"):
        open_gpu(load_gpu("a100"), load_shape("llama-3.1-8b"), tp=3)


@pytest.mark.parametrize("name", known_gpus())
def test_every_group_of_every_card_names_its_source(name: str) -> None:
    profile = load_gpu(name)
    for field in profile.__struct_fields__:
        group = getattr(profile, field)
        if isinstance(group, msgspec.Struct):
            assert len(group.source) > 10, field  # type: ignore[attr-defined]
    assert set(profile.elementwise.kernels) == set(ELEMENTWISE)
    assert set(profile.all_reduce.by_tp) == {2, 4, 8}
    fitted = {row.operator for row in profile.held_out}
    assert fitted & {"gemm", "gate_up"}, "GEMMs stand on a table of every card"


def test_every_model_runs_on_every_card_at_the_smallest_tp_that_fits() -> None:
    for gpu in known_gpus():
        for model in known_models():
            fitting = [tp for tp in (1, 2, 4, 8) if _fits(gpu, model, tp)]
            assert fitting, (gpu, model)
            divides = [tp for tp in (1, 2, 4, 8) if not load_shape(model).heads % tp]
            assert fitting == [tp for tp in divides if tp >= fitting[0]]


def _fits(gpu: str, model: str, tp: int) -> bool:
    try:
        return kv_pages(load_gpu(gpu), load_shape(model), tp) > 0
    except (DoesNotFit, ShapeError):
        return False


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "version None"),
        ("version: 99", "version 99"),
        ("version: 1\nname: x", "missing required field"),
        ("version: 1\nname: x\nsurprise: 1", "surprise|missing"),
        (": : :\n -", "x.yaml"),
        ("[1, 2]", "version None"),
    ],
)
def test_a_damaged_profile_is_refused_with_its_name(text: str, reason: str) -> None:
    with pytest.raises(GpuError, match=reason):
        read_gpu(text, "x.yaml")


def test_an_unknown_card_is_told_which_ones_there_are() -> None:
    with pytest.raises(GpuError, match="a100, h100, h200"):
        load_gpu("b200")


def test_the_smooth_maximum_is_the_maximum_where_the_two_differ() -> None:
    assert smooth_max(100.0, 0.0, 2.0) == 100.0
    assert smooth_max(100.0, 1.0, 2.0) == pytest.approx(100.0, rel=1e-4)
    assert smooth_max(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert smooth_max(1e300, 1e300, 10.0) < 1.1e300
