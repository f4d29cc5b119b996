"""Terminals that show every text as it stands.

rich reads `[bold]` and `:smile:` in what it prints. Names of policies, files and models come from users, and
one like `a[/b].yaml` ended a command after hours of runs: no text of ours needs markup, so none is read.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TextColumn


def plain_console() -> Console:
    """For stdout."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


def error_console() -> Console:
    """For stderr, where progress is shown."""
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False)


@contextmanager
def told_when_full() -> Iterator[None]:
    """End the process with one line when what it prints can not be written: a file on a disk that is full."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL:
            raise
        # What stands in buffers is tried again when Python ends, so it must find somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        place = error.filename or "the output"
        sys.stderr.write(f"muxk: {place} can not be written: {error.strerror}\n")
        sys.exit(1)


def described_tasks(width: int = 0) -> TextColumn:
    """A column of a progress bar: what each task says of itself, in so many characters at least."""
    from rich.progress import TextColumn

    return TextColumn(f"{{task.description:<{width}}}" if width else "{task.description}", markup=False)
