"""Small charts as SVG text: bars with intervals, stacked shares, quantile curves.

Written by hand: three forms of a few lines each, the same bytes every time, no dependency on a path that
needs none, and every text escaped in one place. The colours are those of Okabe and Ito, which nearly
everybody can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f")
WIDTH = 760
LABEL = 250
"""Pixels for the names on the left."""
ROW = 22
CHARACTERS = 38
"""Of a name that are shown; all of it when one points at it."""
TAIL = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999)
"""Marks of the axis of quantiles, which gives each nine as much room as the one before."""
CURVE_HEIGHT = 260
MARGIN = 30
"""Right of the curves, for the half of the last mark that is beyond them."""
STEPS = (1, 2, 5)
"""Marks in each power of ten of the times."""
CHARACTER = 7.0
"""Pixels of a character, at most on average."""
NOTE_MIN = 170
MARKS_MAX = 12
"""Of the times."""
MARKS_OF_A_WHOLE = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Bar:
    """A value with its interval, or a reason why there is none."""

    label: str
    value: float
    low: float
    high: float
    note: str
    """Beside the bar."""
    series: int = 0
    """Which colour it has."""


@dataclass(frozen=True)
class Stack:
    """Shares of a whole, in the order of the parts."""

    label: str
    shares: Sequence[float]


@dataclass(frozen=True)
class Curve:
    """Quantiles of times."""

    label: str
    points: Sequence[tuple[float, float]]
    """(share of all values, ms above 0), ascending."""
    series: int = 0
    """Which colour it has; beyond the last one the colours come again with dashes."""


@dataclass(frozen=True)
class Part:
    """One of the shares of a stack, as the legend has it."""

    name: str
    colour: str


def colour_of(series: int) -> str:
    """Of a series; they come again after the last one."""
    return COLOURS[series % len(COLOURS)]


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from 0, each with its interval."""
    largest = max([row.high for row in rows] + [row.value for row in rows], default=0.0) or 1.0
    room = min(WIDTH - LABEL - 80, max([NOTE_MIN, *(CHARACTER * len(row.note) + 12 for row in rows)]))
    scale = (WIDTH - LABEL - room) / largest
    parts = []
    for index, row in enumerate(rows):
        y = index * ROW
        parts.append(_name(row.label, y))
        parts.append(_rect(LABEL, y + 4, row.value * scale, ROW - 8, colour_of(row.series)))
        if row.high > row.low:
            parts.append(_whisker(LABEL + row.low * scale, LABEL + row.high * scale, y + ROW / 2))
        parts.append(_text(LABEL + max(row.high, row.value) * scale + 6, y + 15, row.note))
    return _svg(title, len(rows) * ROW, parts)


def stacks(title: str, shown: Sequence[Part], rows: Sequence[Stack]) -> str:
    """Shares beside each other, each row as wide as its shares are together; 1 is the full width."""
    legend, top = _legend(shown)
    parts = [legend]
    for index, row in enumerate(rows):
        y, x = top + index * ROW, float(LABEL)
        parts.append(_name(row.label, y))
        for part, share in zip(shown, row.shares, strict=True):
            width = share * (WIDTH - LABEL - MARGIN)
            parts.append(_rect(x, y + 4, width, ROW - 8, part.colour, f"{part.name} {share:.2%}"))
            x += width
    bottom = top + len(rows) * ROW
    for share in MARKS_OF_A_WHOLE:
        x = LABEL + share * (WIDTH - LABEL - MARGIN)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="grid"/>')
        parts.append(_centred(x, bottom + 14, f"{share:.0%}"))
    return _svg(title, bottom + 16, parts)


