"""When the later turns of conversations come. Imports nothing, for the command line reads it."""

from __future__ import annotations

from enum import StrEnum


class Turns(StrEnum):
    """When a later turn of a session comes."""

    OPEN = "open"
    CLOSED = "closed"
