"""A difference between two policies as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from muxk.client.compare_report import ms
from muxk.client.explain_view import table
from muxk.client.policy_diff import PolicyDiff, matched
from muxk.client.run_notes import RunNotes
from muxk.policies.explanation import Explanation

TIMES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "max_itl_ms", "p99_tpot_ms")
NUMBERS = (
    *("completed", "failed", "request_throughput", "output_throughput", "request_goodput"),
    *("stalls", "preemptions", "recomputes", "split_changes", "decode_steps"),
)
SHARES = ("kv_hit_rate",)
VERDICTS = ("strict", "joint", "stable")


def point_counts(found: PolicyDiff) -> Iterator[str]:
    """A line for each decision point that was asked of both."""
    rows = [("  point", "asked", "differ", "")]
    for one in found.points:
        share = f"{100 * one.differed / one.asked:.1f} %" if one.asked else ""
        rows.append((f"  {one.point}", f"{one.asked:,}", f"{one.differed:,}", share))
    yield from table(rows)


def difference(explanation: Explanation) -> Iterator[str]:
    """When, where, and what each of the two made of the same question."""
    when = f"{explanation.at_ns / 1e9:.6f}s"
    if explanation.count > 1:
        when = f"{when} to {explanation.last_at_ns / 1e9:.6f}s, {explanation.count} times"
    actor = f" of {explanation.actor}" if explanation.actor else ""
    yield f"{when}  {explanation.question}{actor}: {', '.join(explanation.differs)}"
    for label, side in (("OLD", explanation), ("NEW", explanation.shadow)):
        if side is not None:
            for number, line in enumerate(matched(side, explanation.differs)):
                yield f"  {label if not number else '   '}  {line}"
            yield from (f"       rule error: {error}" for error in side.errors)


def figures(found: PolicyDiff) -> Iterator[str]:
    """Those of the run before and after, and by how much they changed."""
    before, after = found.before, found.after
    rows = [("  ", "OLD", "NEW", "")]
    for name in TIMES:
        if name in before:
            rows.append((f"  {name}", ms(before[name]), ms(after[name]), _change(before[name], after[name])))
    for name in NUMBERS:
        if name in before:
            rows.append(
                (f"  {name}", _number(before[name]), _number(after[name]), _change(before[name], after[name]))
            )
    for name in SHARES:
        rows.append((f"  {name}", f"{before[name]:.1%}", f"{after[name]:.1%}", ""))
    for name in VERDICTS:
        was, is_now = before["verdicts"][name], after["verdicts"][name]
        rows.append((f"  {name}", _yes(was), _yes(is_now), "" if was == is_now else "changed"))
    yield from table(rows)


def judged_by(found: PolicyDiff) -> Iterator[str]:
    """Whose SLOs the verdicts are of, and rules that failed in the runs."""
    slos = [one["slo"]["tbt_ms"] for one in (found.before, found.after)]
    classed = [bool(one["classes"]) for one in (found.before, found.after)]
    if not any(classed) and slos[0] != slos[1]:
        yield (
            f"strict and joint judge OLD by its own TBT SLO of {slos[0]:g} ms and NEW by its {slos[1]:g} ms; "
            "--tbt judges both by one"
        )
    notes = RunNotes()
    for label, figures_of in (("OLD", found.before), ("NEW", found.after)):
        notes.add(label, figures_of)
    yield from notes.lines()


def _change(old: float, new: float) -> str:
    if old == new:
        return ""
    return f"{(new - old) / old:+.1%}" if old else "new"


def _number(value: float) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _yes(met: bool) -> str:
    return "yes" if met else "no"
