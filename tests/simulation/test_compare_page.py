"""docs/compare.md: what it tells people to type is what the commands take."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer
from compare_page import PAGE
from muxk.client.cli import build_app
from tutorial_blocks import parts


def test_every_command_of_the_page_is_one_and_shows_what_it_printed(tmp_path: Path) -> None:
    app = typer.main.get_command(build_app())
    shown = parts(PAGE.read_text(encoding="utf-8"))
    assert len(shown) >= 3
    for part in shown:
        name, *arguments = shlex.split(part.command)[1:]
        command = app.commands[name]  # type: ignore[attr-defined]
        # Parses and converts every option, and runs nothing.
        command.make_context(name, arguments).close()
        assert part.output.strip(), part.command
