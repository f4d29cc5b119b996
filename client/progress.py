"""How `muxk run` shows that it is getting ready: a bar, plain lines, or JSON for a parent process."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self

import typer
from muxk.client.terminal import described_tasks, error_console


class Display(Protocol):
    """What loading tells the user."""

    def progress(self, label: str, share: float) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class BarDisplay:
    """A bar for each stage; on a terminal. A stage ends when the share falls back."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            described_tasks(44),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=error_console(),
        )
        self._stages = Stages()
        self._task: TaskID | None = None

    def progress(self, label: str, share: float) -> None:
        if self._stages.begins(share):
            self._complete()
            self._task = self._bars.add_task(label, total=1.0)
        assert self._task is not None
        self._bars.update(self._task, completed=share, description=label[:44])

    def _complete(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=1.0)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._complete()
        self._bars.stop()


class Stages:
    """Tells where a new stage begins: labels may change within one, but its share only grows."""

    def __init__(self) -> None:
        self._share = 2.0

    def begins(self, share: float) -> bool:
        last, self._share = self._share, share
        return share < last


class LineDisplay:
    """One line for each stage."""

    def __init__(self) -> None:
        self._stages = Stages()

    def progress(self, label: str, share: float) -> None:
        if self._stages.begins(share):
            typer.echo(f"{label} ...", err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class JsonDisplay:
    """JSON lines on stdout, for `ServerProcess`; about a hundred for each stage."""

    def __init__(self) -> None:
        self._percent = -1

    def progress(self, label: str, share: float) -> None:
        percent = int(share * 100)
        if percent != self._percent:
            self._percent = percent
            say(progress=(label, share))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def terminal_display() -> Display:
    """A bar on a terminal, plain lines otherwise."""
    return BarDisplay() if sys.stderr.isatty() else LineDisplay()


def say(**message: Any) -> None:
    """One JSON object on a line of stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()
