"""Goodput: the highest rate at which a system meets its objectives, by bisection.

`run(rate, seed)` says whether one run met them; it is asked for a rate at most once with each seed. The
search keeps the lowest rate that was not met and the highest that was met below it, and halves the logarithm
of their ratio until it is under the tolerance. Then it looks at a few rates further out on both sides:
systems are not always monotone (a longer queue makes larger batches). A rate below that is not met lowers the
answer and the search goes on there; a rate above that is met is reported and changes nothing: whoever buys
for that rate also serves the ones below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

import msgspec
from muxk.client.arrivals import positive
from muxk.client.traffic import WorkloadError

Run = Callable[[float, int], bool]
"""(requests a second, seed) -> whether the run met the objectives."""

CHECKS = (1.5, 1.2, 1 / 1.2, 1 / 1.5)
"""Where the search looks once more, in multiples of its answer."""

TOLERANCE_MIN = 1e-4

T_975 = (
    *(
        12.706,
        4.303,
        3.182,
        2.776,
        2.571,
        2.447,
        2.365,
        2.306,
        2.262,
        2.228,
        2.201,
        2.179,
        2.160,
        2.145,
        2.131,
    ),
    *(
        2.120,
        2.110,
        2.101,
        2.093,
        2.086,
        2.080,
        2.074,
        2.069,
        2.064,
        2.060,
        2.056,
        2.052,
        2.048,
        2.045,
        2.042,
    ),
)
"""97.5 % quantile of Student's t distribution with 1, 2, … 30 degrees of freedom."""
T_975_MANY = 2.042
"""For more: a little too wide."""


class Limit(StrEnum):
    """Whether an answer is one."""

    FOUND = "found"
    BELOW_LOWEST = "below the lowest rate"
    """Not even the lowest rate was met: the goodput counts as 0."""
    ABOVE_HIGHEST = "above the highest rate"
    """Everything up to the highest rate was met: the goodput is at least that."""
    RUNS_SPENT = "runs spent"
    """The bracket is wider than the tolerance."""


@dataclass(frozen=True)
class Search:
    """Where and how finely to search. Rates in requests a second."""

    start: float
    lowest: float
    highest: float
    tolerance: float = 0.02
    """Relative width of the last bracket."""
    runs_max: int = 40
    """With each seed."""
    checks: tuple[float, ...] = CHECKS
    """Where to look once more, in multiples of the answer."""
    step: float = 2.0
    """Factor by which it goes on while the answer has a bound on one side only."""

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("lowest", self.lowest), ("highest", self.highest)):
            positive(f"{name} rate", value, "requests a second")
        positive("tolerance", self.tolerance, "relative width of the answer")
        if self.tolerance < TOLERANCE_MIN:
            raise WorkloadError(f"a tolerance of {self.tolerance:g}; it must be {TOLERANCE_MIN:g} or more")
        if not self.lowest <= self.start <= self.highest:
            raise WorkloadError(
                f"a search from {self.start:g} between {self.lowest:g} and {self.highest:g} requests "
                "a second: the start must lie between the two"
            )
        if self.runs_max < 1:
            raise WorkloadError(f"at most {self.runs_max} runs; it must be 1 or more")
        if not (math.isfinite(self.step) and self.step > 1 + TOLERANCE_MIN):
            raise WorkloadError(f"a step of {self.step:g}; it must be a factor above {1 + TOLERANCE_MIN:g}")


class SeedGoodput(msgspec.Struct, frozen=True):
    """What the search found with one seed."""

    seed: int
    rate: float
    """The highest rate that was met with no rate below it that was not; 0 where there is none."""
    not_met: float | None
    """The lowest rate that was not met; None where all were."""
    limit: Limit
    met_above: tuple[float, ...]
    """Rates that were met above one that was not: not empty where the system is not monotone."""
    runs: tuple[tuple[float, bool], ...]
    """(rate, met) in the order of the search."""


class Goodput(msgspec.Struct, frozen=True):
    """Over all seeds. Rates in requests a second."""

    rate: float
    """The mean."""
    low: float
    high: float
    """95 % confidence interval of the mean (Student's t over the seeds); equal to `rate` with one seed."""
    exact: bool
    """No seed ended at a limit of the search."""
    monotone: bool
    seeds: tuple[SeedGoodput, ...]


