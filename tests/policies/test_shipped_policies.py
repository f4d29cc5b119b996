"""What the shipped policies do, on the made-up device of conftest.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import DecodeView, FormView, KvView, PrefillView, QueueView, RequestView, View
from muxk.kernel.work import Split
from muxk.policies.engine import CompiledPolicy, load_policy, shipped_policies

MakeView = Callable[..., View]
MakeBatch = Callable[..., PrefillView]
MakeRequest = Callable[..., RequestView]
MS = 1_000_000
NOBODY = DecodeView(0, 0, False, False, 0)


@pytest.fixture(scope="module")
def muxwise() -> CompiledPolicy:
    return load_policy("muxwise")


@pytest.fixture(scope="module")
def inflight() -> CompiledPolicy:
    return load_policy("inflight")


def test_muxwise_gives_decode_the_fewest_units_that_keep_the_slo(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    decision = muxwise.decide(make_view(running=make_batch()))
    assert decision.split == Split(8, 8)
    assert decision.rules[0] == "split/best-fit"
    assert decision.errors == ()


def test_muxwise_gives_decode_the_most_when_no_split_keeps_the_slo(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    slow = tuple(DecodeModel(units, 1000.0 * MS, 0.0, 0.0, 1.0) for units in (1, 16))
    estimates = Estimates(32, slow, make_view().estimates.prefill)
    decision = muxwise.decide(make_view(running=make_batch(), estimates=estimates))
    assert decision.split == Split(15, 1)


def test_muxwise_gives_all_to_the_only_phase(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    assert muxwise.decide(make_view()).split == Split(16, 0)
    assert muxwise.decide(make_view(decode=NOBODY, candidate=make_batch(batch_id=0))).split == Split(0, 16)
    assert muxwise.decide(make_view(decode=NOBODY)).split == Split(0, 16)


def test_muxwise_keeps_the_split_while_the_last_prefill_item_runs(
    muxwise: CompiledPolicy, make_view: MakeView
) -> None:
    assert muxwise.decide(make_view(prefill_in_flight=1)).split == Split(8, 8)


def test_muxwise_decodes_where_it_is_fastest(muxwise: CompiledPolicy, make_view: MakeView) -> None:
    times = {4: 50.0, 8: 20.0, 12: 30.0, 16: 25.0}
    decode = tuple(DecodeModel(units, ms * MS, 0.0, 0.0, 1.0) for units, ms in times.items())
    estimates = Estimates(32, decode, make_view().estimates.prefill)
    splits = (Split(4, 12), Split(8, 8), Split(12, 4))
    assert muxwise.decide(make_view(splits=splits, estimates=estimates)).split == Split(8, 0)


def test_muxwise_launches_n_pl_layers(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    view = make_view(running=make_batch(new_tokens=900))
    decision = muxwise.decide(view)
    decode_ns = view.estimates.decode_ns(8, 8, 800)
    prefill_ns = view.estimates.prefill_layer_ns(8, 900, 0) * view.layers
    assert decision.layers == math.ceil(decode_ns * view.layers / prefill_ns) == 12
    assert decision.rules[-1] == "slice/n-pl"


def test_muxwise_slices_a_lone_prefill_by_time(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    decision = muxwise.decide(make_view(decode=NOBODY, running=make_batch(new_tokens=1000)))
    assert decision.layers == 100 * MS / (8 * MS / 16 * 10)
    assert muxwise.decide(make_view(decode=NOBODY, running=make_batch(new_tokens=10**6))).layers == 1


def test_muxwise_starts_cold_on_half_the_device_and_single_layers(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    view = make_view(running=make_batch(), candidate=make_batch(batch_id=0), estimates=Estimates())
    decision = muxwise.decide(view)
    assert (decision.split, decision.layers, decision.preempt, decision.errors) == (Split(8, 8), 1, False, ())
    assert muxwise.decide(make_view(estimates=Estimates())).split == Split(16, 0)


def test_muxwise_lets_a_short_batch_pass_a_long_one_that_can_wait(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    long = make_batch(new_tokens=10_000, deadline_ns=100_000 * MS)
    short = make_batch(batch_id=0, new_tokens=100)
    layer_ns = 8 * MS / 8
    time_left = 32 * layer_ns * 100

    def preempts(running: PrefillView, candidate: PrefillView) -> bool:
        decision = muxwise.decide(make_view(running=running, candidate=candidate))
        assert decision.errors == ()
        return decision.preempt

    assert preempts(long, short)
    assert not preempts(msgspec.structs.replace(long, depth=1), short), "one level only"
    assert not preempts(short, long), "a longer one waits"
    latest = 1000 * MS + int(time_left) + int(32 * layer_ns)
    assert preempts(msgspec.structs.replace(long, deadline_ns=latest), short)
    assert not preempts(msgspec.structs.replace(long, deadline_ns=latest - 1), short), "its SLO would break"


def test_the_slice_after_a_preemption_is_for_the_batch_that_starts(
    muxwise: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    view = make_view(
        running=make_batch(new_tokens=10_000, deadline_ns=10**15),
        candidate=make_batch(batch_id=0, new_tokens=500),
    )
    decision = muxwise.decide(view)
    assert decision.preempt
    assert decision.layers == 100 / 5


def test_inflight_holds_decode_while_a_prefill_is_pending(
    inflight: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    for view in (
        make_view(running=make_batch()),
        make_view(candidate=make_batch(batch_id=0)),
        make_view(prefill_in_flight=1),
    ):
        decision = inflight.decide(view)
        assert decision.split == Split(0, 16)
    assert inflight.decide(make_view(running=make_batch())).layers == 32
    assert inflight.decide(make_view()).split == Split(16, 0)
    assert inflight.limits.decode_floor_ns == 60_000 * MS


def test_inflight_decodes_when_the_next_prompt_has_no_pages(
    inflight: CompiledPolicy, make_view: MakeView, make_batch: MakeBatch
) -> None:
    candidate = make_batch(batch_id=0, new_tokens=1000)
    assert inflight.decide(make_view(candidate=candidate, kv=KvView(1000, 10))).split == Split(16, 0)
    view = make_view(candidate=candidate, kv=KvView(1000, 10), decode=NOBODY)
    assert inflight.decide(view).split == Split(0, 16), "with nothing to decode, prefill tries"


@pytest.mark.parametrize("budget", [16, 64, 256])
def test_chunked_fills_the_budget_with_decode_tokens_first(
    budget: int, make_view: MakeView, make_batch: MakeBatch
) -> None:
    chunked = load_policy("chunked", {"budget": str(budget)})
    for view in (
        make_view(running=make_batch()),
        make_view(candidate=make_batch(batch_id=0)),
        make_view(
            running=make_batch(), candidate=make_batch(batch_id=0, new_tokens=1), estimates=Estimates()
        ),
    ):
        decision = chunked.decide(view)
        assert decision.split == Split(16, 16)
        assert (decision.tokens, decision.fuse, decision.preempt) == (budget - 8, True, False)
        assert (decision.layers, decision.errors) == (view.layers, ())


def test_muxwise_puts_more_short_prompts_into_a_batch_where_it_is_told_to_and_a_long_one_stays_alone(
    make_request: MakeRequest,
) -> None:
    short, long = make_request(prompt_tokens=100), make_request(prompt_tokens=5000)
    own, told = load_policy("muxwise"), load_policy("muxwise", {"batch_tokens": "2k"})
    bounds = []
    for policy, head in ((own, short), (told, short), (own, long), (told, long)):
        view = FormView(0, head, QueueView(90, 9000), NOBODY, KvView(9, 9), Estimates())
        answer = policy.form(view)
        bounds.append((answer.max_requests, answer.max_tokens))
    assert bounds == [(8, 512), (32, 2000), (8, 5000), (32, 5000)]


def test_chunked_goes_on_with_a_prompt_when_decode_uses_the_budget_up_and_when_nobody_decodes(
    make_view: MakeView, make_batch: MakeBatch
) -> None:
    chunked = load_policy("chunked", {"budget": "64"})
    full = chunked.decide(make_view(running=make_batch(), decode=DecodeView(64, 6400, True, False, 0)))
    assert (full.tokens, full.fuse) == (1, True)
    alone = chunked.decide(make_view(running=make_batch(), decode=NOBODY))
    assert (alone.tokens, alone.fuse) == (64, True)


def test_chunked_serves_in_order_of_arrival_and_lets_prompts_share_chunks(make_request: MakeRequest) -> None:
    chunked = load_policy("chunked")
    late_but_urgent = make_request(arrival_ns=2, deadline_ns=3, prompt_tokens=1)
    requests = [late_but_urgent, make_request(arrival_ns=1, deadline_ns=10**15)]
    assert chunked.order(requests, 0, {}).order == (1, 0)
    view = FormView(0, late_but_urgent, QueueView(20, 9000), NOBODY, KvView(9, 9), Estimates())
    assert chunked.form(view).max_requests > 1
    assert chunked.form(view).max_tokens > 1000


def test_temporal_runs_as_many_layers_between_two_steps_as_the_slo_leaves_room_for(
    make_view: MakeView, make_batch: MakeBatch
) -> None:
    temporal = load_policy("temporal")
    decision = temporal.decide(make_view(running=make_batch(new_tokens=900)))
    assert decision.split == Split(16, 16)
    step_ms, layer_ms = 800 / 16, 8 / 16 * 9
    assert decision.layers == 11 == (100 - step_ms) // layer_ms, "a step and the layers are one gap"
    assert (decision.tokens, decision.fuse) == (None, False)
    assert decision.rules[-1] == "slice/between-steps"


def test_temporal_launches_one_layer_when_none_fits_or_nothing_was_measured(
    make_view: MakeView, make_batch: MakeBatch
) -> None:
    temporal = load_policy("temporal")
    assert temporal.decide(make_view(running=make_batch(new_tokens=10**6))).layers == 1
    slow = tuple(DecodeModel(units, 1000.0 * MS, 0.0, 0.0, 1.0) for units in (1, 16))
    late = Estimates(32, slow, make_view().estimates.prefill)
    assert temporal.decide(make_view(running=make_batch(), estimates=late)).layers == 1
    cold = temporal.decide(make_view(running=make_batch(), estimates=Estimates()))
    assert (cold.split, cold.layers, cold.errors) == (Split(16, 16), 1, ())


def test_temporal_slices_a_lone_prefill_by_time_and_preempts_as_muxwise_does(
    make_view: MakeView, make_batch: MakeBatch
) -> None:
    temporal = load_policy("temporal")
    alone = temporal.decide(make_view(decode=NOBODY, running=make_batch(new_tokens=1000)))
    assert alone.layers == 100 * MS / (8 * MS / 16 * 10)
    long = make_batch(new_tokens=10_000, deadline_ns=100_000 * MS)
    assert temporal.decide(make_view(running=long, candidate=make_batch(batch_id=0, new_tokens=100))).preempt
    assert not temporal.decide(make_view(running=long, candidate=long)).preempt


@pytest.mark.parametrize(
    ("share", "units"), [("50%", 8), ("1%", 1), ("25%", 4), ("30%", 5), ("75%", 12), ("99%", 15)]
)
def test_static_split_never_changes(
    share: str, units: int, make_view: MakeView, make_batch: MakeBatch
) -> None:
    policy = load_policy("static_split", {"decode_share": share})
    for view in (
        make_view(),
        make_view(running=make_batch(), candidate=make_batch(batch_id=0)),
        make_view(decode=NOBODY, running=make_batch()),
        make_view(decode=NOBODY, prefill_in_flight=1),
        make_view(running=make_batch(), estimates=Estimates()),
    ):
        decision = policy.decide(view)
        assert (decision.split, decision.preempt, decision.errors) == (Split(units, 16 - units), False, ())
        assert view.running is None or (decision.layers, decision.tokens, decision.fuse) == (32, None, False)


def test_static_split_leaves_a_unit_for_each_phase_of_a_device_of_two(make_view: MakeView) -> None:
    for share in ("1%", "50%", "99%"):
        policy = load_policy("static_split", {"decode_share": share})
        assert policy.decide(make_view(2)).split == Split(1, 1)
        assert policy.decide(make_view(1)).split == Split(1, 1), "a device of one unit is shared in time"


counts = st.integers(0, 40)
times = st.integers(0, 10**12)
batches = st.none() | st.builds(
    PrefillView,
    batch_id=st.integers(0, 3),
    requests=st.integers(1, 8),
    new_tokens=st.integers(1, 100_000),
    reused_tokens=counts,
    pairs=st.integers(1, 10**10),
    layers_left=counts,
    arrival_ns=times,
    deadline_ns=times,
    depth=st.integers(0, 1),
    preemptions=st.integers(0, 3),
    chunk_tokens=counts,
    chunk_pairs=st.integers(0, 10**6),
    tokens_left=st.integers(0, 100_000),
    pairs_left=st.integers(0, 10**10),
)
prices = st.floats(0, 1e12)


@st.composite
def estimates(draw: st.DrawFn, units: int) -> Estimates:
    sizes = sorted(draw(st.sets(st.integers(1, units), max_size=4)))
    decode = [DecodeModel(size, draw(prices), draw(prices), draw(prices), draw(prices)) for size in sizes]
    prefill = [PrefillModel(size, draw(prices), draw(prices), draw(prices), draw(prices)) for size in sizes]
    return Estimates(40, tuple(decode), tuple(prefill) if draw(st.booleans()) else ())


@st.composite
def views(draw: st.DrawFn) -> View:
    units = draw(st.integers(1, 140))
    step = draw(st.integers(1, 16))
    splits = tuple(Split(size, units - size) for size in range(step, units, step))
    in_force = draw(st.sampled_from([*splits, Split(units, 0), Split(0, units), Split(units, units)]))
    return View(
        now_ns=draw(times),
        units_total=units,
        splits=splits,
        split=in_force,
        layers=draw(st.integers(1, 40)),
        decode=DecodeView(draw(counts), draw(counts), draw(st.booleans()), draw(st.booleans()), draw(times)),
        running=draw(batches),
        parked=draw(batches),
        candidate=draw(batches),
        prefill_in_flight=draw(st.integers(0, 2)),
        queue=QueueView(draw(counts), draw(counts)),
        kv=KvView(draw(counts), draw(counts)),
        estimates=draw(estimates(units)),
    )


def is_legal(split: Split, view: View) -> bool:
    total = view.units_total
    alone = {Split(offered.decode_units, 0) for offered in view.splits}
    alone |= {Split(0, offered.prefill_units) for offered in view.splits}
    whole = {Split(total, 0), Split(0, total), Split(total, total)}
    return split in view.splits or split in alone or split in whole


POLICIES = {name: load_policy(name) for name in shipped_policies()}


@settings(max_examples=300, deadline=None)
@given(view=views(), name=st.sampled_from(sorted(POLICIES)))
def test_every_decision_is_legal_and_the_same_when_asked_again(view: View, name: str) -> None:
    policy = POLICIES[name]
    decision = policy.decide(view)
    assert is_legal(decision.split, view)
    assert decision.layers >= 1
    assert isinstance(decision.layers, int)
    assert decision.tokens is None or decision.tokens >= 1
    assert not decision.fuse or (decision.split.decode_units, decision.layers) == (
        view.units_total,
        view.layers,
    )
    assert not decision.preempt or (view.running is not None and view.candidate is not None)
    assert policy.decide(view) == decision


def test_compiling_twice_gives_the_same_policy() -> None:
    for name, policy in POLICIES.items():
        assert load_policy(name).sha == policy.sha


@settings(max_examples=300, deadline=None)
@given(view=views(), name=st.sampled_from(sorted(POLICIES.keys() - {"inflight", "loongserve"})))
def test_no_phase_with_work_is_left_out_for_good(view: View, name: str) -> None:
    """All but inflight and loongserve, which hold decode on purpose while a prompt is computed, give units to
    each phase that has something to do.
    """
    decision = POLICIES[name].decide(view)
    prefill_work = view.running or view.candidate or view.parked
    assert decision.split.decode_units > 0 or view.decode.batch == 0
    assert decision.split.prefill_units > 0 or not prefill_work
