"""Reading the policy's file again when it changes, and when somebody asks for it by SIGHUP.

Not an actor: it waits for the file system, and tells the gateway what the file says now. The folder is
watched, not the file, for editors and configuration tools put another file in its place; where the path is a
link, the folder that it leads to is watched as well. What becomes of a text is the gateway's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import anyio
from muxk.actors.policy_files import read_policy_text
from muxk.actors.policy_messages import PolicyFileRead, PolicyFileUnreadable
from muxk.kernel.actor import Message

STEP_MS = 50
"""A change is read when nothing else happened in the folder for so long."""
DEBOUNCE_MS = 500
"""A folder in which something always happens is read this often."""
LOOK_FOR_STOP_MS = 500
RETRY_S = 1.0
"""Between two looks for a folder that is not there."""
HALF_WRITTEN_S = 0.2
"""An empty file is being written by somebody."""


class PolicyFile:
    """The file of the policy in force, and what was told of it last."""

    def __init__(self, path: Path, source: str, post: Callable[[Message], None]) -> None:
        self._path = path
        self._told: str = source
        self._post = post

    async def look(self) -> None:
        """Tell what the file says if that is something else than what was told last."""
        await self._read(again=self._told)

    async def reload(self) -> None:
        """Tell what the file says, in any case."""
        await self._read(again=None)

    async def _read(self, again: str | None) -> None:
        try:
            source = await read_policy_text(self._path)
            if not source.strip():
                await anyio.sleep(HALF_WRITTEN_S)
                source = await read_policy_text(self._path)
        except OSError as error:
            self._tell(f"can not be read: {error.strerror or error}", again, None)
        except UnicodeDecodeError as error:
            self._tell(f"is not UTF-8 text: byte {error.start}", again, None)
        else:
            self._tell(source, again, source)

    def _tell(self, what: str, again: str | None, source: str | None) -> None:
        if what == again:
            return
        self._told = what
        if source is None:
            self._post(PolicyFileUnreadable(str(self._path), what))
        else:
            self._post(PolicyFileRead(source, str(self._path)))

    def folders(self) -> list[Path]:
        """Those in which a change may mean another text."""
        own, target = self._path.absolute().parent, self._path.resolve().parent
        return [own] if own == target else [own, target]


async def watch(file: PolicyFile, stop: anyio.Event) -> None:
    """Look at the file whenever something happens in its folders, until `stop` is set."""
    import watchfiles

    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    while not stop.is_set():
        folders = file.folders()
        try:
            changes = watchfiles.awatch(
                *folders,
                watch_filter=None,
                debounce=DEBOUNCE_MS,
                step=STEP_MS,
                stop_event=stop,
                rust_timeout=LOOK_FOR_STOP_MS,
                recursive=False,
            )
            async with aclosing(changes):
                async for _ in changes:
                    await file.look()
                    if file.folders() != folders:
                        break
        except (OSError, RuntimeError):
            # A folder went away, or the system can watch no more of them: look now and then instead.
            await anyio.sleep(RETRY_S)
        await file.look()
