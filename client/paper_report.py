"""`docs/paper.md`: the paper's figures beside ours, what is off, and how far it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from muxk.client.goodput import Goodput
from muxk.client.paper_extras import Extra, Ranges
from muxk.client.paper_notes import NOTES, edition
from muxk.client.paper_off import off_section
from muxk.client.paper_rows import AT_LEAST, BUDGET_70B, FIGURES, THOUGHTS_70B, Figure, Setting
from muxk.client.paper_study import Found, Study
from muxk.client.paper_tested import tested_section
from muxk.client.paper_trials import SingleFound, TrialFound

CLOSE = 0.25
"""A ratio within this of the paper's counts."""
SEEDS_MIN = 3
"""Of an interval that says something."""

HEAD = """# What the MuxWise paper measured, and what the simulator says

Written by `make paper`. Left is what arXiv 2504.14489v3 reports of real GPUs, right what the production
actors and policies do on modelled ones (docs/gpu-models.md). No constant was fitted to these figures. A ratio
counts when it is within {close:.0%} of the paper's; a row whose figure is a bound, when ours is past it.

Goodput is strict: the highest rate at which P99 of all token gaps is within the TBT SLO and the queue is
stable, searched to {tolerance:.0%} with each of the seeds {seeds}. A seed fixes requests, the pattern of
their arrivals and the noise of the GPUs for both systems, so a ratio is the mean of the seeds' ratios, with
its 95 % interval (Student's t). What a seed carries depends more on its requests than on the system. Chunked
prefill has the token budget that the paper prints, {printed} for 70B, and the best of a sweep, below, for 8B,
where it prints none (512 for 70B is put to the test at the end); MuxWise has the better of two bounds
on what short prompts share a batch. Layouts are the paper's: MuxWise and chunked prefill on all GPUs with
tensor parallelism, LoongServe as SP2xTP4 (70B) and SP4xTP2 (8B), static disaggregation as TP4 + TP4.
OpenThoughts, with answers of 8,000 tokens, was searched to {rough:.0%} and with {few} seeds only.
"""


