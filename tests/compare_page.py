"""The commands of docs/compare.md with what they print: `python tests/compare_page.py` runs them again.

That takes minutes, so no test does it; one checks that the commands are still commands.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tutorial_blocks import parts

PAGE = Path(__file__).parents[1] / "docs" / "compare.md"
PATIENCE_S = 3600.0


def output_of(command: str) -> str:
    """What a command of the page prints now, without what it says of its progress."""
    words = command.removeprefix("muxk ")
    with tempfile.TemporaryDirectory(prefix="muxk-") as folder:
        done = subprocess.run(
            f"{sys.executable} -m muxk.client.cli {words}",
            shell=True,
            cwd=folder,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "118"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
            text=True,
        )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def main() -> int:
    """Write what the commands print into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for part in reversed(parts(page)):
        page = page[: part.start] + output_of(part.command) + page[part.end :]
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
