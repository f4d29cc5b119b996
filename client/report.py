"""The report of `muxk bench`: a table for people, JSON with the keys of `vllm bench serve` for scripts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from muxk.client.bench import BenchPlan, RunResult
from muxk.client.figures import Distribution, PhaseFigures

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = "inflight"
"""The policy that long TTFTs are compared with."""

Getter = Callable[[RunResult], float | None]


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    key: str
    label: str
    pattern: str
    get: Getter


class Spread(msgspec.Struct, frozen=True):
    """Of one figure over the runs."""

    median: float
    min: float
    max: float


def metrics(slo_ms: float) -> list[Metric]:
    """The rows, in the order of the table."""
    return [
        Metric("gap_p50_ms", "gap P50, ms", "{:.1f}", _mixed(lambda figures: figures.gaps.p50)),
        Metric("gap_p90_ms", "gap P90, ms", "{:.1f}", _mixed(lambda figures: figures.gaps.p90)),
        Metric("gap_p99_ms", "gap P99, ms", "{:.1f}", _mixed(lambda figures: figures.gaps.p99)),
        Metric("gap_max_ms", "gap max, ms", "{:.1f}", _mixed(lambda figures: figures.gaps.max)),
        Metric(
            "gaps_over_slo_share",
            f"gaps over {slo_ms:g} ms",
            "{:.2%}",
            _mixed(lambda figures: figures.gaps_over_slo_share),
        ),
        Metric("ttft_short_p50_ms", "TTFT short P50, ms", "{:.0f}", _mixed(lambda f: f.ttft_short.p50)),
        Metric("ttft_short_max_ms", "TTFT short max, ms", "{:.0f}", _mixed(lambda f: f.ttft_short.max)),
        Metric("ttft_long_p50_ms", "TTFT long P50, ms", "{:.0f}", _mixed(lambda f: f.ttft_long.p50)),
        Metric("ttft_long_max_ms", "TTFT long max, ms", "{:.0f}", _mixed(lambda f: f.ttft_long.max)),
        Metric("longs_unanswered", "longs unanswered", "{:.0f}", _mixed(lambda f: f.longs_unanswered)),
        Metric("output_tok_s", "output, tok/s", "{:.1f}", _mixed(lambda f: f.output_tokens_per_s)),
        Metric("goodput_tok_s", "strict goodput, tok/s", "{:.1f}", _mixed(lambda f: f.goodput_tokens_per_s)),
        Metric("failed", "failed requests", "{:.0f}", _mixed(lambda f: f.failed)),
        Metric("solo_step_ms", "solo: gap P50, ms", "{:.1f}", _solo(lambda f: f.gaps.p50)),
        Metric("solo_gap_p99_ms", "solo: gap P99, ms", "{:.1f}", _solo(lambda f: f.gaps.p99)),
        Metric("solo_output_tok_s", "solo: output, tok/s", "{:.1f}", _solo(lambda f: f.output_tokens_per_s)),
        Metric("p99_to_solo", "gap P99 / solo step", "{:.2f}x", _ratio("p99_gap_to_solo_step")),
        Metric("max_to_solo", "gap max / solo step", "{:.2f}x", _ratio("max_gap_to_solo_step")),
        Metric("goodput_share", "strict goodput / output", "{:.1%}", _ratio("goodput_share")),
        Metric("output_to_solo", "output / solo output", "{:.1%}", _ratio("output_to_solo")),
    ]


def _mixed(get: Callable[[PhaseFigures], float]) -> Getter:
    return lambda result: None if result.mixed is None else get(result.mixed)


def _solo(get: Callable[[PhaseFigures], float]) -> Getter:
    return lambda result: None if result.solo is None else get(result.solo)


def _ratio(name: str) -> Getter:
    return lambda result: None if result.ratios is None else float(getattr(result.ratios, name))


def spread(values: Sequence[float]) -> Spread | None:
    """Median, least and most; None without values."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values))


