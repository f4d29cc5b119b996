"""Several simulated devices that work on the same items, each with all weights: sequence parallelism.

As LoongServe (SOSP 2024, sections 4 and 5) does it: of a prefill each device has an equal part of the tokens,
and the keys and values of all pass round in a ring while attention runs; of a decode step each has a part of
the rows, for all but attention, and reads what of their context lies in its own pool, whose partial results
are put together: a step waits for the device with the most of it. What does not shrink with the number of
devices is the reading of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.timeline import PhaseCost
from muxk.profiles.cost import RooflineCost
from muxk.profiles.operators import NUMBER_BYTES


class RingTimes(msgspec.Struct, frozen=True):
    """Of the link between two of the devices."""

    bytes_per_ns: float
    latency_ns: int
    """Of one exchange."""


class WideCost:
    """Implements `kernel.devices.sim_gpu.CostModel` for `width` devices."""

    def __init__(self, one: RooflineCost, width: int, ring: RingTimes) -> None:
        assert width >= 1
        self._one = one
        self._width = width
        self._ring = ring
        self.units = one.units
        self.layers = one.layers

    def phases(self, load: ItemLoad, units: int) -> Sequence[PhaseCost]:
        """Those of the device with the largest part, and what the exchanges take beyond its attention."""
        own = self._part(load)
        phases = self._one.phases(own, units)
        if self._width == 1:
            return phases
        exposed = self._exchange_ns(load) - phases[0].ns if load.chunk_tokens else self._exchange_ns(load)
        return phases if exposed <= 0.0 else (*phases, PhaseCost(exposed, 0.0, 0.0))

    def _part(self, load: ItemLoad) -> ItemLoad:
        """Rounded up: nobody waits for less than the largest part."""
        width, most = self._width, load.decode_context_most
        return ItemLoad(
            layers=load.layers,
            decode_rows=-(-load.decode_rows // width),
            decode_context=-(-load.decode_context // width) if most is None else most,
            chunk_rows=load.chunk_rows,
            chunk_tokens=-(-load.chunk_tokens // width),
            chunk_pairs=-(-load.chunk_pairs // width),
            chunk_context=-(-load.chunk_context // width),
            embedded=-(-load.embedded // width),
            sampled=-(-load.sampled // width),
        )

    def _exchange_ns(self, load: ItemLoad) -> float:
        """Of all layers: the ring of a prefill's keys and values; queries out and results back of a step."""
        one, shape, ring = self._one, self._one.shape, self._ring
        turns = self._width - 1
        total = 0.0
        if load.chunk_tokens:
            kv = 2.0 * NUMBER_BYTES * shape.kv_heads_of_one(one.tp) * shape.head_dim
            part = load.chunk_context / self._width
            total += turns * (ring.latency_ns + kv * part / ring.bytes_per_ns)
        if load.decode_rows:
            sent = 2.0 * NUMBER_BYTES * (shape.heads // one.tp) * shape.head_dim * load.decode_rows
            total += 2.0 * ring.latency_ns + turns * sent / self._width / ring.bytes_per_ns
        return total * load.layers
