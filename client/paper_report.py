"""`docs/paper.md`: the paper's figures beside ours, what is off, and how far it moves."""

from __future__ import annotations

from collections.abc import Iterator

from muxk.client.goodput import Goodput
from muxk.client.paper_extras import Extra
from muxk.client.paper_notes import NOTES
from muxk.client.paper_rows import AT_LEAST, FIGURES, Figure
from muxk.client.paper_study import COARSE_TOLERANCE, FACTORS, Found, Study

CLOSE = 0.25
"""A ratio within this of the paper's counts."""
RANGE_ROWS = 8
"""Constants that are shown of a figure that is off: those that move it most."""

HEAD = """# What the MuxWise paper measured, and what the simulator says

Written by `make paper`. Left is what arXiv 2504.14489v3 reports of real GPUs, right what the production
actors and policies do on modelled ones (docs/gpu-models.md). No constant was fitted to these figures. A ratio
counts when it is within {close:.0%} of the paper's; a row whose figure is a bound, when ours is past it.

Goodput is strict: the highest rate at which P99 of all token gaps is within the TBT SLO and the queue is
stable. Each is the mean over seeds {seeds}, searched to {tolerance:.0%}, with its 95 % interval. Chunked
prefill has the best token budget of a sweep for each setting, below. Layouts are the paper's: MuxWise and
chunked prefill on all GPUs with tensor parallelism, LoongServe as SP2xTP4 (70B) and SP4xTP2 (8B), static
disaggregation as TP4 + TP4.
"""


def report(study: Study, found: Found, extras: list[Extra]) -> str:
    """The whole document."""
    lines = [
        HEAD.format(close=CLOSE, seeds=", ".join(map(str, study.seeds)), tolerance=study.tolerance),
        *_verdict(found, extras),
        *_ratios(found),
        *_extras(extras),
        *_goodputs(found),
        *_sweeps(found),
        *_off(found),
    ]
    return "\n".join(lines).rstrip() + "\n"


def is_close(figure: Figure, found: Found) -> bool:
    """Whether our ratio counts."""
    ratio = found.ratio(figure)
    if figure.paper is None:
        other = found.goodputs.get((figure.setting, figure.other))
        return isinstance(other, Goodput) and other.rate == 0.0
    if ratio is None:
        return False
    if figure.row in AT_LEAST and ratio >= figure.paper:
        return True
    return abs(ratio / figure.paper - 1.0) <= CLOSE


def is_close_extra(extra: Extra) -> bool:
    return extra.ours is not None and abs(extra.ours / extra.paper - 1.0) <= CLOSE


def off_figures(found: Found) -> list[Figure]:
    """Figures with a ratio on both sides that do not agree."""
    return [
        figure
        for figure in FIGURES
        if figure.paper is not None and found.ratio(figure) is not None and not is_close(figure, found)
    ]


def _verdict(found: Found, extras: list[Extra]) -> Iterator[str]:
    shown = [figure for figure in FIGURES if (figure.setting, figure.other) in found.goodputs]
    close = sum(is_close(figure, found) for figure in shown)
    more = sum(is_close_extra(extra) for extra in extras)
    rows = dict.fromkeys([figure.row for figure in shown])
    whole = sum(all(is_close(figure, found) for figure in shown if figure.row == row) for row in rows)
    yield (
        f"**{close} of {len(shown)} ratios and {more} of {len(extras)} other figures agree; "
        f"{whole} of {len(rows)} rows of ratios agree in all of theirs.**"
    )
    missing = dict.fromkeys(figure.setting.name for figure in FIGURES if figure not in shown)
    if missing:
        yield f"Not run in this edition: {'; '.join(missing)}."
    ordered = sum((found.ratio(figure) or 0.0) > 1.0 for figure in shown if figure.paper is not None)
    known = sum(figure.paper is not None for figure in shown)
    yield f"The order, MuxWise before the other, is the paper's in {ordered} of {known}."
    yield ""


def _ratios(found: Found) -> Iterator[str]:
    yield "## Ratios of goodput: MuxWise over the other"
    yield ""
    yield "| row | setting | over | paper | ours | ours / paper | |"
    yield "|---|---|---|---|---|---|---|"
    for figure in FIGURES:
        if (figure.setting, figure.other) not in found.goodputs:
            continue
        ratio = found.ratio(figure)
        paper = figure.note if figure.paper is None else f"{figure.paper:.2f}"
        ours = "-" if ratio is None else f"{ratio:.2f}"
        relative = "-" if ratio is None or figure.paper is None else f"{ratio / figure.paper:.2f}"
        verdict = "agrees" if is_close(figure, found) else "**off**"
        yield (
            f"| {figure.row} | {figure.setting.name} | {figure.other.value} | {paper} | {ours} "
            f"| {relative} | {verdict} |"
        )
    yield ""


