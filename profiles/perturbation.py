"""A simulated card that differs from its profile: how wrong may an estimator be, which measured the other?

Contention and efficiencies are each taken times or divided by 1 + share, as a seed draws it; sizes that a
data sheet gives (SMs, memory, peaks) stay. `WORST` makes all of them slower.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from muxk.profiles.gpu import GpuProfile

WORST = "worst"
Factor = Callable[[], float]


def perturbed(profile: GpuProfile, share: float, seed: int | str) -> GpuProfile:
    """The card, off by a share in each group of constants; `seed` is a number or WORST."""
    assert 0 <= share < 1
    faster = _drawn(share, seed)
    gemm, attention, prefill = profile.gemm, profile.decode_attention, profile.prefill_attention
    tiles, memory, decode, compute = faster(), faster(), faster(), faster()
    floors, streams, units = faster(), faster(), faster()
    contention, most = faster(), faster()
    replace = msgspec.structs.replace
    return replace(
        profile,
        partition=replace(
            profile.partition,
            saturating_units=max(1, round(profile.partition.saturating_units / units)),
        ),
        gemm=replace(
            gemm,
            floor_ns=gemm.floor_ns / floors,
            bandwidth_efficiency=min(1.0, gemm.bandwidth_efficiency * memory),
            tiles=tuple(replace(tile, efficiency=min(1.0, tile.efficiency * tiles)) for tile in gemm.tiles),
        ),
        decode_attention=replace(
            attention,
            floor_ns=attention.floor_ns / floors,
            bandwidth_efficiency=min(1.0, attention.bandwidth_efficiency * decode),
        ),
        prefill_attention=replace(prefill, efficiency=min(1.0, prefill.efficiency * compute)),
        elementwise=replace(
            profile.elementwise,
            kernels={
                name: replace(kernel, floor_ns=kernel.floor_ns / streams)
                for name, kernel in profile.elementwise.kernels.items()
            },
        ),
        co_run=replace(
            profile.co_run,
            interference=profile.co_run.interference / contention,
            slowdown_max=profile.co_run.slowdown_max / most,
        ),
    )


def _drawn(share: float, seed: int | str) -> Factor:
    """Factors of an efficiency: above 1 is faster."""
    if seed == WORST:
        return lambda: 1.0 / (1.0 + share)
    chance = random.Random(seed)
    return lambda: 1.0 + share if chance.random() < 0.5 else 1.0 / (1.0 + share)
