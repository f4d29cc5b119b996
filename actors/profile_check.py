"""How far off a profile's predictions are on shapes that it was not fitted to.

Each shape is measured through the arbiter as many times as there are REPEATS, and the prediction is held
against the median: single prompts, prompts that reuse, batches, and decode steps, on every number of units.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from muxk.actors.backends import Backend
from muxk.actors.profiler import Measurement
from muxk.actors.profiling import Tell, run_campaign
from muxk.kernel.estimates import Estimates
from muxk.kernel.work import Phase
from muxk.profiles.grid import BATCH_MAX, Limits, Shape

REPEATS = 9
LONG = 2048
"""New tokens of the shortest prefill that the paper's profiling grid has."""
PREFILL_MAX = 0.082
DECODE_MAX = 0.089
"""The largest deviations that MuxWise reports (section 3.3): 8.16 % and 8.84 %."""
SEED = 1
DRAWN = 40
"""Of long prefills, and of decode steps; of short prefills half as many."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Errors of one kind of work: predicted / measured - 1."""

    name: str
    allowed: float | None
    """None: reported only."""
    errors: tuple[float, ...]
    worst: Shape

    @property
    def largest(self) -> float:
        return max(abs(error) for error in self.errors)

    @property
    def median(self) -> float:
        return median(abs(error) for error in self.errors)

    @property
    def kept(self) -> bool:
        return self.allowed is None or self.largest <= self.allowed


@dataclass
class HeldOut:
    """The measurements."""

    backend: Backend
    shapes: Sequence[Shape]
    repeats: int = REPEATS
    finished: bool = False
    times: dict[Shape, list[int]] = field(default_factory=dict)
    label: str = "held-out shapes"
    _done: int = 0
    _begun: bool = False

    @property
    def share(self) -> float:
        return self._done / max(1, len(self.shapes) * self.repeats)

    def next_stage(self) -> Sequence[Measurement]:
        if self._begun:
            return []
        self._begun = True
        layers = self.backend.device.layers
        return [Measurement(shape, layers) for _ in range(self.repeats) for shape in self.shapes]

    def take(self, measured: Measurement, ns: int, covered: bool) -> None:
        self._done += 1
        if ns > 0:
            self.times.setdefault(measured.shape, []).append(ns)


def check_profile(
    backend: Backend,
    estimates: Estimates,
    tell: Tell = lambda what, share: None,
    *,
    repeats: int = REPEATS,
    drawn: int = DRAWN,
) -> list[Checked]:
    """Long prefills, decode steps, short prefills. Raises ProfileError."""
    limits = Limits.of(backend.device, backend.max_context_tokens, BATCH_MAX)
    held_out = HeldOut(backend, list(held_out_shapes(limits, drawn)), repeats)
    run_campaign(held_out, tell, lambda: None)
    measured = {shape: float(median(times)) for shape, times in held_out.times.items()}

    def errors(name: str, allowed: float | None, chosen: Callable[[Shape], bool]) -> list[Checked]:
        found = {
            shape: _predicted(estimates, shape) / ns - 1.0 for shape, ns in measured.items() if chosen(shape)
        }
        if not found:
            return []
        worst = max(found, key=lambda shape: abs(found[shape]))
        return [Checked(name, allowed, tuple(found.values()), worst)]

    return [
        *errors(f"prefill, {LONG:,} tokens and more", PREFILL_MAX, _is_long),
        *errors("decode", DECODE_MAX, lambda shape: shape.phase is Phase.DECODE),
        *errors("prefill, shorter", None, lambda s: s.phase is Phase.PREFILL and not _is_long(s)),
    ]


def _is_long(shape: Shape) -> bool:
    return shape.phase is Phase.PREFILL and shape.new_tokens >= LONG


def _predicted(estimates: Estimates, shape: Shape) -> float:
    if shape.phase is Phase.DECODE:
        return estimates.decode_ns(shape.units, shape.rows, shape.total_context)
    tokens = shape.rows * shape.new_tokens
    return estimates.layers * estimates.prefill_layer_ns(shape.units, tokens, shape.pairs)


def held_out_shapes(limits: Limits, drawn: int) -> Iterator[Shape]:
    """Drawn evenly in the logarithm of each load, on every number of units; what does not fit is left out."""
    chance = random.Random(SEED)
    decodes, prefills = [], []
    for number in range(drawn):
        rows = _drawn(chance, 1, limits.batch)
        decodes.append((rows, _drawn(chance, rows, limits.kv_tokens) // rows))
        rows = (1, 1, 1, 2, 4)[number % 5]
        reused = (0, _drawn(chance, 64, 65536))[number % 2]
        prefills.append((rows, _drawn(chance, LONG, 65536), reused))
        if number % 2:
            prefills.append((1, _drawn(chance, 32, LONG - 1), (0, reused)[number % 4 == 1]))
    for units in sorted({*limits.decode_units, limits.units}):
        for rows, context in decodes:
            if limits.decodes(rows, rows * context):
                yield Shape(Phase.DECODE, units, rows, 1, context)
    for units in sorted({*limits.prefill_units, limits.units}):
        for rows, new, reused in prefills:
            if limits.prefills(rows, new, reused):
                yield Shape(Phase.PREFILL, units, rows, new, reused)


def _drawn(chance: random.Random, least: int, most: int) -> int:
    """Evenly in its logarithm."""
    return min(most, round(math.exp(chance.uniform(math.log(least), math.log(max(least, most))))))
