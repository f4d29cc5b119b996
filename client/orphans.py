"""A process that must not outlive the one that started it, however that ended and whatever it is doing."""

from __future__ import annotations

import os
import threading
import time

LOOK_EVERY_S = 1.0


def end_with(parent: int) -> None:
    """End this process soon after it has another parent than this one; nothing is cleaned up."""
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os._exit(1)
