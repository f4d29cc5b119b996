"""What lives outside the server process: the client library and the `muxk` command.

    from muxk.client import Client

The names below are loaded when they are first used, so that `muxk --help` does not wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muxk.client.aio import AsyncClient
    from muxk.client.client import Client, Stream
    from muxk.client.errors import ClientError, ConnectError, PolicyNotFound, PolicyRefused, RequestError
    from muxk.client.server_process import ServerProcess
    from muxk.client.session import Completion, Delta
    from muxk.client.stream import AsyncStream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClientError",
    "Completion",
    "ConnectError",
    "Delta",
    "PolicyNotFound",
    "PolicyRefused",
    "RequestError",
    "ServerProcess",
    "Stream",
]


def _home(name: str) -> str:
    """The module that defines a public name."""
    homes = {
        "AsyncClient": "aio",
        "AsyncStream": "stream",
        "Client": "client",
        "Completion": "session",
        "Delta": "session",
        "ServerProcess": "server_process",
        "Stream": "client",
    }
    return f"muxk.client.{homes.get(name, 'errors')}"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'muxk.client' has no attribute {name!r}")
    return getattr(import_module(_home(name)), name)
