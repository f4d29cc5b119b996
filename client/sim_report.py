"""What `muxk sim` says of a run: a summary for people, and JSON with the keys of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from muxk.client.class_measures import judge
from muxk.client.measures import Judgement, Measures
from muxk.client.sim_run import Run, S, SimPlan
from muxk.kernel.idle import Cause, IdleReport
from muxk.kernel.idle_summary import bubble_sizes, idle_summary
from muxk.policies.problems import visible

if TYPE_CHECKING:
    from rich.table import Table

MS = 1_000_000
SPLITS_SHOWN = 4
ERRORS_SHOWN = 3
ERROR_CHARS = 160
QUEUE_REQUESTS_MIN = 40
"""With fewer, one or two that wait decide whether a queue counts as stable."""
VERSION = 2
"""Of the JSON's form."""


@dataclass(frozen=True)
class Asked:
    """What the command line said, for the JSON."""

    workload: str
    rate: float | None
    """Requests a second; None as recorded."""


def as_dict(plan: SimPlan, asked: Asked, run: Run) -> dict[str, Any]:
    """All under `wall` depends on the machine that simulated; the rest only on what was asked for."""
    totals = run.measures.totals
    return {
        "version": VERSION,
        "backend": "muxk-sim",
        "model_id": plan.gpu.shape.name,
        "device": plan.gpu.backend.name,
        "policy": plan.opened.policy.name,
        "policy_sha": plan.opened.policy.sha,
        "settings": dict(plan.opened.text.settings),
        "workload": asked.workload,
        "seed": plan.seed,
        "request_rate": asked.rate,
        "num_prompts": totals.requests,
        **run.measures.figures(),
        "slo": vars(run.measures.objectives),
        "verdicts": msgspec.to_builtins(judge(run.measures, run.classes)),
        "classes": {name: _class(measures) for name, measures in run.classes.items()},
        "turns": plan.turns.value,
        "refused": run.refused,
        "first_refusal": run.reason,
        "kv_tokens": plan.gpu.kv_tokens,
        "kv_hit_rate": run.hit_rate,
        "split_residency_ms": run.residency_ms,
        "idle": None if run.idle is None else idle_summary(run.idle),
        "idle_bubbles": None if run.idle is None else bubble_sizes(run.idle),
        "migrations": run.counts.get("migrations", 0),
        "migrated_pages": run.counts.get("migrated pages", 0),
        "fetches": run.counts.get("fetches", 0),
        "fetched_pages": run.counts.get("fetched pages", 0),
        "preemptions": run.counts["preemptions"],
        "recomputes": run.recomputes,
        "split_changes": run.counts["split changes"],
        "decode_steps": run.counts["decode steps"],
        "policy_answers": run.answers,
        "policy_errors": run.rule_errors,
        "calibration_seconds": run.calibration_ns / S,
        "simulated_seconds": run.duration_ns / S,
        "wall": wall(run),
    }


def _class(measures: Measures) -> dict[str, Any]:
    """What one class of requests got, and whether that met the SLOs of the class."""
    return {
        "num_prompts": measures.totals.requests,
        **measures.figures(),
        "slo": {"tbt_ms": measures.objectives.tbt_ms},
        "verdicts": msgspec.to_builtins(measures.judge()),
    }


def wall(run: Run) -> dict[str, float]:
    """What took how long by the clock on the wall."""
    seconds = run.wall.seconds
    return {
        "seconds": seconds,
        "times_real_time": (run.duration_ns + run.calibration_ns) / S / seconds if seconds else 0.0,
        "scheduler_seconds": run.wall.scheduler_seconds,
        "scheduler_us_per_answer": run.wall.scheduler_seconds / run.answers * 1e6 if run.answers else 0.0,
        "scheduler_slowest_us": run.wall.scheduler_slowest_seconds * 1e6,
    }


