"""The cost of work items of one model on one card: what a simulated GPU asks.

An item's layers are alike, so that each operator's time is found once and taken times the layers; what is
left are four phases (attention, GEMMs, elementwise kernels, all-reduce) in the proportions of the item.
Times of GEMMs depend on the number of tokens only, and are kept by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from muxk.kernel.bandwidth import Sharing
from muxk.kernel.devices.sim_gpu import HostTimes, SimGpu, SimGpuOptions
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.timeline import PhaseCost
from muxk.kernel.work import PAGE_SIZE
from muxk.profiles import gpu as card
from muxk.profiles.gpu import GpuProfile
from muxk.profiles.operators import (
    NUMBER_BYTES,
    Gemm,
    ModelShape,
    active_experts,
    attention_bytes,
    check_tp,
    elementwise_bytes,
    expert_gemms,
    gemm_bytes,
    head_gemm,
    layer_gemms,
)

KEPT_MAX = 1 << 14
"""Sizes of items whose times are kept; then all are forgotten and found again."""
NORMS = 2
"""A layer's norms; each adds the residual as well."""
CHUNK_TOKENS_MAX = 1 << 17
PAGES_MIN = 2


class DoesNotFit(ValueError):
    """A model's weights leave no room for KV; the text gives the bytes."""


