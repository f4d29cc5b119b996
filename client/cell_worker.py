"""A process that runs cells: one as a line of JSON on stdin, its outcome as one on stdout, until stdin ends.

While a simulation goes on it says an empty line each second. `cell_process.py` starts it as
`python -m muxk.client.cell_worker`.
"""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import BinaryIO

import msgspec
from muxk.client.cells import Cell, run_cell

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
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a policy in Python prints must not be taken for an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decode = msgspec.json.Decoder(Cell).decode
    heart = Heart(answers)
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(run_cell(decode(line), heart.beat)) + b"\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
