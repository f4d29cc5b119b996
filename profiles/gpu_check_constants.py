"""What the measurements say about the constants that a card's profile assumes: a file to read and merge by
hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Report = Mapping[str, Any]
SATURATED = 0.95
"""Of the bandwidth of the whole device: the SMs that draw so much saturate it."""


def suggested(reports: Mapping[int, Report]) -> str | None:
    """YAML in the form of `profiles/gpus/*.yaml`, only of groups that were measured; None where none was."""
    groups = {
        "partition": _partition(reports.get(2)),
        "host": _host(reports),
        "co_run": _co_run(reports.get(2)),
    }
    known = {name: group for name, group in groups.items() if group}
    if not known:
        return None
    return f"# {_origin(reports)}\n" + yaml.safe_dump(known, sort_keys=False)


def _origin(reports: Mapping[int, Report]) -> str:
    report = next(iter(reports.values()))
    if report.get("dry_run"):
        return "Of a dry run of gpu_check: no figure means anything."
    return f"gpu_check on {report.get('card')}, {report.get('date')}: to replace groups with `assumed: true`."


def _group(source: str, **constants: float) -> dict[str, Any]:
    return {**constants, "source": f"gpu_check, {source}", "assumed": False}


def _rows(report: Report | None, beside: bool) -> Sequence[Report]:
    rows = [] if report is None else report.get("rows", [])
    return [row for row in rows if (row["beside"] is not None) is beside]


def _partition(report: Report | None) -> dict[str, Any] | None:
    """The fewest SMs whose copies draw nearly what all of them draw, between counts that were measured."""
    curve = sorted(
        (row["units"], row["copy_bytes_per_ns"])
        for row in _rows(report, beside=False)
        if "copy_bytes_per_ns" in row
    )
    if len(curve) < 2:
        return None
    whole = max(rate for _, rate in curve)
    before = (0, 0.0)
    for units, rate in curve:
        if rate >= SATURATED * whole:
            share = (SATURATED * whole - before[1]) / max(1e-9, rate - before[1])
            saturating = before[0] + share * (units - before[0])
            return _group("stage 2: copies by SM count", saturating_units=max(1, round(saturating)))
        before = (units, rate)
    return None


def _host(reports: Mapping[int, Report]) -> dict[str, Any] | None:
    """Launch of a decode graph, and what a switch adds. The rest of the group stays as it is."""
    decode, partitions = reports.get(4), reports.get(1)
    if decode is None or partitions is None:
        return None
    graphs = [lane for lane in decode.get("lanes", []) if lane.get("graph")]
    switch = partitions.get("switch", {}).get("switch_and_kernel_us")
    if not graphs or not isinstance(switch, int | float):
        return None
    launch_ns = round(graphs[0]["launch_ms_median"] * 1e6)
    return _group(
        "stages 1 and 4; a switch with a small kernel in it",
        decode_launch_ns=launch_ns,
        switch_ns=round(switch * 1e3),
    )


def _co_run(report: Report | None) -> dict[str, Any] | None:
    """The largest slowdown of decode attention beside products on the other lane."""
    alone = {row["units"]: row["ns"] for row in _rows(report, beside=False) if row["lane"] == "decode"}
    slowdowns = [
        row["ns"]["decode_attention"] / max(1.0, alone[row["units"]]["decode_attention"]) - 1.0
        for row in _rows(report, beside=True)
        if row["units"] in alone
    ]
    if not slowdowns:
        return None
    return _group("stage 2: decode attention beside products", slowdown_max=round(max(0.0, *slowdowns), 4))
