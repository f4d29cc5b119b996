"""Estimates and times of batches that run in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import PrefillView, View
from muxk.kernel.work import attention_pairs
from muxk.policies.expressions import compile_expression
from muxk.policies.names import DecideScope, estimate_chunk, vocabulary
from muxk.policies.params import whole
from muxk.policies.problems import Report, RuleError, Source
from muxk.policies.units import Type

MakeView = Callable[..., View]
MakeBatch = Callable[..., PrefillView]
BASE, TOKEN, PAIR = 1000.0, 10.0, 0.5


def value(text: str, view: View) -> float:
    report = Report()
    expression = compile_expression(whole(Source("-", text), text), Type.ANY, vocabulary("slice", {}), report)
    report.raise_any()
    assert expression is not None
    result: float = expression(DecideScope(view))
    return result


def prompt(make_batch: MakeBatch, tokens: int, reused: int, done: int, chunk: int) -> PrefillView:
    """A prompt of which `done` tokens ran, and `chunk` more are in the chunk that was begun."""
    left = tokens - done - chunk
    return make_batch(
        new_tokens=tokens,
        reused_tokens=reused,
        pairs=attention_pairs((tokens,), (reused,)),
        chunk_tokens=chunk,
        chunk_pairs=attention_pairs((chunk,), (reused + done,)),
        tokens_left=left,
        pairs_left=attention_pairs((left,), (reused + done + chunk,)),
    )


def measured(make_view: MakeView, batch: PrefillView | None, layers: int = 4) -> View:
    """A device of four units with a model whose layer costs BASE + TOKEN * tokens + PAIR * pairs, in ns."""
    return make_view(
        4,
        layers=layers,
        running=batch,
        estimates=Estimates(
            layers, (DecodeModel(1, 1e6, 0.0, 0.0, 1.0),), (PrefillModel(1, BASE, TOKEN, PAIR, 1.0),)
        ),
    )


def layer_ns(tokens: int, pairs: int) -> float:
    return BASE + TOKEN * tokens + PAIR * pairs


def test_the_layer_estimate_is_of_the_chunk_that_was_begun_else_of_all_that_is_left(
    make_view: MakeView, make_batch: MakeBatch
) -> None:
    begun = prompt(make_batch, 100, 16, 32, 8)
    assert value("estimate.prefill_layer(4)", measured(make_view, begun)) == layer_ns(8, 36 + 8 * 48)
    between = prompt(make_batch, 100, 16, 32, 0)
    expected = layer_ns(68, 68 * 69 // 2 + 68 * 48)
    assert value("estimate.prefill_layer(4)", measured(make_view, between)) == expected


def test_time_left_is_the_layers_of_the_chunk_and_all_layers_of_the_rest(
    make_view: MakeView, make_batch: MakeBatch
) -> None:
    batch = prompt(make_batch, 100, 16, 32, 8)
    rest_ns = 4 * layer_ns(batch.tokens_left, batch.pairs_left)
    chunk_ns = layer_ns(batch.chunk_tokens, batch.chunk_pairs)
    view = measured(make_view, make_batch(**fields(batch, layers_left=3)))
    assert value("running.time_left", view) == 3 * chunk_ns + rest_ns
    assert value("running.slack", view) == batch.deadline_ns - view.now_ns - 3 * chunk_ns - rest_ns
    last = measured(make_view, make_batch(**fields(batch, layers_left=1, tokens_left=0, pairs_left=0)))
    assert value("running.time_left", last) == chunk_ns


def fields(batch: PrefillView, **changes: int) -> dict[str, int]:
    return {name: getattr(batch, name) for name in batch.__struct_fields__} | changes


def test_a_batch_that_has_not_begun_takes_all_layers_of_all_its_tokens(
    make_view: MakeView, make_batch: MakeBatch
) -> None:
    view = measured(make_view, prompt(make_batch, 100, 0, 0, 0))
    assert value("running.time_left", view) == 4 * layer_ns(100, 5050)
    assert value("running.tokens_left + running.pairs_left", view) == 100 + 5050
    assert value("running.chunk_tokens + running.chunk_pairs", view) == 0


@pytest.mark.parametrize("left", [1, 2, 100, 4999])
@pytest.mark.parametrize("before", [0, 7, 3000])
def test_a_chunk_for_a_time_is_the_longest_that_fits(
    left: int, before: int, make_view: MakeView, make_batch: MakeBatch
) -> None:
    def pass_ns(tokens: int) -> float:
        return 4 * layer_ns(tokens, attention_pairs((tokens,), (before,)))

    scope = DecideScope(measured(make_view, prompt(make_batch, left, before, 0, 0)))
    for time_ns in (0, 5_000, 10_000, 1_000_000, 7_654_321, 10**9):
        tokens = estimate_chunk(scope, 4, time_ns)
        assert 0 <= tokens <= left
        assert tokens == 0 or pass_ns(tokens) <= time_ns
        assert tokens == left or pass_ns(tokens + 1) > time_ns


def test_a_chunk_needs_units_and_a_batch(make_view: MakeView, make_batch: MakeBatch) -> None:
    with pytest.raises(RuleError, match=r"prefill\.pending"):
        value("estimate.chunk(4, 50ms)", measured(make_view, None))
    with pytest.raises(RuleError, match="at least 1 unit"):
        value("estimate.chunk(0, 50ms)", measured(make_view, make_batch()))
    assert value("estimate.chunk(4, 0ms - 5ms)", measured(make_view, make_batch())) == 0
