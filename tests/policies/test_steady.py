"""While nothing but a decode batch runs its decision is remembered, and is the one that would be made."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, View
from muxk.kernel.work import PrefillShape, Split
from muxk.policies.engine import compile_policy, load_policy

SPLITS = tuple(Split(units, 132 - units) for units in (20, 52, 84, 116))
CANDIDATE = PrefillView(0, 1, 2000, 0, 2_001_000, 36, 0, 10**9, 0, 0, tokens_left=2000, pairs_left=2_001_000)
READS_THE_CONTEXT = """
apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: reads-the-context}
spec:
  slo: {tbt: 50ms, ttft: 1s}
  split:
    - {name: odd, when: decode.context_tokens % 60 > 30, then: {prefill: all}}
    - {name: even, then: {decode: fastest}}
"""


def tables(few_units_are_quick: float = 1.0) -> Estimates:
    decode = tuple(
        DecodeModel(units, few_units_are_quick * 3e3 * units, 500.0, 800.0 / units, 1.0)
        for units in (20, 52, 84, 116, 132)
    )
    prefill = tuple(
        PrefillModel(units, 1e4, 9e4 / units, 1.0 / units, 1.0) for units in (16, 48, 80, 112, 132)
    )
    return Estimates(layers=36, decode=decode, prefill=prefill)


def view(estimates: Estimates, context: int, batch: int = 3) -> View:
    decode = DecodeView(batch, context, True, False, 0)
    return View(
        7,
        132,
        SPLITS,
        SPLITS[0],
        36,
        decode,
        None,
        None,
        None,
        0,
        QueueView(0, 0),
        KvView(100, 50),
        estimates,
    )


def others(plain: View, chance: random.Random) -> View:
    """Now and then something else than one more token is in the view."""
    replaced = msgspec.structs.replace
    return chance.choice(
        [
            *[plain] * 6,
            replaced(plain, candidate=CANDIDATE),
            replaced(plain, running=CANDIDATE, prefill_in_flight=2),
            replaced(plain, prefill_in_flight=1),
            replaced(plain, leaving=PrefillShape(500, 0), prefill_in_flight=1),
            replaced(plain, decode=replaced(plain.decode, coming=1, coming_tokens=600)),
            replaced(plain, decode=replaced(plain.decode, batch=0, coming=1)),
            replaced(plain, decode=replaced(plain.decode, batch=4)),
            replaced(plain, splits=(), split=Split(132, 132)),
        ]
    )


@pytest.mark.parametrize("name", ["muxwise", "reads-the-context"])
def test_who_remembers_decides_as_who_was_never_asked_before(name: str) -> None:
    policy = load_policy(name) if name == "muxwise" else compile_policy(READS_THE_CONTEXT)
    chance, estimates, decisions = random.Random(3), tables(), []
    for context in range(100, 6000, 9):
        if chance.random() < 0.02:
            estimates = tables(chance.choice((1.0, 0.02)))
        asked = others(view(estimates, context), chance)
        decisions.append(policy.decide(asked))
        assert decisions[-1] == dataclasses.replace(policy).decide(asked), context
    assert len(dict.fromkeys(decision.rules for decision in decisions)) > 1


def test_a_batch_that_only_grows_is_decided_on_once() -> None:
    policy, estimates = load_policy("muxwise"), tables()
    first, second = (policy.decide(view(estimates, context)) for context in (1000, 1003))
    assert first is second
    assert policy.decide(view(estimates, 1003, batch=4)) is not first
