"""What `docs/paper.md` says of a figure that is off: why that may be, and how far it moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from muxk.client.paper_effects import FACTORS, MATTERS
from muxk.client.paper_moves import STEP, Moved
from muxk.client.paper_notes import NOTES
from muxk.client.paper_rows import THOUGHTS_70B, Figure, System
from muxk.client.paper_study import Found

NOT_RUN = "How far it moves with the assumed constants was not run."
NOTHING = 1e-9
"""Below this a constant is in no formula of what is run."""

HEAD = f"""## Figures that are off

Ranges: each assumed constant of the card, one at a time, times {FACTORS[0]} and {FACTORS[1]}. First what it
does to the times of typical steps and prompts of both systems, by the cost model (host times as if nothing
were hidden, so as a bound). Where it moves one of them by {MATTERS:.0%} or more, the goodput again, in a
narrow search: steps of {STEP - 1:.0%} (on OpenThoughts {THOUGHTS_70B.tolerance:.0%}) from the first seed's
goodput, with that seed, so that a ratio is good to about as much. Below that a system keeps its goodput. The
noise of item times (4 %) was not moved.
"""


def off_section(found: Found, figures: Sequence[Figure]) -> Iterator[str]:
    """All of them, and the constants that were not run."""
    if not figures:
        return
    yield HEAD
    for figure in figures:
        yield from _figure(found, figure)
    yield from _not_run(found)


def _figure(found: Found, figure: Figure) -> Iterator[str]:
    ratio = found.ratio(figure)
    assert ratio is not None
    if figure.paper is None:
        says = f"paper: it {figure.note} its SLO, ours {ratio.mean:.2f}"
    else:
        says = f"paper {figure.paper:g}, ours {ratio.mean:.2f} ({ratio.mean / figure.paper - 1:+.0%})"
    yield (f"**{figure.key}**: {says}. {NOTES.get(figure.key, 'No explanation was found.')}")
    yield ""
    yield _range(found, figure)
    yield ""


def _range(found: Found, figure: Figure) -> str:
    ours = found.moved.get((figure.setting, System.MUXWISE))
    other = found.moved.get((figure.setting, figure.other))
    if ours is None or other is None:
        return NOT_RUN
    keys = [
        key
        for key in dict.fromkeys((*ours.rates, *other.rates))
        if _is_known(ours, *key) and _is_known(other, *key)
    ]
    ratios = {key: _ratio(ours, other, *key) for key in keys}
    if not ratios:
        matter = any(effect >= MATTERS for one in (ours, other) for effect in one.effects.values())
        return NOT_RUN if matter else "No assumed constant moves what either system runs by enough to be run."
    nominal = ours.subject.rate / other.subject.rate
    low, high = (choose(ratios, key=lambda key: ratios[key]) for choose in (min, max))
    count = len({constant for constant, _ in ratios})
    shown = sorted(
        {constant for constant, _ in ratios}, key=lambda name: (-_reach(ratios, name, nominal), name)
    )
    each = "; ".join(
        f"`{name}` "
        + ", ".join(f"{ratios[name, factor]:.2f}" for factor in FACTORS if (name, factor) in ratios)
        for name in shown
    )
    return (
        f"First seed: {nominal:.2f}; of {count} constants that were run: **{ratios[low]:.2f}** "
        f"(`{low[0]}` x {low[1]:g}) to **{ratios[high]:.2f}** (`{high[0]}` x {high[1]:g}). "
        f"Times {FACTORS[0]} and {FACTORS[1]}: {each}."
    )


def _is_known(moved: Moved, constant: str, factor: float) -> bool:
    """Whether it was run, or need not be: what a failed search would have found is not the nominal rate."""
    return (constant, factor) in moved.rates or moved.effects[constant] < MATTERS


def _ratio(ours: Moved, other: Moved, constant: str, factor: float) -> float:
    """Infinite where the other one meets its SLO at no rate."""
    rate = other.rate(constant, factor)
    return ours.rate(constant, factor) / rate if rate else math.inf


def _reach(ratios: dict[tuple[str, float], float], constant: str, nominal: float) -> float:
    return max(abs(ratio - nominal) for (name, _), ratio in ratios.items() if name == constant)


def _not_run(found: Found) -> Iterator[str]:
    """By setting: constants that move nothing, and those that move too little, with the most they do."""
    if not found.moved:
        return
    yield "Constants that were not run, with the most that they move a time of any system of the setting:"
    yield ""
    for setting in dict.fromkeys(setting for setting, _ in found.moved):
        systems = [one for (of, _), one in found.moved.items() if of == setting]
        most = {name: max(one.effects[name] for one in systems) for name in systems[0].effects}
        nothing = [f"`{name}`" for name, effect in most.items() if effect < NOTHING]
        little = [f"`{name}` {effect:.1%}" for name, effect in most.items() if NOTHING <= effect < MATTERS]
        yield (
            f"- {setting.name}: in no formula of what runs: {', '.join(nothing) or 'none'}; "
            f"too little: {', '.join(little) or 'none'}."
        )
    yield ""
