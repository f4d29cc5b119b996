"""Views of servers with several devices, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.placing import GroupView, PlaceView
from muxk.kernel.view import RequestView

MS = 1_000_000
PAGES = 1000
"""Of the pool of one device; a page has 16 tokens."""
NOW_NS, STEP_NS = 10**10, 20 * MS
ESTIMATES = Estimates(
    layers=10,
    decode=(DecodeModel(100, 20 * MS, 0, 0, 1.0),),
    prefill=(PrefillModel(100, 0.1 * MS, 0.01 * MS, 0, 1.0),),
)
"""A decode step of 20 ms; a prompt takes 1 ms and 0.1 ms a token."""


def request(number: int, prompt: int = 100, answer: int = 60) -> RequestView:
    return RequestView(
        request_id=number,
        arrival_ns=number,
        deadline_ns=10**9,
        prompt_tokens=prompt,
        generated_tokens=0,
        max_tokens=answer,
        pages=-(-prompt // 16),
        priority=0,
        recomputes=0,
    )


def group(number: int, devices: Sequence[int] | None = None, **changes: Any) -> GroupView:
    """A group with nothing to do, of the device that leads it."""
    own = (number,) if devices is None else tuple(devices)
    plain = GroupView(number, own, 0, 0, 0, 0, 0, 0, PAGES * len(own), PAGES * len(own))
    return msgspec.structs.replace(plain, **changes)


def decoding(number: int, rows: int, devices: Sequence[int] | None = None, **changes: Any) -> GroupView:
    """A group that decodes, with ten pages a row; each has said half of a mean answer."""
    plain = group(number, devices)
    used = 10 * rows
    busy = msgspec.structs.replace(
        plain,
        decoding=rows,
        context_tokens=160 * rows,
        promised_pages=used,
        pages_free=plain.pages_total - used,
        answers_since_ns=NOW_NS - 50 * STEP_NS,
        newest_since_ns=NOW_NS - 50 * STEP_NS,
    )
    return msgspec.structs.replace(busy, **changes)


def view(groups: Sequence[GroupView], queue: Sequence[RequestView] = (), **changes: Any) -> PlaceView:
    plain = PlaceView(
        now_ns=NOW_NS,
        queue=tuple(queue),
        waiting=len(queue),
        groups=tuple(groups),
        layers=10,
        units=100,
        elastic=True,
        page_tokens=16,
        page_bytes=1 << 20,
        link_bytes_per_ns=100.0,
        answer_tokens=100.0,
        width_factors=(),
        estimates=ESTIMATES,
    )
    return msgspec.structs.replace(plain, **changes)