def report(
    study: Study,
    found: Found,
    extras: list[Extra],
    tried: list[TrialFound],
    single: list[SingleFound],
    version: str,
    ranges: Ranges | None = None,
) -> str:
    """The whole document; `version` of the code that ran, `ranges` of the other figures."""
    lines = [
        HEAD.format(
            close=CLOSE,
            seeds=", ".join(map(str, study.seeds)),
            tolerance=study.tolerance,
            rough=THOUGHTS_70B.tolerance,
            few=THOUGHTS_70B.seeds,
            printed=BUDGET_70B,
        ),
        *_verdict(found, extras),
        edition(version),
        *_ratios(found),
        *_extras(extras, ranges or {}),
        *_goodputs(found),
        *_sweeps(found),
        *off_section(found, off_figures(found)),
        *tested_section(tried, single),
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
    if figure.row in AT_LEAST and ratio.mean >= figure.paper:
        return True
    return abs(ratio.mean / figure.paper - 1.0) <= CLOSE


def may_be_close(figure: Figure, found: Found) -> bool:
    """Whether the interval of our ratio reaches what counts; that of two seeds reaches everything."""
    ratio = found.ratio(figure)
    if ratio is None or figure.paper is None or len(ratio.of_seeds) < SEEDS_MIN:
        return False
    return ratio.low <= figure.paper * (1 + CLOSE) and ratio.high >= figure.paper * (1 - CLOSE)


def is_close_extra(extra: Extra) -> bool:
    return extra.ours is not None and abs(extra.ours / extra.paper - 1.0) <= CLOSE


def off_figures(found: Found) -> list[Figure]:
    """Figures that do not agree and for which there is a ratio of ours."""
    return [figure for figure in FIGURES if found.ratio(figure) is not None and not is_close(figure, found)]


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
    ratios = [found.ratio(figure) for figure in shown if figure.paper is not None]
    ordered = sum(ratio is not None and ratio.mean > 1.0 for ratio in ratios)
    known = sum(figure.paper is not None for figure in shown)
    yield f"The order, MuxWise before the other, is the paper's in {ordered} of {known}."
    yield ""


def _ratios(found: Found) -> Iterator[str]:
    yield "## Ratios of goodput: MuxWise over the other"
    yield ""
    yield "| row | setting | over | paper | ours | 95 % interval | seeds | ours / paper | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for figure in FIGURES:
        if (figure.setting, figure.other) not in found.goodputs:
            continue
        ratio = found.ratio(figure)
        paper = figure.note if figure.paper is None else f"{figure.paper:.2f}"
        ours = "- | - | -"
        if ratio is not None:
            seeds = len(ratio.of_seeds)
            interval = "-" if seeds == 1 else f"{ratio.low:.2f} to {ratio.high:.2f}"
            ours = f"{ratio.mean:.2f} | {interval} | {seeds}"
        relative = "-" if ratio is None or figure.paper is None else f"{ratio.mean / figure.paper:.2f}"
        open_ = " (its interval reaches 25 %)" if may_be_close(figure, found) else ""
        verdict = "agrees" if is_close(figure, found) else f"**off**{open_}"
        yield (
            f"| {figure.row} | {figure.setting.name} | {figure.other.value} | {paper} | {ours} "
            f"| {relative} | {verdict} |"
        )
    yield ""


def _extras(extras: list[Extra], ranges: Ranges) -> Iterator[str]:
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
            yield f"- {extra.name}: {NOTES.get(extra.name, 'not explained.')}{_range_of(extra, ranges)}"
    yield ""


def _range_of(extra: Extra, ranges: Ranges) -> str:
    values = ranges.get(extra.name)
    if not values:
        return ""
    low, high = min(values, key=lambda key: values[key]), max(values, key=lambda key: values[key])
    count = len({constant for constant, _ in values})
    return (
        f" Range over {count} assumed constants, times 0.7 and 1.3, at the same rates: "
        f"{values[low]:.1f} (`{low[0]}` x {low[1]:g}) to {values[high]:.1f} {extra.unit} "
        f"(`{high[0]}` x {high[1]:g})."
    )


def _goodputs(found: Found) -> Iterator[str]:
    yield "## Goodputs, requests a second"
    yield ""
    yield "| setting | system | mean | of each seed | |"
    yield "|---|---|---|---|---|"
    for (setting, system), goodput in found.goodputs.items():
        if not isinstance(goodput, Goodput):
            yield f"| {setting.name} | {system.value} | - | | {goodput} |"
            continue
        remarks = [] if goodput.exact else ["a limit of the search was met"]
        remarks += [] if goodput.monotone else ["not monotone"]
        seeds = ", ".join(f"{one.rate:.3g}" for one in goodput.seeds)
        shown = f"{goodput.rate:.3g} | {seeds} | {', '.join(remarks)}"
        yield f"| {setting.name} | {system.value} | {shown} |"
    yield ""


def _sweeps(found: Found) -> Iterator[str]:
    coarse = "## Token budgets of chunked prefill: goodput by budget, one seed, searched to 25 %"
    yield from _sweep(coarse, found.sweeps, found.best_budget)
    fine = "## Tokens of a batch of short prompts, MuxWise: goodput by bound, one seed"
    yield from _sweep(fine, found.batches, found.best_batch)


def _sweep(
    title: str, sweeps: Mapping[Setting, Mapping[int, float]], best_of: Callable[[Setting], int | None]
) -> Iterator[str]:
    if not sweeps:
        return
    sizes = sorted({size for sweep in sweeps.values() for size in sweep})
    yield title
    yield ""
    yield "| setting | " + " | ".join(map(str, sizes)) + " |"
    yield "|---|" + "---|" * len(sizes)
    for setting, sweep in sweeps.items():
        rates = {size: f"{rate:.3g}" for size, rate in sweep.items()}
        best = best_of(setting)
        cells = [f"**{rates[size]}**" if size == best else rates.get(size, "-") for size in sizes]
        yield f"| {setting.name} | " + " | ".join(cells) + " |"
    yield ""
