"""An endpoint of its own for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def endpoint() -> Iterator[str]:
    """ipc in a short path: a socket's name has a limit of about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="muxk-") as folder:
        yield f"ipc://{Path(folder) / 'test.sock'}"
