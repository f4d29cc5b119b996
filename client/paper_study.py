"""The runs behind `docs/paper.md`: goodputs of every system in every setting, and how far they move.

Everything goes through a `Lab` whose store keeps outcomes, so that a study that was stopped goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from muxk.client.cells import Cell, Goal, Outcome
from muxk.client.experiments import FACTOR, CellFailed, Lab, Sought
from muxk.client.goodput import Goodput, Search, combine, confidence
from muxk.client.paper_effects import Subject
from muxk.client.paper_moves import Moved, run_moves, subjects_moved, wanted
from muxk.client.paper_rows import BUDGETS, FIGURES, Figure, Setting, System, cell_of, device_of

LOWEST = 12.0
"""A system that fails at the rate where its search begins divided by this counts as one that never meets."""
TUNING_TOLERANCE = 0.25
PIONEERS = 2
"""Seeds that are searched from afar; others from the mean of what these found."""
NEAR_STEP = 1.25

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Ratio:
    """Of two goodputs with the same seeds: the mean of the seeds' ratios and its 95 % interval."""

    mean: float
    low: float
    high: float
    of_seeds: tuple[float, ...]


@dataclass
class Found:
    """What the study came to."""

    goodputs: dict[tuple[Setting, System], Goodput | CellFailed] = field(default_factory=dict)
    sweeps: dict[Setting, dict[int, float]] = field(default_factory=dict)
    """Of chunked prefill: goodput by budget."""
    batches: dict[Setting, dict[int, float]] = field(default_factory=dict)
    """Of MuxWise: goodput by the tokens of a batch."""
    moved: dict[tuple[Setting, System], Moved] = field(default_factory=dict)
    """Of the systems of figures that are off."""

    def ratio(self, figure: Figure) -> Ratio | None:
        """None when it can not be said: the other one met its SLO at no rate, or a run failed."""
        ours = self.goodputs.get((figure.setting, System.MUXWISE))
        return paired(ours, self.goodputs.get((figure.setting, figure.other)))

    def pioneers_rate(self, setting: Setting) -> float:
        """MuxWise's goodput with the first seeds; 0 where it has none. Loads of other runs are parts of it,
        so that they stay when there are more seeds."""
        goodput = self.goodputs.get((setting, System.MUXWISE))
        if not isinstance(goodput, Goodput):
            return 0.0
        return fmean(one.rate for one in goodput.seeds[:PIONEERS])

    def budget(self, setting: Setting) -> int:
        """Chunked prefill's: the paper's, or the best of a sweep; the least of all where there is neither."""
        if setting.printed is not None:
            return setting.printed
        return self.best_budget(setting) if setting in self.sweeps else BUDGETS[0]

    def best_budget(self, setting: Setting) -> int:
        return _best(self.sweeps[setting])

    def best_batch(self, setting: Setting) -> int | None:
        """MuxWise's; None where it was not tuned."""
        return _best(self.batches[setting]) if setting in self.batches else None


