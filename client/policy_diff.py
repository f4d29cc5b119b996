"""What a change of a policy changes: the decisions on the way, and what comes of the run.

The old policy serves, and the new one is asked the same questions beside it (`kernel/shadow.py`): that is
where the two part. Then the new one serves the same requests by itself, for after the first different
decision the questions are others.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muxk.client.cells import Cell, plan_of
from muxk.client.sim_report import Asked, as_dict
from muxk.client.sim_run import Progress, Run, SimPlan, simulate
from muxk.kernel.journal import Record
from muxk.kernel.policy import Policy
from muxk.kernel.shadow import ShadowTally
from muxk.policies.explain import Known, explain
from muxk.policies.explanation import Explanation

NAMED_MAX = 1 << 20
"""Requests whose names are kept for explanations."""
NOT_COMPARED = ("policy", "policy_sha", "settings", "wall", "policy_answers")
"""What differs between two policies that do the same."""


@dataclass
class FirstDifferences:
    """The first decisions in which the two differ; a `kernel.journal.Sink`."""

    count: int
    records: list[Record] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """A run of equal decisions comes when it has ended, so later than others that began after it."""
        if record.shadow is None:
            return
        insort(self.records, record, key=lambda one: one.at_ns)
        del self.records[self.count :]

    def name_request(self, first_id: int, choices: int, name: str) -> None:
        if len(self.names) < NAMED_MAX:
            self.names[first_id] = name

    def describe(self) -> dict[str, Any]:
        return {"differences": len(self.records)}


@dataclass(frozen=True)
class PointCount:
    """How often a decision point was asked of both, and how often they said something else."""

    point: str
    asked: int
    differed: int


@dataclass(frozen=True)
class PolicyDiff:
    """What changed."""

    old: Policy
    new: Policy
    points: tuple[PointCount, ...]
    first: tuple[Explanation, ...]
    """The first decisions that differ, the new policy's as their `shadow`."""
    errors: Mapping[str, int]
    """What the new policy raised beside the old one."""
    before: Mapping[str, Any]
    """As the JSON of `muxk sim`."""
    after: Mapping[str, Any]

    @property
    def differed(self) -> int:
        return sum(point.differed for point in self.points)

    @property
    def changed(self) -> bool:
        """Any decision, or any figure of the runs."""
        kept = [name for name in self.before if name not in NOT_COMPARED]
        return bool(
            self.differed or self.errors or any(self.before[name] != self.after.get(name) for name in kept)
        )


def policy_diff(
    old: Cell, new: Cell, count: int, progress: Callable[[str], Progress] = lambda label: _silent
) -> PolicyDiff:
    """Run both cells, which ask for the same requests.

    Args:
        count: of the first differences, how many are explained.
        progress: by a label of the run, whom to tell how far it is.

    Raises what `plan_of` and `simulate` raise.
    """
    plan, plan_after = plan_of(old), plan_of(new)
    found = FirstDifferences(count)
    tally = ShadowTally(plan_after.opened.policy, plan_after.opened.text)
    shadowed = replace(plan, shadow=tally, sink=found)
    before = simulate(shadowed, progress("before"))
    after = simulate(plan_after, progress("after"))
    policies = [plan.opened.policy, plan_after.opened.policy]
    known = Known({one.sha: one for one in policies}.get, found.names, _zero_ns(before))
    return PolicyDiff(
        old=plan.opened.policy,
        new=plan_after.opened.policy,
        points=tuple(
            PointCount(point, asked, tally.differed[point]) for point, asked in sorted(tally.asked.items())
        ),
        first=tuple(explain(record, known) for record in found.records),
        errors=dict(tally.errors),
        before=_figures(plan, old, before),
        after=_figures(plan_after, new, after),
    )


def _zero_ns(run: Run) -> int:
    """When the first request could come, on the clock of the decisions."""
    return run.calibration_ns


def _figures(plan: SimPlan, cell: Cell, run: Run) -> dict[str, Any]:
    made = as_dict(plan, Asked(cell.workload, cell.rate), run)
    del made["wall"]
    return made


def _silent(share: float | None, now_s: float, ended: int) -> None:
    pass


def matched(explanation: Explanation, points: Sequence[str]) -> list[str]:
    """Of the given points: the rule that answered, where it stands, its answer and the values that it saw."""
    lines = []
    for point in explanation.points:
        if point.point not in points and len(explanation.points) > 1:
            continue
        rule = next((rule for rule in point.rules if rule.outcome == "matched"), None)
        if rule is None:
            continue
        place = f" [{rule.place}]" if rule.place else ""
        values = ", ".join(f"{value.name} = {value.value}" for value in rule.values)
        lines.append(f"{rule.rule}{place}: {point.answer}" + (f"; {values}" if values else ""))
    ranked = [
        f"{one.place}. {one.request} ({', '.join(f'{key.name} = {key.value}' for key in one.keys)})"
        for one in explanation.sorted[:3]
    ]
    if ranked:
        lines.append(", ".join(ranked))
    return lines or [explanation.answer + (f" ({explanation.note})" if explanation.note else "")]
