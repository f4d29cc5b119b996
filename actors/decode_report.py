"""What decode says of its rows, for whoever asks why a request gets no token."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from muxk.actors.decode_rows import Row
from muxk.kernel.statuses import Reason, StatusReport


def decode_report(rows: Iterable[Row], asked: Collection[int]) -> StatusReport:
    """All rows, in the order in which they joined."""
    report = StatusReport("decode", asked)
    for row in rows:
        if report.wants(row.request.request_id):
            reason, detail = _why(row)
            rule = None if row.ending is None else row.ending.rule
            report.add(row.request.request_id, reason, detail, rule)
    return report


def _why(row: Row) -> tuple[Reason, str]:
    if row.ending is not None and row.ending.recompute:
        return Reason.EVICTED, "its pages are needed by others; a step that it is in has to end first"
    if row.ending is not None:
        return Reason.ENDING, "it has ended; a step that it is in has not"
    tokens = f"{row.count} of at most {row.request.params.max_tokens} tokens"
    if not row.fits:
        return Reason.NO_PAGE, f"it has {tokens} and no page for the next one: the pool has none left"
    return Reason.DECODING, f"it has {tokens}"