def _best(sweep: Mapping[int, float]) -> int:
    return max(sweep, key=lambda size: (sweep[size], size))


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
        self._sweep_batches(found)
        pairs = [(setting, system) for setting in self.settings for system in self._systems(setting)]
        self.tell(f"goodput of {len(pairs)} systems, seeds {self.seeds}")
        first = self._first_seeds(pairs, found)
        self._other_seeds(first, found)
        return found

    def _first_seeds(
        self, pairs: list[tuple[Setting, System]], found: Found
    ) -> dict[tuple[Setting, System], Goodput | CellFailed]:
        sought = [
            Sought(
                self._cell(system, setting, found),
                Goal.STRICT,
                self._first_search(setting, system),
                self._seeds(setting)[:PIONEERS],
            )
            for setting, system in pairs
        ]
        return dict(zip(pairs, self.lab.goodputs(sought), strict=True))

    def _first_search(self, setting: Setting, system: System) -> Search:
        known, tolerance = setting.known_of(system), self.tolerance_of(setting)
        if known is not None:
            return near(known.rate, tolerance)
        return far(setting.near if system is System.CHUNKED else 1.4 * setting.near, tolerance)

    def _other_seeds(self, first: dict[tuple[Setting, System], Goodput | CellFailed], found: Found) -> None:
        found.goodputs.update(first)
        again = {
            pair: Sought(
                self._cell(pair[1], pair[0], found),
                Goal.STRICT,
                near(goodput.rate, self.tolerance_of(pair[0])),
                self._seeds(pair[0])[PIONEERS:],
            )
            for pair, goodput in first.items()
            if isinstance(goodput, Goodput) and goodput.rate and self._seeds(pair[0])[PIONEERS:]
        }
        for pair, more in zip(again, self.lab.goodputs(list(again.values())), strict=True):
            before = first[pair]
            assert isinstance(before, Goodput)
            together = combine((*before.seeds, *more.seeds)) if isinstance(more, Goodput) else more
            found.goodputs[pair] = together

    def _seeds(self, setting: Setting) -> tuple[int, ...]:
        return self.seeds[: setting.seeds]

    def tolerance_of(self, setting: Setting) -> float:
        return max(self.tolerance, setting.tolerance)

    def _systems(self, setting: Setting) -> list[System]:
        others = [figure.other for figure in FIGURES if figure.setting == setting]
        return [System.MUXWISE, *others]

    def _sweep_budgets(self, found: Found) -> None:
        settings = [setting for setting in self.settings if System.CHUNKED in self._systems(setting)]
        self.tell(f"chunked prefill: budgets in {len(settings)} settings")
        pairs = [(setting, budget) for setting in settings for budget in setting.budgets]
        sought = [
            Sought(
                cell_of(System.CHUNKED, setting, budget),
                Goal.STRICT,
                self._tuning_search(setting),
                self.seeds[:1],
            )
            for setting, budget in pairs
        ]
        for (setting, budget), goodput in zip(pairs, self.lab.goodputs(sought), strict=True):
            rate = goodput.rate if isinstance(goodput, Goodput) else 0.0
            found.sweeps.setdefault(setting, {})[budget] = rate

    def _tuning_search(self, setting: Setting) -> Search:
        """As for the system itself where it begins at what is known, so that runs serve both."""
        if setting.known_of(System.CHUNKED) is not None:
            return self._first_search(setting, System.CHUNKED)
        return far(setting.start, TUNING_TOLERANCE)

    def _sweep_batches(self, found: Found) -> None:
        """To the study's own tolerance, with its first seed: they move a goodput by less than budgets do."""
        pairs = [(setting, tokens) for setting in self.settings for tokens in setting.batches]
        self.tell(f"MuxWise: {len(pairs)} bounds of a batch")
        sought = [
            Sought(
                self._made(System.MUXWISE, setting, tokens),
                Goal.STRICT,
                far(1.4 * setting.near, self.tolerance_of(setting)),
                self.seeds[:1],
            )
            for setting, tokens in pairs
        ]
        for (setting, tokens), goodput in zip(pairs, self.lab.goodputs(sought), strict=True):
            rate = goodput.rate if isinstance(goodput, Goodput) else 0.0
            found.batches.setdefault(setting, {})[tokens] = rate

    def _cell(self, system: System, setting: Setting, found: Found, moved: str = "") -> Cell:
        budget = None
        if system is System.CHUNKED:
            budget = found.budget(setting)
        elif system is System.MUXWISE:
            budget = found.best_batch(setting)
        return self._made(system, setting, budget, moved)

    def _made(self, system: System, setting: Setting, budget: int | None, moved: str = "") -> Cell:
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
        """For the systems of these figures: goodput with each constant times 0.7 and times 1.3."""
        pairs = dict.fromkeys(
            (figure.setting, system) for figure in figures for system in (System.MUXWISE, figure.other)
        )
        subjects = [
            Subject(setting, system, first_seed(found.goodputs[setting, system]), found.budget(setting))
            for setting, system in pairs
        ]
        moved = subjects_moved(subjects, constants)
        asked = [
            (one, constant, factor, self._moved_cell(one.subject, found, constant, factor))
            for one, constant, factor in wanted(moved)
        ]
        self.tell(f"{len(asked)} goodputs with a constant moved")
        run_moves(self.lab, asked, self.seeds[0])
        found.moved = {(one.subject.setting, one.subject.system): one for one in moved}

    def _moved_cell(self, subject: Subject, found: Found, constant: str, factor: float) -> Cell:
        return self._cell(subject.system, subject.setting, found, f",{constant}*{factor:g}")

    def outcomes(self, cells: Sequence[Cell]) -> list[Outcome]:
        """Of single runs."""
        return self.lab.run(cells)


def far(start: float, tolerance: float) -> Search:
    """From a guess, and without looks further out: a study of hundreds of runs can not have them."""
    return Search(start, start / LOWEST, start * FACTOR, tolerance, checks=())


def near(rate: float, tolerance: float) -> Search:
    """From what other seeds found, in small steps."""
    return Search(rate, rate / LOWEST, rate * LOWEST, tolerance, checks=(), step=NEAR_STEP)


def first_seed(goodput: Goodput | CellFailed) -> float:
    """Its rate with the first seed. A figure that has a ratio has one."""
    assert isinstance(goodput, Goodput)
    return goodput.seeds[0].rate


def paired(ours: Goodput | CellFailed | None, other: Goodput | CellFailed | None) -> Ratio | None:
    """Seed by seed; None where one failed, has no seed in common, or the other meets its SLO at no rate."""
    if not isinstance(ours, Goodput) or not isinstance(other, Goodput):
        return None
    rates = {one.seed: one.rate for one in other.seeds}
    pairs = [(one.rate, rates[one.seed]) for one in ours.seeds if one.seed in rates]
    if not pairs or not all(rate for _, rate in pairs):
        return None
    ratios = tuple(rate / others for rate, others in pairs)
    spread = confidence(ratios)
    return Ratio(fmean(ratios), max(0.0, fmean(ratios) - spread), fmean(ratios) + spread, ratios)