def summary(results: Sequence[RunResult], slo_ms: float) -> dict[str, dict[str, Spread]]:
    """Spread of every metric by policy, and of the long TTFT as a ratio to the baseline's in the same run."""
    shown: dict[str, dict[str, Spread]] = {}
    for policy in dict.fromkeys(result.policy for result in results):
        own = [result for result in results if result.policy == policy]
        rows = {metric.key: spread(_values(metric.get, own)) for metric in metrics(slo_ms)}
        rows["ttft_long_to_inflight"] = spread(_ttft_to_baseline(own, results))
        shown[policy] = {key: value for key, value in rows.items() if value is not None}
    return shown


def _values(get: Getter, results: Sequence[RunResult]) -> list[float]:
    return [value for result in results if (value := get(result)) is not None]


def _ttft_to_baseline(own: Sequence[RunResult], results: Sequence[RunResult]) -> list[float]:
    baseline = {r.run: r.mixed.ttft_long.p50 for r in results if r.policy == BASELINE and r.mixed is not None}
    return [
        result.mixed.ttft_long.p50 / baseline[result.run]
        for result in own
        if result.mixed is not None and baseline.get(result.run)
    ]


def table(results: Sequence[RunResult], slo_ms: float) -> Table:
    """Median of the runs, with the least and the most behind it."""
    from rich.table import Table

    by_policy = summary(results, slo_ms)
    runs = 1 + max(result.run for result in results)
    longs = f", long prompts of {results[0].long_in:,} tokens" if results[0].long_in else ""
    shown = Table(title=f"mixed load{longs}, {f'median of {runs} (min..max)' if runs > 1 else 'one run'}")
    shown.add_column("")
    for policy in by_policy:
        shown.add_column(policy, justify="right")
    ratio = Metric("ttft_long_to_inflight", f"TTFT long P50 / {BASELINE}'s", "{:.2f}x", lambda _result: None)
    for metric in [*metrics(slo_ms), ratio]:
        cells = [_cell(rows.get(metric.key), metric.pattern) for rows in by_policy.values()]
        if any(cell != "-" for cell in cells):
            shown.add_row(metric.label, *cells)
    return shown


def _cell(value: Spread | None, pattern: str) -> str:
    if value is None:
        return "-"
    median, least, most = (pattern.format(number) for number in (value.median, value.min, value.max))
    return median if least == most else f"{median} ({least}..{most})"


def as_json(plan: BenchPlan, results: Sequence[RunResult], command: str) -> bytes:
    """The whole report. Each phase of each run has the keys that scripts read from `vllm bench serve`."""
    report = {
        "command": command,
        "plan": plan,
        "summary": {
            str(tokens): summary([result for result in results if result.long_in == tokens], plan.slo_ms)
            for tokens in dict.fromkeys(result.long_in for result in results)
        },
        "runs": [_run_json(result) for result in results],
    }
    return msgspec.json.format(msgspec.json.encode(report))


def _run_json(result: RunResult) -> dict[str, Any]:
    phases = {figures.name: figures for figures in (result.solo, result.mixed) if figures is not None}
    return {
        "policy": result.policy,
        "long_in": result.long_in,
        "run": result.run,
        "device": result.device,
        "model": result.model,
        "load_average": result.load_average,
        "ratios": result.ratios,
        "phases": {name: _vllm_keys(figures) | result.details[name] for name, figures in phases.items()},
        "figures": phases,
        "server_state": result.server_state,
    }


def _vllm_keys(figures: PhaseFigures) -> dict[str, Any]:
    return {
        "duration": figures.seconds,
        "completed": figures.completed,
        "failed": figures.failed,
        "total_input_tokens": figures.input_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.completed / figures.seconds,
        "request_goodput": figures.completed_in_slo / figures.seconds,
        "output_throughput": figures.output_tokens_per_s,
        "output_goodput": figures.goodput_tokens_per_s,
        "total_token_throughput": (figures.input_tokens + figures.output_tokens) / figures.seconds,
        **_times("ttft", figures.ttft),
        **_times("tpot", figures.time_per_token),
        **_times("itl", figures.gaps),
        **_times("e2el", figures.end_to_end),
    }


def _times(name: str, times: Distribution) -> dict[str, float]:
    return {
        f"mean_{name}_ms": times.mean,
        f"median_{name}_ms": times.p50,
        f"std_{name}_ms": times.std,
        f"p90_{name}_ms": times.p90,
        f"p99_{name}_ms": times.p99,
        f"max_{name}_ms": times.max,
    }
