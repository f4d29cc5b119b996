"""What a rate must meet to count. Imports nothing, for the command line reads it."""

from __future__ import annotations

from enum import StrEnum


class Goal(StrEnum):
    """Which objectives a rate must meet; see `measures.py`."""

    STRICT = "strict"
    JOINT = "joint"
