"""The runs behind `docs/paper.md`: goodputs of every system in every setting, and how far they move.

Everything goes through a `Lab` whose store keeps outcomes, so that a study that was stopped goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muxk.client.cells import Cell, Goal, Outcome
from muxk.client.experiments import FACTOR, CellFailed, Lab, Sought
from muxk.client.goodput import Goodput, Search
from muxk.client.paper_rows import BUDGETS, FIGURES, Figure, Setting, System, cell_of, device_of
from muxk.profiles.gpu import load_gpu
from muxk.profiles.scaling import assumed_constants

FACTORS = (0.7, 1.3)
LOWEST = 12.0
"""A system that fails at the rate where its search begins divided by this counts as one that never meets."""
TUNING_TOLERANCE = 0.25
COARSE_TOLERANCE = 0.1
"""Of searches that only show where a figure moves."""
NO_EFFECT = ("experts.",)
"""Constants of parts that the models of the paper's table do not have."""

Tell = Callable[[str], None]


@dataclass
class Found:
    """What the study came to."""

    goodputs: dict[tuple[Setting, System], Goodput | CellFailed] = field(default_factory=dict)
    sweeps: dict[Setting, dict[int, float]] = field(default_factory=dict)
    """Of chunked prefill: goodput by budget."""
    ranges: dict[Figure, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Ratio with a constant times 0.7 and times 1.3, by constant; of figures that are off."""

    def ratio(self, figure: Figure) -> float | None:
        """None when it can not be said: the other one met its SLO at no rate, or a run failed."""
        ours = self.goodputs.get((figure.setting, System.MUXWISE))
        other = self.goodputs.get((figure.setting, figure.other))
        if not isinstance(ours, Goodput) or not isinstance(other, Goodput) or not other.rate:
            return None
        return ours.rate / other.rate

    def best_budget(self, setting: Setting) -> int:
        sweep = self.sweeps[setting]
        return max(sweep, key=lambda budget: (sweep[budget], budget))


@dataclass(frozen=True)
class Study:
    """How thorough it is."""

    lab: Lab
    folder: Path
    """For profiles."""
    seeds: tuple[int, ...]
    tolerance: float
    tell: Tell
    settings: tuple[Setting, ...]

    def run(self) -> Found:
        """Budgets, then goodputs of all systems."""
        found = Found()
        self._sweep_budgets(found)
        wanted = [(setting, system) for setting in self.settings for system in self._systems(setting)]
        self.tell(f"goodput of {len(wanted)} systems, seeds {self.seeds}")
        sought = [
            Sought(
                self._cell(system, setting, found),
                Goal.STRICT,
                _search(self._start(setting, system, found), self.tolerance),
                self.seeds,
            )
            for setting, system in wanted
        ]
        found.goodputs.update(zip(wanted, self.lab.goodputs(sought), strict=True))
        return found

    def _start(self, setting: Setting, system: System, found: Found) -> float:
        """Near where the answer may be: chunked prefill's sweep tells, for the others as well."""
        sweep = found.sweeps.get(setting)
        best = sweep[found.best_budget(setting)] if sweep else 0.0
        if not best:
            return setting.start
        return best if system is System.CHUNKED else 1.4 * best

    def _systems(self, setting: Setting) -> list[System]:
        others = [figure.other for figure in FIGURES if figure.setting == setting]
        return [System.MUXWISE, *others]

    def _sweep_budgets(self, found: Found) -> None:
        settings = [setting for setting in self.settings if System.CHUNKED in self._systems(setting)]
        self.tell(f"chunked prefill: {len(BUDGETS)} budgets in {len(settings)} settings")
        pairs = [(setting, budget) for setting in settings for budget in BUDGETS]
        sought = [
            Sought(
                cell_of(System.CHUNKED, setting, budget),
                Goal.STRICT,
                _search(setting.start, TUNING_TOLERANCE),
                self.seeds[:1],
            )
            for setting, budget in pairs
        ]
        for (setting, budget), goodput in zip(pairs, self.lab.goodputs(sought), strict=True):
            rate = goodput.rate if isinstance(goodput, Goodput) else 0.0
            found.sweeps.setdefault(setting, {})[budget] = rate

    def _cell(self, system: System, setting: Setting, found: Found, moved: str = "") -> Cell:
        budget = found.best_budget(setting) if system is System.CHUNKED else None
        uses_profile = system in (System.MUXWISE, System.TEMPORAL)
        profile = self.profile_of(device_of(system, setting, moved), setting.model) if uses_profile else None
        return cell_of(system, setting, budget, profile, moved)

    def profile_of(self, device: str, model: str) -> str:
        """The path of what `muxk profile --quick` measures of a device, once."""
        name = f"{device}_{model}".replace(":", "_").replace(",", "_").replace("*", "x")
        path = self.folder / f"{name}.json"
        if not path.exists():
            command = [sys.executable, "-m", "muxk.client.cli", "profile", "--quick", "--out", str(path)]
            options = ["--device", device, "--model", model]
            subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        return str(path)

    # --- how far figures move ---

    def move_constants(self, found: Found, figures: Sequence[Figure], constants: Sequence[str]) -> None:
        """For each of these figures the ratio with each of these constants times 0.7 and 1.3, one seed."""
        moves = [(constant, factor) for constant in constants for factor in FACTORS]
        pairs = dict.fromkeys(
            (figure.setting, system) for figure in figures for system in (System.MUXWISE, figure.other)
        )
        rates = self._moved_rates(found, list(pairs), moves)
        for figure in figures:
            found.ranges[figure] = {
                constant: _ratios(rates, figure, constant)
                for constant in constants
                if all((figure.setting, figure.other, constant, factor) in rates for factor in FACTORS)
            }

    def _moved_rates(
        self, found: Found, pairs: list[tuple[Setting, System]], moves: list[tuple[str, float]]
    ) -> dict[tuple[Setting, System, str, float], float]:
        self.tell(f"{len(pairs)} systems with each of {len(moves)} moves of a constant")
        wanted = [(setting, system, *move) for setting, system in pairs for move in moves]
        sought = []
        for setting, system, constant, factor in wanted:
            cell = self._cell(system, setting, found, f",{constant}*{factor:g}")
            nominal = found.goodputs[setting, system]
            start = nominal.rate if isinstance(nominal, Goodput) and nominal.rate else setting.start
            search = _search(start, COARSE_TOLERANCE)
            sought.append(Sought(cell, Goal.STRICT, search, self.seeds[:1]))
        goodputs = self.lab.goodputs(sought)
        return {
            key: goodput.rate
            for key, goodput in zip(wanted, goodputs, strict=True)
            if isinstance(goodput, Goodput)
        }

    def outcomes(self, cells: Sequence[Cell]) -> list[Outcome]:
        """Of single runs."""
        return self.lab.run(cells)


def movable() -> list[str]:
    """The assumed constants of the card that have an effect here."""
    return [
        constant for constant in assumed_constants(load_gpu("a100")) if not constant.startswith(NO_EFFECT)
    ]


def _search(start: float, tolerance: float) -> Search:
    """Without looks further out: a study of hundreds of runs can not have them."""
    return Search(start, start / LOWEST, start * FACTOR, tolerance, checks=())


def _ratios(
    rates: dict[tuple[Setting, System, str, float], float], figure: Figure, constant: str
) -> tuple[float, float]:
    found = []
    for factor in FACTORS:
        ours = rates.get((figure.setting, System.MUXWISE, constant, factor), 0.0)
        other = rates[figure.setting, figure.other, constant, factor]
        found.append(ours / other if other else float("inf"))
    return found[0], found[1]
