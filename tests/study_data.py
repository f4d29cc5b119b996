"""Small inputs for tests of studies."""

from __future__ import annotations

from pathlib import Path


def short_requests(folder: Path, rows: int = 40) -> Path:
    """A trace of lengths without times: prompts of 200 to 800 tokens with answers of two or three."""
    path = folder / "pairs.csv"
    lines = [f"{200 + 20 * (row * 7 % 31)},{2 + row % 2}" for row in range(rows)]
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "\n".join(lines) + "\n")
    return path
