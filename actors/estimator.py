"""estimator: predicts what a decode step and a prefill layer take on a number of units.

At start it runs a few seconds of probes through the arbiter; then it learns from completed items alone, and
broadcasts immutable tables. The guard of decode is an upper quantile of measured over predicted, so that a
policy that keeps within it keeps its SLO for that share of the steps. Invariant: tables are only ever
replaced as a whole, and never hold a time that shrinks when load grows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from muxk.actors.messages import EstimatorReady
from muxk.actors.refs import EstimatorInbox, Refs
from muxk.kernel.actor import Actor
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.messages import (
    EstimatesChanged,
    ItemMeasured,
    ProbeDone,
    ReportState,
    RunProbe,
    StateReported,
)
from muxk.kernel.work import Phase
from muxk.profiles.calibration import Probe, fit

WINDOW = 64
"""Completed items, for each phase and number of units, that the quantiles are taken over."""
GUARD_QUANTILE = 0.95
UPDATE_EVERY = 8
"""Completed items between two looks at the tables."""
RATIO_MAX = 8.0
"""Bound on what one item may say: a machine that was suspended is no property of the model."""
UPDATE_STEP = 0.03
"""Relative change below which no new tables are sent."""


@dataclass
class EstimatorState:
    probes: tuple[Probe, ...]
    elapsed_ns: dict[int, int] = field(default_factory=dict)
    calibrated: bool = False
    estimates: Estimates = field(default_factory=Estimates)
    ratios: dict[tuple[Phase, int], deque[float]] = field(default_factory=dict)
    """Measured over predicted (without guard or scale) of recent items."""
    measured: dict[tuple[Phase, int], None] = field(default_factory=dict)
    """What was measured since the last update."""
    since_update: int = 0
    updates: int = 0


class Estimator(Actor):
    """One a device."""

    Accepts = EstimatorInbox

    def __init__(self, refs: Refs, probes: list[Probe], layers: int) -> None:
        self._refs = refs
        self._layers = layers
        self.state = EstimatorState(probes=tuple(probes))

    def started(self) -> None:
        for probe in self.state.probes:
            self.send(self._refs.arbiter, RunProbe(probe.work, probe.layers))
        if not self.state.probes:
            self.send(self._refs.gateway, EstimatorReady())

    def on_probe_done(self, message: ProbeDone) -> None:
        state = self.state
        state.elapsed_ns[message.probe_id] = message.elapsed_ns
        if len(state.elapsed_ns) == len(state.probes):
            self._broadcast(fit(state.probes, state.elapsed_ns, self._layers))
            self._expect_the_model()
            state.calibrated = True
            self.send(self._refs.gateway, EstimatorReady())

    def _expect_the_model(self) -> None:
        """Fill all windows with what the fit predicts, so that it takes more than a freak to move a guard."""
        estimates = self.state.estimates
        keys = [(Phase.DECODE, model.units) for model in estimates.decode]
        keys += [(Phase.PREFILL, model.units) for model in estimates.prefill]
        self.state.ratios = {key: deque([1.0] * WINDOW, maxlen=WINDOW) for key in keys}

    def on_item_measured(self, message: ItemMeasured) -> None:
        state = self.state
        predicted = self._predicted(message)
        if predicted <= 0 or message.elapsed_ns <= 0:
            return
        key = (message.phase, message.units)
        ratio = min(RATIO_MAX, max(1 / RATIO_MAX, message.elapsed_ns / predicted))
        state.ratios[key].append(ratio)
        state.measured[key] = None
        state.since_update += 1
        if state.since_update >= UPDATE_EVERY:
            state.since_update = 0
            self._forget_slowly()
            self._update()

    def _forget_slowly(self) -> None:
        """Let what was not measured lately drift back to the fit: a guard that keeps a policy from a number
        of units would otherwise never be tried again."""
        for key, ratios in self.state.ratios.items():
            if key not in self.state.measured:
                ratios.append(1.0)
        self.state.measured.clear()

    def _predicted(self, message: ItemMeasured) -> float:
        """The solo model's time for this item, or 0 when there is no model for its units."""
        estimates = self.state.estimates
        if message.phase is Phase.DECODE:
            for decode in estimates.decode:
                if decode.units == message.units:
                    return decode.step_ns(message.rows, message.context_tokens) / decode.guard
            return 0.0
        for prefill in estimates.prefill:
            if prefill.units == message.units:
                layer_ns = prefill.layer_ns(message.new_tokens, message.pairs) / prefill.scale
                return layer_ns * message.layers
        return 0.0

    def _update(self) -> None:
        old = self.state.estimates
        decode = tuple(self._guarded(model) for model in old.decode)
        prefill = tuple(self._scaled(model) for model in old.prefill)
        moved = any(_moved(a.guard, b.guard) for a, b in zip(old.decode, decode, strict=True)) or any(
            _moved(a.scale, b.scale) for a, b in zip(old.prefill, prefill, strict=True)
        )
        if moved:
            self._broadcast(Estimates(old.layers, decode, prefill))

    def _guarded(self, model: DecodeModel) -> DecodeModel:
        ratios = self.state.ratios.get((Phase.DECODE, model.units))
        if not ratios:
            return model
        return msgspec.structs.replace(model, guard=_quantile(ratios, GUARD_QUANTILE))

    def _scaled(self, model: PrefillModel) -> PrefillModel:
        ratios = self.state.ratios.get((Phase.PREFILL, model.units))
        if not ratios:
            return model
        return msgspec.structs.replace(model, scale=_quantile(ratios, 0.5))

    def _broadcast(self, estimates: Estimates) -> None:
        self.state.estimates = estimates
        self.state.updates += 1
        changed = EstimatesChanged(estimates)
        self.send(self._refs.arbiter, changed)
        self.send(self._refs.admission, changed)

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, "estimator", self.describe()))

    def describe(self) -> dict[str, Any]:
        estimates = self.state.estimates
        return {
            "calibrated": self.state.calibrated,
            "updates": self.state.updates,
            "decode_ms_batch_4": {
                str(model.units): round(model.step_ns(4, 4 * 128) / 1e6, 2) for model in estimates.decode
            },
            "decode_guard": {str(model.units): round(model.guard, 3) for model in estimates.decode},
            "prefill_layer_ms_512": {
                str(model.units): round(model.layer_ns(512, 512 * 513 // 2) / 1e6, 3)
                for model in estimates.prefill
            },
            "prefill_scale": {str(model.units): round(model.scale, 3) for model in estimates.prefill},
        }


def _quantile(values: deque[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _moved(old: float, new: float) -> bool:
    return abs(new - old) > UPDATE_STEP * old
