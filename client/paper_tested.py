"""What `docs/paper.md` says of explanations that were put to the test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muxk.client.paper_study import Ratio
from muxk.client.paper_trials import GAP, IDLE, SingleFound, TrialFound

HEAD = """## Explanations, put to the test

The same runs with one thing changed, in a copy of the policy or on a changed host; the seeds are 0 and 1, on
OpenThoughts 0.
"""
UNITS: Mapping[str, str] = {IDLE: " %", GAP: " ms"}


def tested_section(tried: Sequence[TrialFound], single: Sequence[SingleFound]) -> Iterator[str]:
    """Both tables."""
    if not tried and not single:
        return
    yield HEAD
    yield "| changed | setting | over | ratio | with the change |"
    yield "|---|---|---|---|---|"
    for one in tried:
        trial = one.trial
        yield (
            f"| {trial.name} | {trial.setting.name} | {trial.other.value} | {_mean(one.unchanged)} "
            f"| {'it never meets its SLO' if one.never else _mean(one.changed)} |"
        )
    yield ""
    yield "| figure | |"
    yield "|---|---|"
    for each in single:
        unit = UNITS.get(each.single.figure, " x")
        value = "-" if each.value is None else f"{each.value:.2f}{unit}"
        yield f"| {each.single.name} | {value} |"
    yield ""


def _mean(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.mean:.2f}"
