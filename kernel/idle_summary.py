"""The account of a device's time, as people and scripts are told it."""

from __future__ import annotations

from typing import Any

from muxk.kernel.idle import Cause, IdleReport


def idle_summary(report: IdleReport) -> dict[str, Any]:
    """For `muxk state` and JSON: shares of the unit time with work; unit-seconds, bubbles, their length."""
    return {
        "unit_seconds": report.total_unit_ns / 1e9,
        "busy_unit_seconds": {kind.value: unit_ns / 1e9 for kind, unit_ns in report.busy.items() if unit_ns},
        "running_now_unit_seconds": report.open_unit_ns / 1e9,
        "idle_share": report.idle_share,
        "no_work_share": report.share(Cause.NO_WORK),
        "causes": {
            cause.value: _of_cause(report, cause)
            for cause in Cause
            if report.idle[cause].total_unit_ns or cause is Cause.UNEXPLAINED
        },
    }


def _of_cause(report: IdleReport, cause: Cause) -> dict[str, Any]:
    bubbles = report.idle[cause]
    return {
        "share": report.share(cause),
        "unit_seconds": bubbles.total_unit_ns / 1e9,
        "bubbles": bubbles.count,
        "median_us": bubbles.quantile_ns(0.5) / 1e3,
        "p99_us": bubbles.quantile_ns(0.99) / 1e3,
        "below_1ms_unit_seconds": bubbles.unit_ns_below(1 << 20) / 1e9,
    }


def bubble_sizes(report: IdleReport) -> dict[str, list[dict[str, float]]]:
    """By cause: bubbles shorter than `below_us` and at least half as long."""
    return {
        cause.value: [
            {"below_us": (1 << bucket) / 1e3, "bubbles": count, "unit_seconds": bubbles.unit_ns[bucket] / 1e9}
            for bucket, count in enumerate(bubbles.counts)
            if count
        ]
        for cause, bubbles in report.idle.items()
        if bubbles.count
    }