def curves(title: str, rows: Sequence[Curve], mark_ms: float | None) -> str:
    """Quantiles of times on a logarithmic scale; `mark_ms` draws an SLO."""
    legend, top = _legend([Part(row.label, colour_of(row.series)) for row in rows])
    values = [ms for row in rows for _, ms in row.points if ms > 0] + ([mark_ms] if mark_ms else [])
    if not values:
        return _svg(title, top + ROW, [_text(LABEL, top + 15, "nothing was measured")])
    frame = _Frame(top, _marks(min(values), max(values)))
    parts = [legend, *frame.grid()]
    if mark_ms:
        y = frame.y(mark_ms)
        parts.append(f'<line x1="60" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" class="slo"/>')
        parts.append(_text(64, y - 4, f"SLO {mark_ms:g} ms"))
    for row in rows:
        path = " ".join(f"{frame.x(share):.1f},{frame.y(ms):.1f}" for share, ms in row.points if ms > 0)
        colour = colour_of(row.series)
        dashes = ' stroke-dasharray="6 3"' if row.series >= len(COLOURS) else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
    return _svg(title, top + CURVE_HEIGHT + 30, parts)


@dataclass(frozen=True)
class _Frame:
    """Where a quantile and a time are in the picture."""

    top: float
    marks: Sequence[float]
    """Of the times in ms, ascending; the first and the last are its ends."""

    def x(self, share: float) -> float:
        nines = -log10(1 - min(share, TAIL[-1]))
        return 60 + nines / -log10(1 - TAIL[-1]) * (WIDTH - 60 - MARGIN)

    def y(self, ms: float) -> float:
        low, high = log10(self.marks[0]), log10(self.marks[-1])
        return self.top + 8 + (high - log10(ms)) / (high - low) * CURVE_HEIGHT

    def grid(self) -> list[str]:
        parts = []
        for mark in self.marks:
            y = self.y(mark)
            parts.append(f'<line x1="60" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(_text(2, y + 4, f"{mark:g} ms" if mark < 10_000 else f"{mark / 1000:g} s"))
        for share in TAIL:
            x = self.x(share)
            bottom = self.top + 8 + CURVE_HEIGHT
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top + 8}" y2="{bottom}" class="grid"/>')
            parts.append(_centred(x, bottom + 16, f"P{share * 100:g}"))
        return parts


def _marks(least: float, largest: float) -> list[float]:
    """1, 2, 5, 10, … from what is at or below the least to what is at or above the largest.

    Only powers of ten where there would be more than a dozen.
    """
    powers = range(floor(log10(least)) - 1, ceil(log10(largest)) + 2)
    for steps in (STEPS, STEPS[:1]):
        marks = [step * 10.0**power for power in powers for step in steps]
        low = max(mark for mark in marks if mark <= least)
        high = min(mark for mark in marks if mark >= largest and mark > low)
        kept = [mark for mark in marks if low <= mark <= high]
        if len(kept) <= MARKS_MAX:
            return kept
    return kept


def _legend(shown: Sequence[Part]) -> tuple[str, int]:
    """Names with their colours, three a line, and the height that takes."""
    parts = []
    for index, part in enumerate(shown):
        x, y = index % 3 * (WIDTH // 3), index // 3 * 18
        parts.append(_rect(x, y + 3, 12, 10, part.colour))
        parts.append(_text(x + 17, y + 12, part.name, CHARACTERS - 8))
    return "".join(parts), (len(shown) + 2) // 3 * 18 + 8


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + 6:.0f}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n{body}\n</svg>"
    )


def _name(text: str, y: float) -> str:
    return _text(0, y + 15, text, CHARACTERS)


def _text(x: float, y: float, text: str, characters: int = 200) -> str:
    shown = text if len(text) <= characters else f"{text[: characters - 1]}…"
    return f'<text x="{x:.1f}" y="{y:.1f}"><title>{escape(text)}</title>{escape(shown)}</text>'


def _centred(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(0.0, width):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}">{inside}</rect>'


def _whisker(low: float, high: float, y: float) -> str:
    lines = ((low, high, y, y), (low, low, y - 4, y + 4), (high, high, y - 4, y + 4))
    return "".join(
        f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="whisker"/>'
        for x1, x2, y1, y2 in lines
    )
