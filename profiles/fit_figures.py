"""Figures that others measured, beside what the models of the cards give.

Those of H200 operators are rows of the tables that were fitted. To the decode steps on 8xA100 one constant is
fitted, the floor of an all-reduce over eight A100; nothing is fitted to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.profiles import gpu as card
from muxk.profiles.cost import RooflineCost
from muxk.profiles.gpu import GpuProfile, load_gpu
from muxk.profiles.operators import load_shape

HEADS = (32, 8, 128)
"""Query heads, KV heads, head_dim."""
DECODE_POINTS = ((1, 1, 11.7), (8, 1024, 17.4), (32, 1024, 46.8), (32, 4096, 135.5), (64, 8192, 491.0))
"""(rows, context of each, us)."""
PREFILL_POINTS = ((1024, 35.0), (2048, 87.0), (4096, 268.0), (8192, 938.0), (16384, 3371.0))
"""(tokens, us)."""
GEMM_SHARES = ((16, 0.117), (32, 0.235), (64, 0.484), (88, 0.674), (112, 0.847))
"""(SMs, speed relative to 132) of a product of 4096 x 16384 x 13824."""
SMS = (8, 16, 32, 56, 80, 108)
DECODE_MS: Mapping[str, tuple[float, ...]] = {
    "llama-3.1-70b": (98.7, 55.6, 34.1, 28.5, 26.0, 25.3),
    "llama-3.1-8b": (19.3, 11.9, 8.1, 7.2, 6.6, 6.5),
}
"""Of 32 rows with 32K of context in all, on 8xA100, for each of SMS."""
PREFILL_S = ((8, 18.0), (32, 4.9), (56, 2.98), (80, 2.28), (108, 1.70))
"""Of 16K tokens, 70B on 8xA100."""
FUSED_MS = ((4096, 505.0),)
"""(token budget, ms) of a step with 32 decodes of 1K, 70B on 8xA100."""


class Figure(NamedTuple):
    name: str
    measured: float
    ours: float
    unit: str

    @property
    def ratio(self) -> float:
        return self.ours / self.measured


def figures() -> Iterator[Figure]:
    """All of them, in the order of the page."""
    h200 = load_gpu("h200")
    yield from _attention(h200)
    yield from _shares(h200)
    yield from _eight_a100(load_gpu("a100"))


def _attention(h200: GpuProfile) -> Iterator[Figure]:
    units = h200.card.units
    for rows, context, us in DECODE_POINTS:
        ns = card.decode_attention_ns(h200, rows, rows * context, *HEADS, units)
        yield Figure(f"H200, decode attention, {rows} rows of {context}", us, ns / 1e3, "us")
    for tokens, us in PREFILL_POINTS:
        pairs = tokens * (tokens + 1) / 2
        ns = card.prefill_attention_ns(h200, tokens, pairs, tokens, *HEADS, units)
        yield Figure(f"H200, prefill attention, {tokens} tokens", us, ns / 1e3, "us")


def _shares(h200: GpuProfile) -> Iterator[Figure]:
    def ns(units: int) -> float:
        return card.gemm_ns(h200, 4096, 13824, 16384, units)

    for units, share in GEMM_SHARES:
        yield Figure(f"Hopper, compute-bound GEMM on {units} of 132 SMs", share, ns(132) / ns(units), "")


def _eight_a100(a100: GpuProfile) -> Iterator[Figure]:
    for model, times in DECODE_MS.items():
        for units, ms in zip(SMS, times, strict=True):
            ns = decode_ns(a100, model, units)
            yield Figure(f"8xA100, {model}, decode on {units} of 108 SMs", ms, ns / 1e6, "ms")
    large = RooflineCost(a100, load_shape("llama-3.1-70b"), 8)
    for units, seconds in PREFILL_S:
        ns = large.total_ns(prefill_load(large.layers, 16_384), units)
        yield Figure(f"8xA100, llama-3.1-70b, prefill of 16K on {units} SMs", seconds, ns / 1e9, "s")
    for budget, ms in FUSED_MS:
        ns = large.total_ns(fused_load(large.layers, 32, 32 * 1024, budget - 32), 108)
        yield Figure(f"8xA100, llama-3.1-70b, fused step of {budget} tokens", ms, ns / 1e6, "ms")


def decode_ns(a100: GpuProfile, model: str, units: int) -> float:
    """The step of DECODE_MS."""
    cost = RooflineCost(a100, load_shape(model), 8)
    return cost.total_ns(decode_load(cost.layers, 32, 32 * 1024), units)


def decode_load(layers: int, rows: int, context: int) -> ItemLoad:
    """A decode step; `context` is the sum over its rows."""
    return ItemLoad(layers, rows, context, 0, 0, 0, 0, rows, rows)


def prefill_load(layers: int, new: int, reused: int = 0) -> ItemLoad:
    """One prompt from embedding to its first token."""
    pairs = new * (new + 1) // 2 + new * reused
    return ItemLoad(layers, 0, 0, 1, new, pairs, new + reused, new, 1)


def fused_load(layers: int, rows: int, context: int, new: int, reused: int = 0) -> ItemLoad:
    """A decode step and a prompt's last chunk in one pass."""
    chunk = prefill_load(layers, new, reused)
    embedded, sampled = chunk.embedded + rows, chunk.sampled + rows
    return msgspec.structs.replace(
        chunk, decode_rows=rows, decode_context=context, embedded=embedded, sampled=sampled
    )
