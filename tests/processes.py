"""What tests ask about processes that they did not start themselves."""

from __future__ import annotations

import os
import select


def ends(pid: int, timeout_s: float = 20.0) -> bool:
    """Whether a process has ended, or does so in time.

    SIGKILL returns before the kernel has taken the process down, and only its parent can wait for that: a
    descriptor of the process becomes readable then, also where nobody collects it.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], timeout_s)[0])
    finally:
        os.close(process)
