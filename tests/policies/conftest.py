"""Views for policy tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, RequestView, View
from muxk.kernel.work import Split

MS = 1_000_000


def _estimates(units: int) -> Estimates:
    """Decode takes 800 ms / units a step, one prefill layer 8 ms / units for each 100 tokens."""
    sizes = range(1, units + 1)
    decode = tuple(DecodeModel(size, 800 * MS / size, 0.0, 0.0, 1.0) for size in sizes)
    prefill = tuple(PrefillModel(size, 0.0, 8 * MS / size / 100, 0.0, 1.0) for size in sizes)
    return Estimates(32, decode, prefill)


def _batch(**changes: Any) -> PrefillView:
    """All tokens are one chunk, which was begun if layers were launched, unless changes say otherwise."""
    batch = PrefillView(
        batch_id=1,
        requests=1,
        new_tokens=1000,
        reused_tokens=0,
        pairs=500_500,
        layers_left=32,
        arrival_ns=0,
        deadline_ns=10_000 * MS,
        depth=0,
        preemptions=0,
    )
    batch = msgspec.structs.replace(batch, **changes)
    if "tokens_left" in changes:
        return batch
    if batch.layers_left < 32:
        return msgspec.structs.replace(batch, chunk_tokens=batch.new_tokens, chunk_pairs=batch.pairs)
    return msgspec.structs.replace(batch, tokens_left=batch.new_tokens, pairs_left=batch.pairs)


def _view(units: int = 16, **changes: Any) -> View:
    """A device whose every unit can go to either phase; decode runs and nothing else."""
    view = View(
        now_ns=1000 * MS,
        units_total=units,
        splits=tuple(Split(size, units - size) for size in range(1, units)),
        split=Split(units, units),
        layers=32,
        decode=DecodeView(8, 800, True, False, 0),
        running=None,
        parked=None,
        candidate=None,
        prefill_in_flight=0,
        queue=QueueView(0, 0),
        kv=KvView(1000, 1000),
        estimates=_estimates(units),
    )
    return msgspec.structs.replace(view, **changes)


def _request(**changes: Any) -> RequestView:
    request = RequestView(
        request_id=1,
        arrival_ns=0,
        deadline_ns=1000 * MS,
        prompt_tokens=100,
        generated_tokens=0,
        max_tokens=16,
        pages=7,
        priority=0,
        recomputes=0,
    )
    return msgspec.structs.replace(request, **changes)


@pytest.fixture
def make_view() -> Callable[..., View]:
    return _view


@pytest.fixture
def make_batch() -> Callable[..., PrefillView]:
    return _batch


@pytest.fixture
def make_request() -> Callable[..., RequestView]:
    return _request


@pytest.fixture
def policy_text() -> Callable[[str], str]:
    """From the sections of a spec, written flush left, to a whole policy."""

    def text(spec: str) -> str:
        head = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: test}\nspec:\n"
        return head + "".join(f"  {line}\n" for line in spec.splitlines())

    return text
