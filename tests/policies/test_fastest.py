"""`decode: fastest` remembers its answer over the contexts for which it surely stays the same."""

from __future__ import annotations

import random

import msgspec
import pytest
from muxk.kernel.estimates import DecodeModel, Estimates, Ramp
from muxk.kernel.view import DecodeView, KvView, QueueView, View
from muxk.kernel.work import Split
from muxk.policies.fastest import FastestAlone
from muxk.policies.scopes import DecideScope

SPLITS = tuple(Split(units, 132 - units) for units in (20, 52, 84, 116))


def ramp(chance: random.Random, slope: float) -> Ramp:
    knots = (0.0, *sorted(float(chance.randrange(1, 60_000)) for _ in range(3)))
    slopes = tuple(slope * chance.uniform(0.5, 1.5) for _ in knots)
    values = [0.0]
    for place in range(1, len(knots)):
        values.append(values[-1] + slopes[place - 1] * (knots[place] - knots[place - 1]))
    return Ramp(knots, tuple(values), slopes)


def tables(seed: int) -> Estimates:
    """Times that cross: few units are quick to begin and slow on a long context."""
    chance = random.Random(seed)
    models = []
    for units in (20, 52, 84, 116, 132):
        rows, context = ramp(chance, 500.0), ramp(chance, 800.0 / units)
        guard = chance.uniform(1.0, 1.3)
        models.append(DecodeModel(units, 1e5 + 3e3 * units, 500.0, 800.0 / units, guard, rows, context))
    return Estimates(layers=36, decode=tuple(models))


def view(estimates: Estimates, batch: int, context: int) -> View:
    decode = DecodeView(batch, context, True, False, 0)
    nobody, pages = QueueView(0, 0), KvView(100, 50)
    return View(0, 132, SPLITS, SPLITS[0], 36, decode, None, None, None, 0, nobody, pages, estimates)


@pytest.mark.parametrize("seed", range(12))
def test_a_remembered_answer_is_the_one_that_a_fresh_look_finds(seed: int) -> None:
    estimates, remembers = tables(seed), FastestAlone()
    chosen = []
    for context in range(100, 70_000, 7):
        scope = DecideScope(view(estimates, 7, context))
        chosen.append(remembers(scope).decode_units)
        if context % 11 == 0:
            assert chosen[-1] == FastestAlone()(DecideScope(scope.view)).decode_units, context
    assert len(dict.fromkeys(chosen)) > 1 or seed, "the times cross"


def test_new_tables_and_another_batch_are_looked_at() -> None:
    estimates, remembers = tables(0), FastestAlone()
    before = remembers(DecideScope(view(estimates, 7, 1000))).decode_units
    slow = [
        msgspec.structs.replace(model, guard=9.0) if model.units == before else model
        for model in estimates.decode
    ]
    after = msgspec.structs.replace(estimates, decode=tuple(slow))
    assert remembers(DecideScope(view(after, 7, 1000))).decode_units != before
    assert remembers(DecideScope(view(estimates, 7, 1000))).decode_units == before
    assert remembers(DecideScope(view(estimates, 0, 0))).decode_units in (20, 52, 84, 116, 132)
