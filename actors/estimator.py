"""estimator: predicts what a decode step and a prefill layer take on a number of units.

It begins with a profile, if it is given one, else it runs a few seconds of probes through the arbiter; then
it learns from completed items alone, and broadcasts immutable tables. What a decode step is multiplied by is
up to the guard, which the policy in force chooses (`guards.py`). Invariant: tables are only ever replaced as
a whole, and a time in them never shrinks when load grows on the same guard's factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from muxk.actors.guards import GUARDS, Guard, QuantileGuard, Windows
from muxk.actors.messages import EstimatorReady
from muxk.actors.refs import EstimatorInbox, Refs
from muxk.kernel.actor import Actor
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.messages import (
    MEASURED_TOGETHER,
    EstimatesChanged,
    ItemMeasured,
    ItemsMeasured,
    PolicyChanged,
    ProbeDone,
    ReportState,
    RunProbe,
    StateReported,
)
from muxk.kernel.policy import DEFAULT_GUARD, PolicyBook, guard_of
from muxk.kernel.work import DECODE
from muxk.profiles.calibration import Probe, fit

UPDATE_EVERY = MEASURED_TOGETHER
"""Completed items between two looks at the tables."""
RATIO_MIN, RATIO_MAX = 1 / 8.0, 8.0
"""Bounds on what one item may say: a machine that was suspended is no property of the model."""
UPDATE_STEP = 0.03
"""Relative change below which no new tables are sent."""


@dataclass
class EstimatorState:
    probes: tuple[Probe, ...]
    wanted: str
    """The guard of the policy in force."""
    elapsed_ns: dict[int, int] = field(default_factory=dict)
    calibrated: bool = False
    base: Estimates = field(default_factory=Estimates)
    """Solo times, as they were measured at start."""
    decode_models: dict[int, DecodeModel] = field(default_factory=dict)
    prefill_models: dict[int, PrefillModel] = field(default_factory=dict)
    """Those of `base`, by units."""
    scaled: Estimates = field(default_factory=Estimates)
    """`base` with prefill as it was at the last look."""
    looked_at: Estimates | None = None
    """The tables of the last look."""
    estimates: Estimates = field(default_factory=Estimates)
    """What policies have."""
    guards: dict[str, Guard] = field(default_factory=dict)
    """Those that the tables suffice for, by name."""
    scales: Windows = field(default_factory=lambda: Windows(()))
    """Of prefill layers: measured over predicted."""
    since_update: int = 0
    updates: int = 0

    @property
    def guard(self) -> str:
        """The one in force."""
        return self.wanted if self.wanted in self.guards else DEFAULT_GUARD


class Estimator(Actor):
    """One a device."""

    Accepts = EstimatorInbox

    def __init__(
        self,
        refs: Refs,
        probes: list[Probe],
        layers: int,
        book: PolicyBook | None = None,
        policy_sha: str = "",
        profile: Estimates | None = None,
    ) -> None:
        """Args:
        book: knows the policies, whose guards are used; without it that is the default one.
        profile: what was measured before; then no probes are run.
        """
        self._refs = refs
        self._layers = layers
        self._book = book
        self._profile = profile
        wanted = DEFAULT_GUARD if book is None else guard_of(book[policy_sha])
        self.state = EstimatorState(() if profile is not None else tuple(probes), wanted)

    def started(self) -> None:
        for probe in self.state.probes:
            self.send(self._refs.arbiter, RunProbe(probe.work, probe.layers))
        if self._profile is not None:
            self._begin(self._profile)
        if not self.state.probes:
            self.send(self._refs.readiness, EstimatorReady())

    def on_probe_done(self, message: ProbeDone) -> None:
        state = self.state
        state.elapsed_ns[message.probe_id] = message.elapsed_ns
        if len(state.elapsed_ns) == len(state.probes):
            self._begin(fit(state.probes, state.elapsed_ns, self._layers))
            state.calibrated = True
            self.send(self._refs.readiness, EstimatorReady())

    def on_policy_changed(self, message: PolicyChanged) -> None:
        state = self.state
        before = state.guard
        if self._book is not None:
            state.wanted = guard_of(self._book[message.sha])
        if state.guard != before and state.guards:
            self._broadcast(self._tables())

    def _begin(self, base: Estimates) -> None:
        state = self.state
        state.base = base
        state.decode_models = {model.units: model for model in base.decode}
        state.prefill_models = {model.units: model for model in base.prefill}
        state.scaled = base
        made = {name: make(base) for name, make in GUARDS.items()}
        state.guards = {name: guard for name, guard in made.items() if guard is not None}
        state.scales = Windows(tuple(model.units for model in base.prefill))
        self._broadcast(self._tables())

    def on_items_measured(self, message: ItemsMeasured) -> None:
        for item in message.items:
            self._learn(item)

    def _learn(self, item: ItemMeasured) -> None:
        state = self.state
        predicted = self._predicted(item)
        if predicted <= 0 or item.elapsed_ns <= 0:
            return
        ratio = item.elapsed_ns / predicted
        if not RATIO_MIN <= ratio <= RATIO_MAX:
            ratio = RATIO_MIN if ratio < RATIO_MIN else RATIO_MAX
        if item.phase is DECODE:
            for guard in state.guards.values():
                guard.learn(item, ratio)
        else:
            state.scales.add(item.units, ratio)
        state.since_update += 1
        if state.since_update >= UPDATE_EVERY:
            state.since_update = 0
            self._update()

    def _predicted(self, item: ItemMeasured) -> float:
        """The solo model's time for this item, or 0 when there is no model for its units."""
        if item.phase is DECODE:
            decode = self.state.decode_models.get(item.units)
            return 0.0 if decode is None else decode.solo_ns(item.rows, item.context_tokens)
        prefill = self.state.prefill_models.get(item.units)
        return 0.0 if prefill is None else prefill.solo_ns(item.new_tokens, item.pairs) * item.layers

    def _update(self) -> None:
        state = self.state
        for guard in state.guards.values():
            guard.tick()
        state.scales.forget()
        tables = self._tables()
        if tables is state.looked_at:
            return  # what was found of them holds
        state.looked_at = tables
        if _moved(state.estimates, tables):
            self._broadcast(tables)

    def _tables(self) -> Estimates:
        """The solo times, prefill as it was lately, decode as the guard in force has it."""
        state = self.state
        models = state.scaled.prefill
        scales = state.scales.quantiles(0.5)
        if scales != [model.scale for model in models]:
            prefill = tuple(
                model if model.scale == scale else msgspec.structs.replace(model, scale=scale)
                for model, scale in zip(models, scales, strict=True)
            )
            state.scaled = msgspec.structs.replace(state.base, prefill=prefill)
        guard = state.guards.get(state.guard) or QuantileGuard(state.base)
        return guard.guarded(state.scaled)

    def _broadcast(self, estimates: Estimates) -> None:
        self.state.estimates = self.state.looked_at = estimates
        self.state.updates += 1
        changed = EstimatesChanged(estimates, self._refs.group)
        self.send(self._refs.arbiter, changed)
        self.send(self._refs.admission, changed)
        if self._refs.placement is not None:
            self.send(self._refs.placement, changed)

    def on_report_state(self, message: ReportState) -> None:
        self.send(
            self._refs.gateway, StateReported(message.ticket, self._refs.estimator.name, self.describe())
        )

    def describe(self) -> dict[str, Any]:
        estimates = self.state.estimates
        return {
            "calibrated": self.state.calibrated,
            "profiled": self._profile is not None,
            "guard": self._described_guard(),
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

    def _described_guard(self) -> dict[str, Any]:
        """Which guard is in force, and which one the policy wanted if that needs a profile."""
        state = self.state
        shown: dict[str, Any] = {"name": state.guard}
        if state.guard != state.wanted:
            shown["wanted"] = f"{state.wanted}, which needs a profile (muxk profile)"
        guard = state.guards.get(state.guard)
        return shown if guard is None else {**shown, **guard.describe()}


def _moved(old: Estimates, new: Estimates) -> bool:
    """Whether policies should know."""
    for a, b in zip(old.decode, new.decode, strict=True):
        if abs(b.guard - a.guard) > UPDATE_STEP * a.guard:
            return True
    for c, d in zip(old.prefill, new.prefill, strict=True):
        if abs(d.scale - c.scale) > UPDATE_STEP * c.scale:
            return True
    return old.contention is not new.contention and old.contention != new.contention