def table(plan: SimPlan, asked: Asked, run: Run) -> Table:
    """For the terminal."""
    from rich.table import Table

    rate = "as recorded" if asked.rate is None else f"{asked.rate:g} requests/s"
    title = f"{plan.opened.policy.name} on {plan.gpu.backend.name}, {plan.gpu.shape.name}"
    made = Table(title=f"{title}: {asked.workload}, {rate}", title_justify="left", show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column()
    for name, value in rows(plan, run):
        made.add_row(name, value)
    return made


def rows(plan: SimPlan, run: Run) -> Iterator[tuple[str, str]]:
    """Names and values of the summary."""
    totals, figures = run.measures.totals, run.measures.figures()
    failed = totals.requests - totals.completed
    yield "requests", f"{totals.completed:,} of {totals.requests:,} completed" + _why(run, failed)
    yield "TTFT", _quantiles(figures, "ttft")
    yield "TBT (all gaps pooled)", _quantiles(figures, "itl")
    yield "TPOT (not judged by)", f"P50 {_ms(figures['median_tpot_ms'])}, P99 {_ms(figures['p99_tpot_ms'])}"
    yield (
        "throughput",
        f"{figures['request_throughput']:.2f} requests/s, {figures['output_throughput']:,.0f} tokens/s out, "
        f"{figures['total_token_throughput']:,.0f} tokens/s in and out",
    )
    yield from _verdicts(run)
    pool = "the pool holds" if plan.gpu.cluster is None else "each device's pool holds"
    yield "KV", f"{run.hit_rate:.1%} of prompt tokens reused; {pool} {plan.gpu.kv_tokens:,} tokens"
    if plan.gpu.cluster is not None:
        yield "KV between devices", _moves(run)
    yield "split (decode+prefill)", _residency(run)
    if run.idle is not None:
        yield "idle units", idle_line(run.idle)
    yield (
        "scheduling",
        f"{run.counts['split changes']:,} split changes, {run.counts['preemptions']:,} preemptions, "
        f"{run.recomputes:,} recomputes",
    )
    clock = wall(run)
    yield (
        "scheduler",
        f"{run.answers:,} answers in {clock['scheduler_seconds']:.2f} s of wall time: "
        f"{clock['scheduler_us_per_answer']:.0f} us each, at most "
        f"{_ms(clock['scheduler_slowest_us'] / 1000)}",
    )
    yield (
        "simulated",
        f"{run.duration_ns / S:,.1f} s in {clock['seconds']:,.1f} s: "
        f"{clock['times_real_time']:.1f} times real time",
    )
    if run.rule_errors:
        yield "policy errors", visible(errors_in_words(run.rule_errors))
    if run.record_ended:
        yield "note", f"the record of decisions ends early: {run.record_ended}"
    if totals.requests < QUEUE_REQUESTS_MIN:
        yield "note", f"{totals.requests} requests say little of a queue: one or two that wait decide"
    if run.longest_tokens > plan.gpu.shape.context_max:
        yield (
            "note",
            f"contexts of up to {run.longest_tokens:,} tokens; the model was trained for "
            f"{plan.gpu.shape.context_max:,}: taken as with scaled positions",
        )


def errors_in_words(errors: Mapping[str, int]) -> str:
    """How often a policy could not answer, and the most frequent reasons."""
    most = sorted(errors.items(), key=lambda entry: (-entry[1], entry[0]))[:ERRORS_SHOWN]
    shown = "; ".join(f"{' '.join(text.split())[:ERROR_CHARS]} ({count:,})" for text, count in most)
    more = f"; and {len(errors) - len(most)} others" if len(errors) > len(most) else ""
    return f"{sum(errors.values()):,} times a rule failed and others answered in its place: {shown}{more}"


def _moves(run: Run) -> str:
    """What went over the links."""
    counts = run.counts
    moved = f"{counts['migrations']:,} requests moved with {counts['migrated pages']:,} pages"
    return f"{moved}; {counts['fetches']:,} prefixes of {counts['fetched pages']:,} pages fetched"


def _why(run: Run, failed: int) -> str:
    if not failed:
        return ""
    counts = ", ".join(f"{count:,} {code}" for code, count in sorted(run.refused.items()))
    return f"; {counts} (the first: {run.reason})"


def _quantiles(figures: dict[str, float], name: str) -> str:
    parts = (("P50", "median"), ("P99", "p99"), ("max", "max"))
    return ", ".join(f"{label} {_ms(figures[f'{key}_{name}_ms'])}" for label, key in parts)


def _ms(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def _verdicts(run: Run) -> Iterator[tuple[str, str]]:
    judged, slo = judge(run.measures, run.classes), run.measures.objectives
    if run.classes:
        yield from _by_class(run, judged)
        return
    queue = "stable" if judged.stable else "grows"
    yield (
        "strict goodput",
        f"{_met(judged.strict)}: {judged.gaps_over_share:.2%} of gaps over {slo.tbt_ms:g} ms (1 % may be), "
        f"{_waiting(judged)} when no more come (5 % may): the queue {_is(queue)}",
    )
    ttft = f"{slo.ttft_ms_per_prompt_token:g} ms/token"
    if slo.ttft_ms >= 0.01:
        ttft = f"{slo.ttft_ms:g} ms + {ttft}"
    yield (
        "joint goodput",
        f"{_met(judged.joint)}: {judged.good_share:.1%} of requests (90 % needed) with TTFT within {ttft} "
        f"and TPOT within {slo.tbt_ms:g} ms",
    )


def _by_class(run: Run, judged: Judgement) -> Iterator[tuple[str, str]]:
    queue = "is stable" if judged.stable else "grows"
    yield "strict goodput", f"{_met(judged.strict)}: of each class by its own TBT SLO; the queue {queue}"
    yield (
        "joint goodput",
        f"{_met(judged.joint)}: {judged.good_share:.1%} of requests met those of their class",
    )
    for name, measures in run.classes.items():
        own, figures = measures.judge(), measures.figures()
        yield (
            f"class {visible(name)}",
            f"{measures.totals.requests:,} requests, TTFT P99 {_ms(figures['p99_ttft_ms'])}, "
            f"TBT P99 {_ms(figures['p99_itl_ms'])} (SLO {measures.objectives.tbt_ms:g} ms), "
            f"{own.gaps_over_share:.2%} of gaps over it, {own.good_share:.1%} of requests in TTFT and TPOT",
        )


def _waiting(judged: Judgement) -> str:
    """By requests or by their tokens, whichever is the larger share."""
    if judged.waiting_tokens_share > judged.waiting_share:
        return f"{judged.waiting_tokens_share:.1%} of prompt tokens wait"
    return f"{judged.waiting_share:.1%} of requests wait"


def _is(queue: str) -> str:
    return "is stable" if queue == "stable" else queue


def _met(met: bool) -> str:
    return "met" if met else "not met"


def _residency(run: Run) -> str:
    total = sum(run.residency_ms.values())
    if not total:
        return "-"
    longest = sorted(run.residency_ms.items(), key=lambda entry: -entry[1])
    shown = [f"{split} {ms / total:.0%}" for split, ms in longest[:SPLITS_SHOWN] if ms]
    rest = sum(ms for _, ms in longest[SPLITS_SHOWN:])
    return ", ".join(shown) + (f", others {rest / total:.0%}" if rest else "")


def idle_line(idle: IdleReport) -> str:
    """The share of the unit time with work that had no kernel, its causes, and `no work` apart."""
    causes = sorted((cause for cause in Cause if cause is not Cause.NO_WORK), key=idle.share, reverse=True)
    shown = [
        f"{cause.value} {idle.share(cause):.2%} ({idle.idle[cause].count:,})"
        for cause in causes
        if idle.idle[cause].total_unit_ns
    ]
    apart = f"no work {idle.share(Cause.NO_WORK):.1%} of all"
    return f"{idle.idle_share:.2%} while there was work: {', '.join(shown) or 'none'}; {apart}"
