"""How `muxk run` shows that it is getting ready: a bar, plain lines, or JSON for a parent process."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self

import typer


class Display(Protocol):
    """What loading tells the user."""

    def progress(self, label: str, share: float) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class BarDisplay:
    """A bar for each thing that is done; on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def progress(self, label: str, share: float) -> None:
        """A new label means that the ones before are done."""
        if label not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, completed=1.0)
            self._tasks[label] = self._bars.add_task(label, total=1.0)
        self._bars.update(self._tasks[label], completed=share)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for task in self._tasks.values():
                self._bars.update(task, completed=1.0)
        self._bars.stop()


class LineDisplay:
    """One line for each thing that is done."""

    def __init__(self) -> None:
        self._label = ""

    def progress(self, label: str, share: float) -> None:
        if label != self._label:
            self._label = label
            typer.echo(f"{label} ...", err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class JsonDisplay(LineDisplay):
    """JSON lines on stdout, for `ServerProcess`; at most a hundred for each thing that is done."""

    def __init__(self) -> None:
        super().__init__()
        self._percent = -1

    def progress(self, label: str, share: float) -> None:
        percent = int(share * 100)
        if (label, percent) != (self._label, self._percent):
            self._label, self._percent = label, percent
            say(progress=(label, share))


def terminal_display() -> Display:
    """A bar on a terminal, plain lines otherwise."""
    return BarDisplay() if sys.stderr.isatty() else LineDisplay()


def say(**message: Any) -> None:
    """One JSON object on a line of stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()
