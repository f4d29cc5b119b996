"""A process that runs cells: one as a line of JSON on stdin, its outcome as one on stdout, until stdin ends.

`cell_pool.py` starts it as `python -m muxk.client.cell_worker`.
"""

from __future__ import annotations

import os
import sys

import msgspec
from muxk.client.cells import Cell, run_cell


def main() -> int:
    """Until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a policy in Python prints must not be taken for an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decode = msgspec.json.Decoder(Cell).decode
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(run_cell(decode(line))) + b"\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
