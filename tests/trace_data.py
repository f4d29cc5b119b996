"""Where the public trace files are, for tests that can do without, and small files of the same formats."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

MOONCAKE = "mooncake_conversation_trace.jsonl"
AZURE = "AzureLLMInferenceTrace_conv.csv"
NANOFLOW = "nanoflow_sharegpt_lengths.csv"
VIDUR = "vidur_arxiv_summarization.csv"


def trace_file(name: str) -> Path:
    """A public trace; skips the test where it is not. MUXK_DATA names the folder that holds traces/."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(os.environ.get("MUXK_DATA") or root.parent / "shared" / "data")
    path = folder / "traces" / name
    if not path.is_file():
        pytest.skip(f"no {name} (MUXK_DATA names the folder that holds traces/)")
    return path


def mooncake_line(at_ms: float, tokens: int, output: int, blocks: list[int]) -> str:
    row = {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": blocks}
    return json.dumps(row)


def mooncake_sessions(path: Path, sessions: int, turns: int, bin_ms: int = 3000) -> Path:
    """Sessions that open one a bin, three at a time, and go on for some turns, each in the next bin.

    All share block 0; turn k of a session has k + 1 blocks of its own.
    """
    rows = []
    for session in range(sessions):
        own = [1_000 * (session + 1) + block for block in range(turns)]
        for turn in range(turns):
            at_ms = (session // 3 + turn) * bin_ms
            rows.append((at_ms, mooncake_line(at_ms, 512 * (turn + 2) - 100, 20, [0, *own[: turn + 1]])))
    rows.sort(key=lambda row: row[0])
    path.write_text("\n".join(line for _, line in rows) + "\n", encoding="utf-8")
    return path
