"""Why figures of `docs/paper.md` differ from the paper's: written by people, by the key of the figure."""

from __future__ import annotations

from collections.abc import Mapping

NOTES: Mapping[str, str] = {}