class RooflineCost:
    """Implements `kernel.devices.sim_gpu.CostModel` for one of `tp` GPUs. Raises ShapeError."""

    def __init__(self, profile: GpuProfile, shape: ModelShape, tp: int) -> None:
        check_tp(shape, tp)
        self.profile, self.shape, self.tp = profile, shape, tp
        self.units = profile.card.units
        self.layers = shape.layers
        self._gemms = layer_gemms(shape, tp)
        self._heads = shape.heads // tp
        self._kv_heads = shape.kv_heads_of_one(tp)
        self._streams = elementwise_bytes(shape, tp)
        # Of attention in one layer: of a token of context, and of a new token.
        self._context_bytes = float(attention_bytes(shape, tp, 1, 0))
        self._row_bytes = float(attention_bytes(shape, tp, 0, 1))
        self._kept: dict[tuple[int, int, int, int, int], _Kept] = {}
        self._layers_kept: dict[tuple[int, int], tuple[PhaseCost, PhaseCost, PhaseCost]] = {}
        self._decode_attention: dict[int, card.DecodeAttention] = {}
        """By units."""

    def phases(self, load: ItemLoad, units: int) -> Sequence[PhaseCost]:
        """Attention, GEMMs with the head, elementwise kernels, all-reduce.

        Of a decode step the last two are with attention: they are short, and move little.
        """
        if not load.chunk_tokens:
            return self._decode_phases(load, units)
        kept = self._by_tokens(load, units)
        ns, moved = self._attention(load, units)
        return (_phase(ns * load.layers, moved * load.layers, kept.drawn), *kept.phases)

    def _decode_phases(self, load: ItemLoad, units: int) -> Sequence[PhaseCost]:
        """Of a decode step, in as few calls as can be: there is one for each token of a row."""
        rows, context, layers = load.decode_rows, load.decode_context, load.layers
        kept = self._kept.get((rows, layers, load.embedded, load.sampled, units))
        if kept is None:
            kept = self._by_tokens(load, units)
        ns = kept.attention.ns(rows, context) * layers + kept.others_ns
        moved = (self._context_bytes * context + self._row_bytes * rows) * layers + kept.others_bytes
        return (_phase(ns, moved, kept.drawn), kept.phases[0])

    def total_ns(self, load: ItemLoad, units: int) -> float:
        """When it runs alone."""
        return sum(phase.ns for phase in self.phases(load, units))

    def _attention(self, load: ItemLoad, units: int) -> tuple[float, float]:
        """ns and bytes of one layer: decode rows and the chunk's rows are kernels of their own."""
        ns = moved = 0.0
        if load.decode_rows:
            ns += self._decode_attention_on(units).ns(load.decode_rows, load.decode_context)
            moved += self._context_bytes * load.decode_context + self._row_bytes * load.decode_rows
        if load.chunk_tokens:
            sums = (load.chunk_tokens, load.chunk_pairs, load.chunk_context)
            widths = (self._heads, self._kv_heads, self.shape.head_dim, units)
            ns += card.prefill_attention_ns(self.profile, *sums, *widths)
            moved += self._context_bytes * load.chunk_context + self._row_bytes * load.chunk_tokens
        return ns, moved

    def _decode_attention_on(self, units: int) -> card.DecodeAttention:
        found = self._decode_attention.get(units)
        if found is None:
            widths = (self._heads, self._kv_heads, self.shape.head_dim, units)
            found = self._decode_attention[units] = card.DecodeAttention(self.profile, *widths)
        return found

    def _by_tokens(self, load: ItemLoad, units: int) -> _Kept:
        """All but attention, which is the same for all items of so many tokens and layers."""
        tokens = load.decode_rows + load.chunk_tokens
        key = (tokens, load.layers, load.embedded, load.sampled, units)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            kept = self._kept[key] = self._find(load, tokens, units)
        return kept

    def _find(self, load: ItemLoad, tokens: int, units: int) -> _Kept:
        layers, drawn = load.layers, self._drawn(units)
        gemms, streams, sums = (_times(cost, layers) for cost in self._layer(tokens, units))
        products = _plus(gemms, self._ends(load, units))
        others = [cost for cost in (streams, sums) if cost.ns]
        found = tuple(_phase(cost.ns, cost.bytes, drawn) for cost in (products, *others))
        attention = self._decode_attention_on(units)
        return _Kept(found, streams.ns + sums.ns, streams.bytes + sums.bytes, drawn, attention)

    def _layer(self, tokens: int, units: int) -> tuple[PhaseCost, PhaseCost, PhaseCost]:
        """GEMMs, elementwise kernels and all-reduces of one layer."""
        found = self._layers_kept.get((tokens, units))
        if found is None:
            if len(self._layers_kept) >= KEPT_MAX:
                self._layers_kept.clear()
            found = (
                self._gemm_phase(tokens, units),
                self._stream_phase(tokens, units),
                self._sum_phase(tokens),
            )
            self._layers_kept[tokens, units] = found
        return found

    def _drawn(self, units: int) -> float:
        return card.drawn_bandwidth(self.profile, self.profile.gemm.bandwidth_efficiency, units)

    def _gemm_phase(self, tokens: int, units: int) -> PhaseCost:
        total = PhaseCost(0.0, 0.0)
        for gemm in self._gemms:
            total = _plus(total, self._gemm(gemm, tokens, units))
        return total if self.shape.experts is None else _plus(total, self._experts(tokens, units))

    def _gemm(self, gemm: Gemm, tokens: int, units: int) -> PhaseCost:
        ns = card.gemm_ns(self.profile, tokens, gemm.columns, gemm.inner, units)
        return PhaseCost(ns, gemm_bytes(gemm, tokens))

    def _experts(self, tokens: int, units: int) -> PhaseCost:
        """Grouped products: each active expert has its share of the tokens, its tiles and its weights."""
        experts = self.shape.experts
        assert experts is not None
        active = active_experts(experts, tokens)
        share = max(1, round(tokens * experts.active / active))
        ns, moved = self.profile.experts.routing_ns, 0.0
        for gemm in expert_gemms(self.shape, self.tp):
            ns += card.grouped_gemm_ns(self.profile, active, share, gemm.columns, gemm.inner, units)
            moved += active * gemm_bytes(gemm, share)
        return PhaseCost(ns, moved)

    def _stream_phase(self, tokens: int, units: int) -> PhaseCost:
        norm, add = self._streams["norm"] * tokens, self._streams["add"] * tokens
        ns = NORMS * card.elementwise_ns(self.profile, "norm", tokens, norm, units)
        ns += NORMS * card.elementwise_ns(self.profile, "add", tokens, add, units)
        moved = NORMS * (norm + add)
        for kernel in ("rope", "activation"):
            ns += card.elementwise_ns(self.profile, kernel, tokens, self._streams[kernel] * tokens, units)
            moved += self._streams[kernel] * tokens
        return PhaseCost(ns, moved)

    def _sum_phase(self, tokens: int) -> PhaseCost:
        """Two all-reduces of the hidden state; it is read and written here."""
        message = NUMBER_BYTES * tokens * self.shape.hidden
        ns = 2 * card.all_reduce_ns(self.profile, self.tp, message)
        return PhaseCost(ns, 4.0 * message)

    def _ends(self, load: ItemLoad, units: int) -> PhaseCost:
        """Embedding and head, once an item that has the first or the last layer."""
        cost = PhaseCost(0.0, 0.0)
        if load.embedded:
            moved = 2.0 * NUMBER_BYTES * load.embedded * self.shape.hidden
            cost = PhaseCost(card.elementwise_ns(self.profile, "add", load.embedded, moved, units), moved)
        if load.sampled:
            cost = _plus(cost, self._gemm(head_gemm(self.shape, self.tp), load.sampled, units))
        return cost


