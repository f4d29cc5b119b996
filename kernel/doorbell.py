"""A doorbell: any thread rings, the event loop wakes."""

from __future__ import annotations

import os
import socket


class Doorbell:
    """A file descriptor that is readable after `ring` until `clear`; rings in between are merged."""

    def __init__(self) -> None:
        self._rung = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else None
        self._pair = None if self._event is not None else _nonblocking_pair()

    def fileno(self) -> int:
        """The descriptor to wait for."""
        if self._event is not None:
            return self._event
        assert self._pair is not None
        return self._pair[0].fileno()

    def ring(self) -> None:
        """Make it readable. The flag is read after the caller's append, so no ring is lost under the GIL."""
        if self._rung:
            return
        self._rung = True
        if self._event is not None:
            os.eventfd_write(self._event, 1)
        elif self._pair is not None:
            self._pair[1].send(b"\0")

    def clear(self) -> None:
        """Make it unreadable; call it before looking for work."""
        try:
            if self._event is not None:
                os.eventfd_read(self._event)
            elif self._pair is not None:
                self._pair[0].recv(64)
        except BlockingIOError:
            pass
        self._rung = False

    def close(self) -> None:
        """Give the descriptor back; a later `ring` does nothing."""
        self._rung = True
        if self._event is not None:
            os.close(self._event)
            self._event = None
        elif self._pair is not None:
            for end in self._pair:
                end.close()
            self._pair = None


def _nonblocking_pair() -> tuple[socket.socket, socket.socket]:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    return reader, writer