def goodput(run: Run, search: Search, seeds: Sequence[int]) -> Goodput:
    """Search with each seed. The same `run` gives the same answer."""
    return combine([search_rate(run, search, seed) for seed in seeds])


def search_rate(run: Run, search: Search, seed: int) -> SeedGoodput:
    """Search with one seed."""
    met: dict[float, bool] = {}
    while (rate := _next_rate(met, search)) is not None and len(met) < search.runs_max:
        met[rate] = run(rate, seed)
    supported, not_met = bracket(met)
    above = tuple(sorted(r for r, was_met in met.items() if was_met and not_met is not None and r > not_met))
    limit = _limit(supported, not_met, search, ended=rate is None)
    return SeedGoodput(seed, supported or 0.0, not_met, limit, above, tuple(met.items()))


def bracket(met: dict[float, bool]) -> tuple[float | None, float | None]:
    """(highest rate met below the lowest one not met, that one); None where there is none."""
    not_met = min((rate for rate, was_met in met.items() if not was_met), default=None)
    below = (rate for rate, was_met in met.items() if was_met and (not_met is None or rate < not_met))
    return max(below, default=None), not_met


def combine(found: Sequence[SeedGoodput]) -> Goodput:
    """Mean and confidence interval over the seeds."""
    if not found:
        raise WorkloadError("a goodput needs one seed at least")
    rates = [one.rate for one in found]
    spread, mean = confidence(rates), fmean(rates)
    return Goodput(
        rate=mean,
        low=max(0.0, mean - spread),
        high=mean + spread,
        exact=all(one.limit is Limit.FOUND for one in found),
        monotone=not any(one.met_above for one in found),
        seeds=tuple(found),
    )


def confidence(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean, by Student's t; 0 for one value."""
    freedom = len(values) - 1
    if not freedom:
        return 0.0
    quantile = T_975[freedom - 1] if freedom <= len(T_975) else T_975_MANY
    return quantile * stdev(values) / math.sqrt(len(values))


def runs_left(met: dict[float, bool], search: Search) -> int:
    """About how many runs a search still makes, as long as what it finds is monotone."""
    supported, not_met = bracket(met)
    if supported is None or not_met is None:
        checks = len(search.checks)
        outside = 1 if met else 2
        ratio = search.step
    else:
        checks = sum(not _is_near(met, rate, factor) for rate, factor in _checks(supported, not_met, search))
        outside = 0
        ratio = not_met / supported
    halvings = math.ceil(math.log2(max(1.0, math.log(ratio) / math.log1p(search.tolerance))))
    return max(1, outside + halvings + checks)


def _next_rate(met: dict[float, bool], search: Search) -> float | None:
    """The rate to try next; None when the search is over."""
    supported, not_met = bracket(met)
    if not met:
        return search.start
    if not_met is None:
        assert supported is not None
        return min(search.step * supported, search.highest) if supported < search.highest else None
    if supported is None:
        return max(not_met / search.step, search.lowest) if not_met > search.lowest else None
    if not_met / supported > 1 + search.tolerance:
        return math.sqrt(not_met * supported)
    return _next_check(met, supported, not_met, search)


def _next_check(met: dict[float, bool], supported: float, not_met: float, search: Search) -> float | None:
    """A rate further out that has nothing near it yet."""
    for rate, factor in _checks(supported, not_met, search):
        if search.lowest <= rate <= search.highest and not _is_near(met, rate, factor):
            return rate
    return None


def _checks(supported: float, not_met: float, search: Search) -> Iterator[tuple[float, float]]:
    """Rates further out, and by how much they are."""
    for factor in search.checks:
        yield (not_met if factor > 1 else supported) * factor, factor


def _is_near(met: dict[float, bool], rate: float, factor: float) -> bool:
    return any(abs(math.log(tried / rate)) < abs(math.log(factor)) / 8 for tried in met)


def _limit(supported: float | None, not_met: float | None, search: Search, *, ended: bool) -> Limit:
    if not ended and (supported is None or not_met is None or not_met / supported > 1 + search.tolerance):
        return Limit.RUNS_SPENT
    if supported is None:
        return Limit.BELOW_LOWEST
    return Limit.ABOVE_HIGHEST if not_met is None else Limit.FOUND
