"""The blocks of docs/tutorial.md: commands with what they print, and what the server prints meanwhile.

`python tests/tutorial_blocks.py` runs every command in a copy of examples/tutorial and writes what it prints
into the tutorial, where that is not what stands there. A test compares both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FILES = ROOT / "examples" / "tutorial"
FENCE = re.compile(r"^```(console|log)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINES = re.compile(r"\$ .*\n(?:> .*\n)*")
SHOWN_ENDPOINT = "ipc:///run/user/1000/muxk-1000/muxk.sock"
PATIENCE_S = 60.0
QUIET_S = 0.5
"""The server has said all when it says nothing for so long."""


@dataclass(frozen=True)
class Part:
    """A command with its output, or output of the server, where `command` is empty."""

    command: str
    output: str
    start: int
    """Of the output in the page."""
    end: int


def parts(page: str) -> list[Part]:
    """Everything that is run or compared, in the order of the page."""
    found = []
    for block in FENCE.finditer(page):
        kind, text, start = block[1], block[2], block.start(2)
        if kind == "log":
            found.append(Part("", text, start, start + len(text)))
            continue
        starts = [match.start() for match in re.finditer(r"^\$ ", text, re.MULTILINE)]
        for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
            said = LINES.match(text, begin, end)
            assert said is not None, "a command begins with `$ `, and goes on after `> `"
            command = re.sub(r"^[$>] ", "", said[0].rstrip("\n"), flags=re.MULTILINE)
            found.append(Part(command, text[said.end() : end], start + said.end(), start + end))
    return found


def comparable(text: str) -> str:
    """Output without what differs from run to run."""
    text = re.sub(r"in \d+\.\d\ds\b", "in 0.00s", text)
    text = re.sub(r"={2,}", "==", text)
    text = re.sub(r"\d+\.\d{6}s( to \d+\.\d{6}s \(\d+ times\))?", "0.000000s", text)
    return re.sub(r"\b([0-9a-f]{64}|[0-9a-f]{12})\b", "sha", text)


class Terminal:
    """A shell in a copy of the files, with a server in the background when the page starts one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "run" / "log"
        self._read = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ,
            "PATH": f"{folder / 'run'}:{os.environ.get('PATH', '')}",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "NO_COLOR": "1",
            "COLUMNS": "80",
        }
        for name in ("MUXK_RUN_DIR", "MUXK_ADMIN", "MUXK_KEYS", "MUXK_SERVER_KEY"):
            self._environment.pop(name, None)

    def output(self, part: Part) -> str:
        """What a part gives now."""
        if not part.command:
            return self._shown(self._said())
        if part.command.endswith(" &"):
            return self._shown(self._serve(part.command.removesuffix(" &")))
        done = subprocess.run(
            ["bash", "-c", part.command],
            cwd=self._folder / "files",
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
            text=True,
        )
        return self._shown(done.stdout)

    def _shown(self, text: str) -> str:
        text = re.sub(r"ipc://\S+", SHOWN_ENDPOINT, text)
        return text if not text or text.endswith("\n") else f"{text}\n"

    def _serve(self, command: str) -> str:
        assert self._server is None, "one server"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._folder / "files",
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self._said(until="twice stops at once.")

    def _said(self, until: str = "\n") -> str:
        """What the server printed since this was last asked; waits for it."""
        assert self._server is not None, "a server runs"
        ends = time.monotonic() + PATIENCE_S
        text, quiet = "", time.monotonic()
        while time.monotonic() < ends and self._server.poll() is None:
            found = self._log.read_text(encoding="utf-8")[self._read :]
            if found != text:
                text, quiet = found, time.monotonic()
            if until in text and time.monotonic() - quiet > QUIET_S:
                break
            time.sleep(0.05)
        self._read += len(text)
        return text

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(timeout=PATIENCE_S)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal in a folder with a short path, for paths of sockets have a bound."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muxk-")))
        shutil.copytree(FILES, folder / "files")
        (folder / "run").mkdir(mode=0o700)
        command = folder / "run" / "muxk"
        command.write_text(f"#!{sys.executable}\nfrom muxk.client.cli import main\n\nmain()\n")
        command.chmod(0o755)
        shell = Terminal(folder)
        stack.callback(shell.close)
        yield shell


def main() -> int:
    """Write what commands print now into the tutorial."""
    page = PAGE.read_text(encoding="utf-8")
    with terminal() as shell:
        outputs = [(part, shell.output(part)) for part in parts(page)]
    for part, output in reversed(outputs):
        if comparable(output) != comparable(part.output):
            page = page[: part.start] + output + page[part.end :]
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
