"""What a contender carries of what the first does, seed by seed.

A seed fixes requests and their times for all contenders, and what a run carries depends on those more than on
who serves them: intervals of two goodputs overlap although one is ahead with every seed. The mean of the
seeds' ratios, with its interval, tells such two apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from muxk.client.cells import Goal
from muxk.client.compare import Entry
from muxk.client.goodput import Goodput, Limit, confidence
from muxk.policies.problems import visible


@dataclass(frozen=True)
class Ratio:
    """Of two goodputs: the mean over the seeds, with the 95 % interval of Student's t."""

    mean: float
    low: float
    high: float

    @property
    def tells_apart(self) -> bool:
        """Whether its interval is on one side of 1."""
        return self.high < 1 or self.low > 1


def paired_ratio(found: object, first: object) -> Ratio | None:
    """None where one of them is no goodput, with one seed, and where a search ended at a limit: that seed's
    ratio is a bound."""
    if not (isinstance(found, Goodput) and isinstance(first, Goodput)) or len(found.seeds) < 2:
        return None
    pairs = list(zip(found.seeds, first.seeds, strict=True))
    if any(one.limit is not Limit.FOUND for pair in pairs for one in pair):
        return None
    ratios = [one.rate / other.rate for one, other in pairs]
    mean, spread = fmean(ratios), confidence(ratios)
    return Ratio(mean, max(0.0, mean - spread), mean + spread)


def in_words(entries: Sequence[Entry], goal: Goal) -> Iterator[str]:
    """A line for the contenders of one workload, the first of which the others are compared with."""
    if not entries:
        return
    first, others = entries[0], entries[1:]
    ratios = [(one, paired_ratio(one.goodputs.get(goal), first.goodputs.get(goal))) for one in others]
    told = [f"{visible(one.contender.label)} {_shown(ratio)}" for one, ratio in ratios if ratio is not None]
    if told:
        yield (
            f"{visible(first.workload)}, {goal.value}, as a share of what {visible(first.contender.label)} "
            f"carries with the same seed, on the same requests: {'; '.join(told)}."
        )


def _shown(ratio: Ratio) -> str:
    apart = "" if ratio.tells_apart else ", not told apart"
    return f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f}){apart}"
