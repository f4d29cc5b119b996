"""The report of `muxk compare`: one HTML page that needs no network and runs nothing.

Names of policies, workloads and models come from files and command lines: everything that is not ours goes
through `escape`, and a content policy forbids the page to load or run anything whatever is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import msgspec
from muxk.client.cells import command_of
from muxk.client.charts import Bar, Curve, Part, Stack, bars, colour_of, curves, stacks
from muxk.client.compare import AtRate, Entry, Study
from muxk.client.compare_report import (
    COLUMNS,
    Origin,
    Summary,
    cells_of,
    goodput_in_words,
    gpus_of,
    summary,
)
from muxk.client.experiments import CellFailed
from muxk.client.goodput import Goodput
from muxk.client.quantiles import curve_ms
from muxk.kernel.idle import Cause

SHARES = (0.01, 0.05, *(step / 20 for step in range(2, 19)), 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99)
TAIL_SHARES = (0.992, 0.994, 0.995, 0.996, 0.997, 0.998, 0.9985, 0.999)
SPLITS_MAX = 7
"""That have a colour of their own; the rest is one more."""
OTHERS = "others"
OTHERS_COLOUR = "#7f7f7f"
CAUSES = (
    Part(Cause.OVER_RESERVED, "#0072b2"),
    Part(Cause.DRAIN, "#e69f00"),
    Part(Cause.MERGE, "#009e73"),
    Part(Cause.UNASSIGNED, "#cc79a7"),
    Part(Cause.LAUNCH, "#56b4e9"),
    Part(Cause.PREEMPTION, "#d55e00"),
    Part(Cause.NO_PAGES, "#f0e442"),
    Part(Cause.HOST, "#7f7f7f"),
    Part(Cause.UNEXPLAINED, "#882255"),
    Part(Cause.NO_WORK, "#bbbbbb"),
)
"""Each has its colour in every chart, whichever others are there."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25em .7em; border-bottom: 1px solid #8884; vertical-align: top; }
svg { width: 100%; height: auto; margin: .3em 0 1.2em; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.grid { stroke: #8886; stroke-width: .6; } .whisker { stroke: currentColor; stroke-width: 1.4; }
.slo { stroke: #d55e00; stroke-dasharray: 4 3; } .failed { color: #d55e00; }
pre { background: #8882; padding: .7em; overflow-x: auto; font-size: 12px; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(study: Study, entries: Sequence[Entry], notes: Sequence[str], origin: Origin) -> str:
    """The whole page."""
    parts = _printable("\n".join(_parts(study, entries, notes, origin)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width">
<title>muxk compare</title>
<style>{STYLE}</style>
</head>
<body>
{parts}
</body>
</html>
"""


def _printable(text: str) -> str:
    """Without what names of files may have and a page may not: control characters, and those that turn the
    direction of the text or are not seen."""
    return "".join(one if one.isprintable() or one in "\t\n" else f"U+{ord(one):04X}" for one in text)


def _parts(study: Study, entries: Sequence[Entry], notes: Sequence[str], origin: Origin) -> Iterator[str]:
    yield "<h1>muxk compare</h1>"
    model = escape(study.template.model)
    yield f"<p>{model}, simulated: modelled GPUs in virtual time, the policies and actors that serve.</p>"
    yield from (f"<p>{escape(note)}</p>" for note in notes)
    splits = _splits(entries)
    for workload in study.workloads:
        of_workload = [entry for entry in entries if entry.workload == workload]
        yield f"<h2>{escape(workload)}</h2>"
        yield from _failures(of_workload)
        yield from _goodputs(study, of_workload)
        for rate in dict.fromkeys(at.rate for entry in of_workload for at in entry.at):
            yield from _at_rate(study, of_workload, rate, splits)
    yield from _origin(study, entries, origin)


def _failures(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        reasons = [("", entry.error)]
        reasons += [
            (f"{goal.value}: ", str(e)) for goal, e in entry.goodputs.items() if isinstance(e, CellFailed)
        ]
        reasons += [(f"at {at.rate:g}/s: ", at.error) for at in entry.at]
        for where, reason in reasons:
            if reason:
                label = escape(entry.contender.label)
                yield f'<p class="failed">{label}: {escape(where + reason)}</p>'


def _goodputs(study: Study, entries: Sequence[Entry]) -> Iterator[str]:
    for goal in study.goals:
        rows = [
            _bar(entry, entry.goodputs.get(goal), study.contenders.index(entry.contender))
            for entry in entries
        ]
        yield f"<h3>{goal.value.capitalize()} goodput, requests/s</h3>"
        yield bars(f"{goal.value} goodput, requests a second", rows)


def _bar(entry: Entry, found: Goodput | CellFailed | None, series: int) -> Bar:
    label = entry.contender.label
    if not isinstance(found, Goodput):
        return Bar(label, 0.0, 0.0, 0.0, "failed", series)
    gpus = gpus_of(entry)
    each = f", {found.rate / gpus:.3g} a GPU" if gpus > 1 else ""
    return Bar(label, found.rate, found.low, found.high, goodput_in_words(found) + each, series)


def _at_rate(study: Study, entries: Sequence[Entry], rate: float, splits: Sequence[Part]) -> Iterator[str]:
    measured = [
        (entry, at, made)
        for entry in entries
        for at in entry.at
        if at.rate == rate and (made := summary(at)) is not None
    ]
    yield f"<h3>At {rate:g} requests/s</h3>"
    yield _table(("policy", *COLUMNS), [(entry.contender.label, *cells_of(at)) for entry, at, _ in measured])
    slo_ms = study.template.tbt_ms or _common_tbt([at for _, at, _ in measured])
    shares = (*SHARES, *TAIL_SHARES)
    for name, mark in (("TBT", slo_ms), ("TTFT", None)):
        lines = [
            Curve(
                entry.contender.label,
                tuple(zip(shares, curve_ms(_bins(made, name), shares), strict=True)),
                study.contenders.index(entry.contender),
            )
            for entry, _, made in measured
        ]
        yield f"<h4>{name}: quantiles</h4>"
        yield curves(f"{name} at {rate:g} requests a second", lines, mark)
    labels = [entry.contender.label for entry, _, _ in measured]
    residency = [_with_others(made.residency, splits) for *_, made in measured]
    yield from _stacked("Split residency (decode+prefill units)", labels, residency, splits)
    if any(made.idle for *_, made in measured):
        idle = [made.idle for *_, made in measured]
        yield from _stacked("Idle units by cause, share of all unit time", labels, idle, CAUSES)


def _bins(made: Summary, name: str) -> tuple[tuple[float, int], ...]:
    return made.tbt if name == "TBT" else made.ttft


def _common_tbt(ats: Sequence[AtRate]) -> float | None:
    """The TBT SLO that all were judged by, if they were judged by one."""
    found = {outcome.figures["slo"]["tbt_ms"] for at in ats for outcome in at.outcomes}
    return float(found.pop()) if len(found) == 1 else None


def _stacked(
    title: str, labels: Sequence[str], rows: Sequence[Mapping[str, float]], parts: Sequence[Part]
) -> Iterator[str]:
    """Of the parts, those that some row has."""
    shown = [part for part in parts if any(row.get(part.name) for row in rows)]
    stacked = [
        Stack(label, [row.get(part.name, 0.0) for part in shown])
        for label, row in zip(labels, rows, strict=True)
    ]
    yield f"<h4>{escape(title)}</h4>"
    yield stacks(title, shown, stacked)


def _splits(entries: Sequence[Entry]) -> tuple[Part, ...]:
    """Those that took most of the time on the whole page, each with its colour in every chart."""
    totals: dict[str, float] = {}
    for entry in entries:
        for at in entry.at:
            made = summary(at)
            for name, share in (made.residency if made else {}).items():
                totals[name] = totals.get(name, 0.0) + share
    names = sorted((name for name in totals if totals[name]), key=lambda name: (-totals[name], name))
    kept = [Part(name, colour_of(place)) for place, name in enumerate(names[:SPLITS_MAX])]
    return (*kept, Part(OTHERS, OTHERS_COLOUR))


def _with_others(row: Mapping[str, float], parts: Sequence[Part]) -> dict[str, float]:
    names = [part.name for part in parts]
    kept = {name: share for name, share in row.items() if name in names}
    others = sum(share for name, share in row.items() if name not in names)
    return {**kept, OTHERS: others} if others else kept


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"


def _origin(study: Study, entries: Sequence[Entry], origin: Origin) -> Iterator[str]:
    yield "<h2>How to make this again</h2>"
    seeds = ", ".join(map(str, study.seeds))
    yield f"<p>muxk {escape(origin.muxk)}, code {escape(origin.code)}; seeds {seeds}. The whole page:</p>"
    yield f"<pre>{escape(origin.command_line)}</pre>"
    commands = [
        command_of(msgspec.structs.replace(entry.cell, rate=at.rate)) for entry in entries for at in entry.at
    ]
    if commands:
        yield f"<p>Each run at a given rate, with seed {study.seeds[0]}:</p>"
        listed = "\n".join(commands)
        yield f"<pre>{escape(listed)}</pre>"
