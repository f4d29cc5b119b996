"""What `muxk tune` says."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from muxk.client.compare_report import few_requests
from muxk.client.tune import Score, Tuning, rounds
from muxk.client.tune_by import By
from muxk.policies.problems import visible

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
REASON_MAX = 160


def options_of(score: Score) -> str:
    """`--set budget=512`, for a shell."""
    return " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in score.settings)


def table(tuning: Tuning, scores: Sequence[Score]) -> Table:
    """Best first."""
    from rich.table import Table

    cell = tuning.cell
    where = f"{visible(cell.workload)} on {cell.device}, {visible(cell.model)}"
    made = Table(title=f"{visible(cell.policy)}: {where}", title_justify="left")
    names = [name for name, _ in scores[0].settings]
    goal = f"{tuning.by.value} goodput" if tuning.by.is_goodput else f"{tuning.by.value} at {tuning.rate:g}/s"
    for column in (*map(visible, names), f"{goal}, {tuning.by.unit}", "95 %", "runs of"):
        made.add_column(column, overflow="fold")
    for score in scores:
        made.add_row(
            *(visible(value) for _, value in score.settings),
            *_value(score, tuning.by, len(tuning.seeds)),
            str(score.requests),
        )
    return made


def _value(score: Score, by: By, seeds: int) -> tuple[str, str]:
    if score.error:
        reason = " ".join(visible(score.error).split())
        return f"failed: {reason[:REASON_MAX]}", ""
    if not score.is_found(by):
        return "never met", ""
    grows = "" if score.keeps_up else ", the queue grows"
    interval = f"{score.low:.4g}-{score.high:.4g}" if seeds > 1 else "one seed"
    return f"{score.value:.4g}", f"{interval}{grows}"


def notes(tuning: Tuning, scores: Sequence[Score]) -> Iterator[str]:
    """The best, and how far it can be told from the next."""
    best = scores[0]
    if best.error:
        yield "no candidate could be run"
        return
    yield from few_requests(best.requests)
    if not best.is_found(tuning.by):
        yield "no candidate met the objectives at any rate: there is no best one"
        return
    yield f"best: {options_of(best)}"
    if len(tuning.seeds) == 1 and len(scores) > 1:
        yield "one seed: how far that is chance is not known; more --seeds tell"
    near = [one for one in scores[1:] if not one.error and one.requests == best.requests and _near(best, one)]
    if near:
        listed = "; ".join(options_of(one) for one in near[:4])
        yield f"its interval overlaps with that of {listed}: more --seeds or --requests tell them apart"
    ends = [name for place, (name, value) in enumerate(best.settings) if _at_end(tuning, place, value)]
    if ends:
        yield f"{', '.join(ends)} is best at an end of what was tried: there may be better beyond"
    if tuning.halving:
        planned = ", ".join(f"{one.candidates} in runs of {one.requests}" for one in rounds(tuning))
        yield f"successive halving: {planned}"


def _near(best: Score, other: Score) -> bool:
    return other.low <= best.high and best.low <= other.high


def _at_end(tuning: Tuning, place: int, value: str) -> bool:
    values = list(dict.fromkeys(settings[place][1] for settings in tuning.candidates))
    return len(values) > 2 and value in (values[0], values[-1])


def as_json(tuning: Tuning, scores: Sequence[Score]) -> bytes:
    """Best first; the same whatever machine ran it."""
    made: dict[str, Any] = {
        "version": VERSION,
        "cell": msgspec.to_builtins(tuning.cell),
        "by": tuning.by.value,
        "unit": tuning.by.unit,
        "rate": tuning.rate,
        "seeds": list(tuning.seeds),
        "candidates": [
            {
                "settings": dict(score.settings),
                "value": score.value,
                "low": score.low,
                "high": score.high,
                "requests": score.requests,
                "keeps_up": score.keeps_up,
                "error": score.error,
            }
            for score in scores
        ],
    }
    return msgspec.json.format(msgspec.json.encode(made)) + b"\n"
