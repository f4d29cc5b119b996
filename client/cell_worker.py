"""A process that runs cells: one as a line of JSON on stdin, its outcome as one on stdout, until stdin ends.

While a simulation goes on it says an empty line each second. `cell_process.py` starts it as
`python -m muxk.client.cell_worker PARENT`, and it ends when that process does; by hand it needs no PARENT.
"""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import BinaryIO

import msgspec
from muxk.client.cells import Cell, run_cell
from muxk.client.orphans import end_with

BEAT_S = 1.0


class Heart:
    """Says on a stream that a simulation goes on."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers
        self._said_s = 0.0

    def beat(self, share: float | None, now_s: float, ended: int) -> None:
        """As a `sim_run.Progress`, called far more often than it says something."""
        at_s = monotonic()
        if at_s - self._said_s >= BEAT_S:
            self._said_s = at_s
            self._answers.write(b"\n")
            self._answers.flush()


def main() -> int:
    """Until stdin ends."""
    if sys.argv[1:]:
        end_with(int(sys.argv[1]))
    decode = msgspec.json.Decoder(Cell).decode
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        # What a policy in Python prints must not be taken for an answer.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin.buffer:
            # A heart for each: a cell that hangs in its first second must have said that it began.
            outcome = run_cell(decode(line), Heart(answers).beat)
            answers.write(msgspec.json.encode(outcome) + b"\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
