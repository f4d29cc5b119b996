"""The garbage collector while a simulation runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 50_000
"""New containers between two collections of the young ones. A few decode steps make the usual 700, and nearly
all of them are freed by their counts of references."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Look for cycles less often, then as before."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
