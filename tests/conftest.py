"""Hypothesis profiles: a noisy machine is no reason to fail, and CI replays the same examples.

Tests with real servers run alone; `make test` runs all others two at a time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ALONE = ("system", "client/test_with_server.py")
"""Folders and files whose tests start servers, which use all cores and whose times are compared."""
VIRTUAL = ("system/test_sim_gpu_server.py",)
"""Files in them that run in virtual time."""

# Before anything imports triton, whose own functions are made for a card or for its interpreter then.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ALONE; files with slow tests come first, so that the workers end together."""
    tests = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(tests) if item.path.is_relative_to(tests) else item.path
        if any(place.is_relative_to(alone) for alone in ALONE) and place.as_posix() not in VIRTUAL:
            item.add_marker(pytest.mark.alone)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