class _Kept(NamedTuple):
    """What items of so many tokens go through beside attention."""

    phases: tuple[PhaseCost, ...]
    """GEMMs, elementwise kernels, all-reduces if there are any."""
    others_ns: float
    """Of all but the GEMMs."""
    others_bytes: float
    drawn: float
    """Bytes a ns that its units draw."""
    attention: card.DecodeAttention
    """On its units."""


def _phase(ns: float, moved: float, drawn: float) -> PhaseCost:
    waits = moved / (drawn * ns)
    # One for each item: to make a named tuple by its own constructor takes three times as long.
    return tuple.__new__(PhaseCost, (ns, moved, waits if waits < 1.0 else 1.0))


def _times(cost: PhaseCost, layers: int) -> PhaseCost:
    return PhaseCost(cost.ns * layers, cost.bytes * layers)


def _plus(first: PhaseCost, second: PhaseCost) -> PhaseCost:
    return PhaseCost(first.ns + second.ns, first.bytes + second.bytes)


def kv_pages(profile: GpuProfile, shape: ModelShape, tp: int) -> int:
    """Pages that fit beside the weights and the reserve, page 0 included. Raises DoesNotFit, ShapeError."""
    check_tp(shape, tp)
    memory, reserve = profile.card.memory_bytes, profile.memory.reserve_bytes
    weights = shape.weight_bytes(tp)
    page = PAGE_SIZE * shape.kv_bytes_per_token(tp)
    left = memory - weights - reserve
    if left < PAGES_MIN * page:
        raise DoesNotFit(
            f"{shape.name} does not fit on {profile.name} with tp={tp}: of {memory:,} bytes a GPU, weights "
            f"take {weights:,} and a reserve {reserve:,}; {max(0, left):,} are left, a KV page takes {page:,}"
        )
    return left // page


def gpu_options(
    profile: GpuProfile, shape: ModelShape, tp: int, pages: int | None, seed: int
) -> SimGpuOptions:
    """What a simulated GPU is beside its cost model. Raises DoesNotFit, ShapeError."""
    fitting = kv_pages(profile, shape, tp)
    if pages is not None and pages > fitting:
        raise DoesNotFit(f"{pages:,} KV pages do not fit on {profile.name} with {shape.name}: {fitting:,} do")
    host, co_run = profile.host, profile.co_run
    return SimGpuOptions(
        name=f"sim:{profile.name}" if tp == 1 else f"sim:{profile.name},tp={tp}",
        pages=fitting if pages is None else pages,
        sharing=Sharing(
            profile.card.bandwidth * profile.gemm.bandwidth_efficiency,
            co_run.interference,
            co_run.slowdown_max,
        ),
        host=HostTimes(host.decode_launch_ns, host.prefill_layer_launch_ns, host.wakeup_ns, host.switch_ns),
        noise=co_run.noise,
        seed=seed,
        chunk_tokens_max=CHUNK_TOKENS_MAX,
        parked_bytes_per_token=2 * NUMBER_BYTES * shape.hidden,
    )


def open_gpu(
    profile: GpuProfile, shape: ModelShape, tp: int = 1, pages: int | None = None, seed: int = 0
) -> SimGpu:
    """A simulated GPU, or `tp` of them that work as one. Raises DoesNotFit, ShapeError."""
    return SimGpu(RooflineCost(profile, shape, tp), gpu_options(profile, shape, tp, pages, seed))
