"""Figures of a phase, as pure functions over records. Definitions:

- A gap is the time between two consecutive token events of one request; it belongs to the phase in which the
  later one falls, so that a stall at the border is not lost. Gaps of all requests are pooled.
- TTFT is from submission to the first token, of requests that were submitted and answered in the phase.
- Output counts tokens that arrived in the phase, whether their request ended in it or was cut.
- Strict goodput counts the output of those requests only whose gaps in the phase all met the SLO.
- Percentiles interpolate linearly between the two nearest ranks, as numpy does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
from muxk.client.records import LONG, SHORT, Phase, Record


class Distribution(msgspec.Struct, frozen=True):
    """Of times in ms; all 0 when there was none."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float


class PhaseFigures(msgspec.Struct, frozen=True):
    """What one phase showed."""

    name: str
    seconds: float
    gaps: Distribution
    gaps_over_slo: int
    gaps_over_slo_share: float
    ttft_short: Distribution
    ttft_long: Distribution
    ttft: Distribution
    end_to_end: Distribution
    time_per_token: Distribution
    """Of each request that ended: its mean gap. Hides stalls; for scripts that expect it."""
    longs_sent: int
    longs_unanswered: int
    """Sent in the phase, no token in it."""
    completed: int
    completed_in_slo: int
    """Completed, and every gap met the SLO."""
    failed: int
    input_tokens: int
    """Prompts whose first token came in the phase."""
    output_tokens: int
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    goodput_share: float
    """Of the output; 0 without any."""


def distribution(times_ms: Sequence[float]) -> Distribution:
    """Mean, spread and percentiles of times in ms."""
    if not times_ms:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    values = np.asarray(times_ms, dtype=np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Distribution(
        len(values), float(values.mean()), float(values.std()), p50, p90, p99, float(values.max())
    )


def gaps_ms(record: Record, phase: Phase) -> list[float]:
    """Gaps of one request in a phase, in ms: n token events make n - 1 gaps, each where it ends."""
    return [
        (later - earlier) / 1e6
        for earlier, later in itertools.pairwise(record.arrivals_ns)
        if phase.holds(later)
    ]


def tokens_in(record: Record, phase: Phase) -> int:
    """Tokens of one request that arrived in a phase."""
    pairs = zip(record.arrivals_ns, record.arrival_tokens, strict=True)
    return sum(tokens for at_ns, tokens in pairs if phase.holds(at_ns))


def ttft_ms(records: Sequence[Record], phase: Phase) -> list[float]:
    """Times to first token of requests that were submitted and answered in a phase."""
    return [
        (record.arrivals_ns[0] - record.submitted_ns) / 1e6
        for record in records
        if record.arrivals_ns and phase.holds(record.submitted_ns) and phase.holds(record.arrivals_ns[0])
    ]


def strict_goodput_tokens(records: Sequence[Record], phase: Phase, slo_ms: float) -> int:
    """Tokens of the requests all of whose gaps in the phase are at most the SLO."""
    return sum(
        tokens_in(record, phase) for record in records if all(gap <= slo_ms for gap in gaps_ms(record, phase))
    )


def ended_in(records: Sequence[Record], phase: Phase) -> list[Record]:
    """Requests that ended well in the phase."""
    return [record for record in records if not record.error and phase.holds(record.ended_ns)]


def time_per_token_ms(record: Record) -> float:
    """Time from the first to the last token, divided by the tokens after the first; 0 for a single token."""
    later = sum(record.arrival_tokens) - record.arrival_tokens[0] if record.arrival_tokens else 0
    return (record.arrivals_ns[-1] - record.arrivals_ns[0]) / 1e6 / later if later else 0.0


def phase_figures(records: Sequence[Record], phase: Phase, slo_ms: float) -> PhaseFigures:
    """All figures of a phase. `slo_ms` bounds a gap."""
    gaps = [gap for record in records for gap in gaps_ms(record, phase)]
    over = sum(gap > slo_ms for gap in gaps)
    shorts = [record for record in records if record.kind == SHORT]
    longs = [record for record in records if record.kind == LONG]
    ended = ended_in(records, phase)
    output = sum(tokens_in(record, phase) for record in records)
    goodput = strict_goodput_tokens(records, phase, slo_ms)
    sent = sum(phase.holds(record.submitted_ns) for record in longs)
    first = [record for record in records if record.arrivals_ns and phase.holds(record.arrivals_ns[0])]
    return PhaseFigures(
        name=phase.name,
        seconds=phase.seconds,
        gaps=distribution(gaps),
        gaps_over_slo=over,
        gaps_over_slo_share=over / len(gaps) if gaps else 0.0,
        ttft_short=distribution(ttft_ms(shorts, phase)),
        ttft_long=distribution(ttft_ms(longs, phase)),
        ttft=distribution(ttft_ms(records, phase)),
        end_to_end=distribution([(record.ended_ns - record.submitted_ns) / 1e6 for record in ended]),
        time_per_token=distribution([time_per_token_ms(record) for record in ended]),
        longs_sent=sent,
        longs_unanswered=sent - len(ttft_ms(longs, phase)),
        completed=len(ended),
        completed_in_slo=sum(all(gap <= slo_ms for gap in gaps_ms(record, phase)) for record in ended),
        failed=sum(bool(record.error) for record in records),
        input_tokens=sum(record.prompt_tokens for record in first),
        output_tokens=output,
        output_tokens_per_s=output / phase.seconds,
        goodput_tokens_per_s=goodput / phase.seconds,
        goodput_share=goodput / output if output else 0.0,
    )


class RunRatios(msgspec.Struct, frozen=True):
    """The mixed phase beside the solo phase of the same run."""

    p99_gap_to_solo_step: float
    """P99 gap over the median gap of the solo phase, which is one decode step of all streams."""
    max_gap_to_solo_step: float
    goodput_share: float
    output_to_solo: float


def run_ratios(solo: PhaseFigures, mixed: PhaseFigures) -> RunRatios:
    """Ratios within one run; 0 where the solo phase showed nothing."""
    step_ms, rate = solo.gaps.p50, solo.output_tokens_per_s
    return RunRatios(
        p99_gap_to_solo_step=mixed.gaps.p99 / step_ms if step_ms else 0.0,
        max_gap_to_solo_step=mixed.gaps.max / step_ms if step_ms else 0.0,
        goodput_share=mixed.goodput_share,
        output_to_solo=mixed.output_tokens_per_s / rate if rate else 0.0,
    )
