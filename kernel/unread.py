"""What the connections of a bound socket hold that their peers have not read yet.

ZeroMQ hands frames to the kernel and then calls them sent. When a connection over ipc ends, a peer whose own
queue is full loses what the kernel still held for it, so that a server has to know before it goes.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from termios import TIOCOUTQ

DESCRIPTORS = Path("/proc/self/fd")


def unread_bytes(endpoint: str) -> int:
    """Of all connections to `endpoint`, a bound `ipc://` or `tcp://` one of this process.

    Over ipc these are bytes (the kernel's own share counted in) that the peer has not read; over tcp those
    that its machine has not acknowledged: what is there already outlives the connection. 0 where there is no
    `/proc`: then nobody knows.
    """
    if not DESCRIPTORS.exists():
        return 0
    return sum(_unread_of(int(name), endpoint) for name in os.listdir(DESCRIPTORS))


def _unread_of(descriptor: int, endpoint: str) -> int:
    """0 of what is no connection to the endpoint."""
    # ZeroMQ's thread closes descriptors at any time, and another file may have the number then.
    with suppress(OSError):
        if stat.S_ISSOCK(os.stat(descriptor).st_mode):
            with _copy_of(descriptor) as found:
                if _is_of(found, endpoint):
                    return int.from_bytes(ioctl(found, TIOCOUTQ, bytes(4)), "little")
    return 0


def _copy_of(descriptor: int) -> socket.socket:
    """To be closed; raises OSError for what is no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_of(found: socket.socket, endpoint: str) -> bool:
    """It is an accepted connection of the endpoint, which gives it its local name."""
    if found.type != socket.SOCK_STREAM or found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    transport, _, address = endpoint.partition("://")
    if transport == "ipc":
        local = f"\0{address[1:]}".encode() if address.startswith("@") else address
        return found.family == socket.AF_UNIX and found.getsockname() == local
    port = int(address.rpartition(":")[2])
    return found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port
