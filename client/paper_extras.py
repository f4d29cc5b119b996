"""Rows of the paper that are no ratio of goodputs: idle time, preemption, what each part brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from muxk.client.cells import Cell, Outcome
from muxk.client.paper_effects import FACTORS, MATTERS, Subject, effects
from muxk.client.paper_rows import AGENT_8B, AGENT_70B, LLAMA_70B, Setting, System, cell_of, device_of
from muxk.client.paper_study import Found, Study

LOAD = 0.8
"""Of MuxWise's goodput: the ablation and the idle time are measured at this load, which the paper does not
say."""
PREEMPTION = Setting(LLAMA_70B, "sharegpt+loogle", 100.0, requests=300)
PREEMPTION_RATE = 0.5
NO_LAYERS = (("layers", "false"),)
NO_POLLING = (*NO_LAYERS, ("polling", "false"))
"""The paper takes polling away on top of layers (figure 19)."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Extra:
    """One figure of such a row."""

    row: int
    name: str
    paper: float
    unit: str
    ours: float | None
    """None: a run failed."""
    against: str
    """What both figures of it are."""


def extras(study: Study, found: Found) -> list[Extra]:
    """Runs what is missing for them."""
    cells = _cells(study, found)
    return _extras(dict(zip(cells, study.outcomes(list(cells.values())), strict=True)))


Ranges = dict[str, dict[tuple[str, float], float]]
"""By the name of a figure, and by constant and factor: its value."""


def moved_extras(study: Study, found: Found, constants: Sequence[str]) -> Ranges:
    """These figures with assumed constants moved, at the same rates: those constants that move an item's time
    of MuxWise or of chunked prefill in one of the two settings by enough to be run."""
    moves = [(constant, factor) for constant in _that_matter(found, constants) for factor in FACTORS]
    cells = {move: _cells(study, found, f",{move[0]}*{move[1]:g}") for move in moves}
    study.tell(f"{sum(map(len, cells.values()))} runs of other figures with a constant moved")
    outcomes = iter(study.outcomes([cell for each in cells.values() for cell in each.values()]))
    ranges: Ranges = {}
    for move, each in cells.items():
        for extra in _extras({name: next(outcomes) for name in each}):
            if extra.ours is not None:
                ranges.setdefault(extra.name, {})[move] = extra.ours
    return ranges


def _that_matter(found: Found, constants: Sequence[str]) -> list[str]:
    """The largest effect first."""
    most = dict.fromkeys(constants, 0.0)
    for setting, system in (
        (AGENT_8B, System.MUXWISE),
        (AGENT_70B, System.MUXWISE),
        (AGENT_70B, System.CHUNKED),
    ):
        rate = found.pioneers_rate(setting)
        subject = Subject(setting, system, LOAD * rate, found.budget(setting))
        for constant, effect in (effects(subject, constants) if rate else {}).items():
            most[constant] = max(most[constant], effect)
    return sorted((name for name in most if most[name] >= MATTERS), key=lambda name: (-most[name], name))


def _extras(outcomes: Mapping[str, Outcome]) -> list[Extra]:
    def of(name: str, value: Callable[[Figures], float]) -> float | None:
        outcome = outcomes.get(name)
        return None if outcome is None or outcome.error else value(outcome.figures)

    def difference(first: str, second: str) -> float | None:
        one, two = of(first, p99_gap_ms), of(second, p99_gap_ms)
        return None if one is None or two is None else one - two

    def ratio(first: str, second: str) -> float | None:
        one, two = of(first, p99_ttft_per_token_ms), of(second, p99_ttft_per_token_ms)
        return None if one is None or not two else one / two

    at = f"at {LOAD:.0%} of MuxWise's goodput"
    return [
        Extra(8, "idle, MuxWise", 7.7, "%", of("idle", idle_percent), f"70B, Tool & Agent, {at}"),
        Extra(8, "idle, chunked", 4.5, "%", of("idle chunked", idle_percent), f"70B, Tool & Agent, {at}"),
        Extra(
            9,
            "preemption",
            1.96,
            "x",
            ratio("no preemption", "preemption"),
            "P99 TTFT a prompt token, without over with",
        ),
        Extra(10, "no layer split, 8B", 8.0, "ms", difference("8b no layers", "8b"), f"P99 TBT more, {at}"),
        Extra(
            10,
            "nor polling, 8B",
            314.0,
            "ms",
            difference("8b no polling", "8b no layers"),
            f"P99 TBT more, {at}",
        ),
        Extra(
            10,
            "nor polling, 70B",
            672.0,
            "ms",
            difference("70b no polling", "70b no layers"),
            f"P99 TBT more, {at}",
        ),
    ]


def _cells(study: Study, found: Found, moved: str = "") -> dict[str, Cell]:
    """Runs by name; `moved` is appended to the device's name."""
    cells = {}
    for size, setting in (("8b", AGENT_8B), ("70b", AGENT_70B)):
        rate = found.pioneers_rate(setting)
        if not rate:
            continue
        base = msgspec.structs.replace(_muxwise(study, setting, moved), rate=LOAD * rate)
        cells[size] = base
        cells[f"{size} no layers"] = msgspec.structs.replace(base, settings=NO_LAYERS)
        cells[f"{size} no polling"] = msgspec.structs.replace(base, settings=NO_POLLING)
        if setting is AGENT_70B:
            chunked = cell_of(System.CHUNKED, setting, found.budget(setting), moved=moved)
            cells["idle"] = base
            cells["idle chunked"] = msgspec.structs.replace(chunked, rate=base.rate)
    mixed = msgspec.structs.replace(_muxwise(study, PREEMPTION, moved), rate=PREEMPTION_RATE)
    cells["preemption"] = mixed
    cells["no preemption"] = msgspec.structs.replace(mixed, settings=(("preemption", "false"),))
    return cells


def _muxwise(study: Study, setting: Setting, moved: str) -> Cell:
    profile = study.profile_of(device_of(System.MUXWISE, setting, moved), setting.model)
    return cell_of(System.MUXWISE, setting, profile=profile, moved=moved)


def p99_gap_ms(figures: Figures) -> float:
    return float(figures["p99_itl_ms"])


def p99_ttft_per_token_ms(figures: Figures) -> float:
    return float(figures["p99_ttft_per_prompt_token_ms"])


def idle_percent(figures: Figures) -> float:
    """Percent of the units' time with work that had no kernel."""
    return 100.0 * float(figures["idle"]["idle_share"])