def _extras(extras: list[Extra]) -> Iterator[str]:
    yield "## Other figures"
    yield ""
    yield "| row | figure | of | paper | ours | ours / paper | |"
    yield "|---|---|---|---|---|---|---|"
    for extra in extras:
        ours = "-" if extra.ours is None else f"{extra.ours:.1f} {extra.unit}"
        relative = "-" if extra.ours is None else f"{extra.ours / extra.paper:.2f}"
        verdict = "agrees" if is_close_extra(extra) else "**off**"
        yield (
            f"| {extra.row} | {extra.name} | {extra.against} | {extra.paper:g} {extra.unit} | {ours} "
            f"| {relative} | {verdict} |"
        )
    yield ""
    for extra in extras:
        if not is_close_extra(extra):
            yield f"- {extra.name}: best explanation found: {NOTES.get(extra.name, 'none.')}"
    yield ""


def _goodputs(found: Found) -> Iterator[str]:
    yield "## Goodputs, requests a second"
    yield ""
    yield "| setting | system | goodput | 95 % interval | |"
    yield "|---|---|---|---|---|"
    for (setting, system), goodput in found.goodputs.items():
        if not isinstance(goodput, Goodput):
            yield f"| {setting.name} | {system.value} | - | | {goodput} |"
            continue
        remarks = [] if goodput.exact else ["a limit of the search was met"]
        remarks += [] if goodput.monotone else ["not monotone"]
        shown = f"{goodput.rate:.3g} | {goodput.low:.3g} to {goodput.high:.3g} | {', '.join(remarks)}"
        yield f"| {setting.name} | {system.value} | {shown} |"
    yield ""


def _sweeps(found: Found) -> Iterator[str]:
    if not found.sweeps:
        return
    budgets = list(next(iter(found.sweeps.values())))
    yield "## Token budgets of chunked prefill: goodput by budget, one seed, searched to 25 %"
    yield ""
    yield "| setting | " + " | ".join(map(str, budgets)) + " |"
    yield "|---|" + "---|" * len(budgets)
    for setting, sweep in found.sweeps.items():
        best = found.best_budget(setting)
        cells = [f"**{sweep[b]:.3g}**" if b == best else f"{sweep[b]:.3g}" for b in budgets]
        yield f"| {setting.name} | " + " | ".join(cells) + " |"
    yield ""


def _off(found: Found) -> Iterator[str]:
    figures = [
        figure
        for figure in FIGURES
        if (figure.setting, figure.other) in found.goodputs and not is_close(figure, found)
    ]
    if not figures:
        return
    yield "## Figures that are off"
    yield ""
    for figure in figures:
        yield from _off_figure(figure, found)


def _off_figure(figure: Figure, found: Found) -> Iterator[str]:
    ratio = found.ratio(figure)
    paper = figure.note if figure.paper is None else f"{figure.paper:g}"
    ours = "no ratio" if ratio is None else f"{ratio:.2f}"
    why = NOTES.get(figure.key, "none.")
    yield f"**{figure.key}**: paper {paper}, ours {ours}. Best explanation found: {why}"
    yield ""
    ranges = found.ranges.get(figure, {})
    if not ranges or ratio is None:
        yield "How far it moves with the assumed constants was not run."
        yield ""
        return
    by_reach = sorted(ranges, key=lambda constant: -max(abs(value - ratio) for value in ranges[constant]))
    values = [value for pair in ranges.values() for value in pair]
    moved = f"{len(ranges)} assumed constants, one at a time, times {FACTORS[0]} and {FACTORS[1]}"
    searched = f"one seed, searched to {COARSE_TOLERANCE:.0%}"
    most = "; ".join(
        f"`{constant}` {ranges[constant][0]:.2f}, {ranges[constant][1]:.2f}"
        for constant in by_reach[:RANGE_ROWS]
    )
    yield f"With {moved} ({searched}): {min(values):.2f} to {max(values):.2f}. Most by: {most}."
    yield ""
