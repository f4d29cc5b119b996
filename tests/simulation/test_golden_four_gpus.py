"""The picture with which the paper explains itself (figures 4 and 7): four GPUs, four prompts, four systems.

A decode step takes T, the TBT SLO. b1 comes at 0 T, b2 at 1 T, b3 at 3 T, and b1' at 5 T, which goes on where
b1 ended. The paper prints TTFTs and no lengths; these lengths follow from them: alone on four GPUs b1 takes
1 T, b2 1.5 T, b3 0.5 T, and b1' 0.5 T with what it can reuse, 1.5 T without. Two GPUs take twice as long, one
GPU four times. A decode step takes nearly T on a quarter of four GPUs, and on two GPUs; on all four 0.6 T,
which leaves a fused step 0.4 T of prefill.

Each system has the four GPUs as it uses them: one device of four (chunked, muxwise), two of two (splitwise),
four that work together (loongserve). Ordering is asserted; values are compared within a wide margin.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

import pytest
from muxk.actors.simulation import DeviceSetup, PlannedRequest, Simulation
from muxk.kernel.devices.sim import SimCosts
from muxk.policies.engine import CompiledPolicy, compile_policy
from muxk.policies.run_records import End
from muxk.policies.schema import API_VERSION

T = 100_000_000
"""In ns."""
STEP, STEP_ON_TWO = 0.6 * T, 0.96 * T
"""A decode step on four GPUs, and on two or a quarter of four: a little less than T, for the guard."""
LAYERS = 32
TOKENS = 1000
"""Of b1."""
BEGIN = 30
"""In T: before that some requests come and go, from which the systems learn how long answers are."""
SYSTEMS: Mapping[str, tuple[dict[str, str], int, int, float]] = {
    "splitwise": ({"borrow": "false"}, 2, 2, STEP_ON_TWO),
    "loongserve": ({"decode_width": "2"}, 4, 1, STEP_ON_TWO),
    "chunked": ({"budget": str(2 * TOKENS // 5)}, 1, 4, STEP),
    "muxwise": ({}, 1, 4, STEP),
}
"""Params, devices, GPUs of one device, and its decode step."""
PAPER: Mapping[str, tuple[float, float, float, float]] = {
    "splitwise": (2, 4, 3, 2),
    "loongserve": (1, 3, 2, 3),
    "chunked": (1, 4, 3.2, 1.7),
    "muxwise": (1, 2, 1.2, 0.5),
}
"""TTFT of b1, b2, b3 and b1', in T."""
BATCHES = ("b1", "b2", "b3", "b1'")


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(97, 123) for _ in range(length)]


def requests() -> list[PlannedRequest]:
    """The four, after two short ones."""
    first = prompt(TOKENS, 1)
    four = {
        "b1": (0, first, 6),
        "b2": (1, prompt(3 * TOKENS // 2, 2), 12),
        "b3": (3, prompt(TOKENS // 2, 3), 12),
        "b1'": (5, first + prompt(TOKENS // 2, 4), 6),
    }
    learnt = [PlannedRequest(f"w{n}", "w", 10 * n * T, prompt(40, 9 + n), 6) for n in range(2)]
    return learnt + [
        PlannedRequest(name, name, (BEGIN + at) * T, tokens, output)
        for name, (at, tokens, output) in four.items()
    ]


def policy_of(system: str, settings: Mapping[str, str]) -> CompiledPolicy:
    """The picture merges new rows at the border of two steps: none is queued behind the one that runs."""
    return compile_policy(
        f"""
apiVersion: {API_VERSION}
kind: SchedulingPolicy
metadata: {{name: {system}-as-drawn}}
spec:
  extends: {system}
  limits: {{decode_ahead: 0}}
""",
        settings=settings,
    )


@cache
def ttfts(system: str) -> tuple[float, ...]:
    """Of b1, b2, b3 and b1', in T."""
    settings, devices, gpus, step_ns = SYSTEMS[system]
    token_ns = round(T / TOKENS / LAYERS * 4 / gpus)
    costs = SimCosts(
        decode_base_ns=round(step_ns),
        decode_row_ns=0,
        decode_context_token_ns=0,
        decode_saturation=0.4 if gpus == 4 else 1.0,
        prefill_layer_base_ns=0,
        prefill_token_ns=token_ns,
        prefill_pair_ns=0.0,
    )
    setup = DeviceSetup(layers=LAYERS, kv_tokens=16_384, costs=costs, devices=devices)
    run = Simulation(policy_of(system, settings), setup).run(requests())
    assert run.faults == []
    assert not run.errors
    assert all(request.end is End.FINISHED for request in run.requests)
    by_name = {request.name: request.ttft_ns for request in run.requests}
    return tuple((by_name[name] or 0) / T for name in BATCHES)


def table() -> str:
    rows = [f"{name:<11}" + "".join(f"{value:7.2f}" for value in ttfts(name)) for name in SYSTEMS]
    return "\n".join([f"{'TTFT in T':<11}" + "".join(f"{name:>7}" for name in BATCHES), *rows])


@pytest.mark.parametrize("batch", BATCHES[1:])
def test_multiplexing_is_never_later_than_any_other_system(batch: str) -> None:
    place = BATCHES.index(batch)
    own = ttfts("muxwise")[place]
    assert all(own <= ttfts(other)[place] for other in SYSTEMS), table()


def test_half_of_the_gpus_make_splitwise_the_last_on_the_first_prompt() -> None:
    assert max(SYSTEMS, key=lambda name: ttfts(name)[0]) == "splitwise", table()


def test_what_is_not_reused_makes_loongserve_the_last_on_the_later_turn() -> None:
    assert max(SYSTEMS, key=lambda name: ttfts(name)[3]) == "loongserve", table()


def test_values_are_near_those_of_the_picture() -> None:
    """Within one step, but for chunked prefill of b1': here it waits for all chunks of b3 before it."""
    off = {
        (system, batch): abs(ours - paper)
        for system in SYSTEMS
        for batch, ours, paper in zip(BATCHES, ttfts(system), PAPER[system], strict=True)
    }
    assert [cell for cell, value in off.items() if value > 1.0] == [("chunked", "b1'")], table()
