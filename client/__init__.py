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
    from muxk.client.completion import Choice, Completion, Delta, Logprob, Prompt, TopLogprob
    from muxk.client.errors import ClientError, ConnectError, PolicyNotFound, PolicyRefused, RequestError
    from muxk.client.server_process import ServerProcess
    from muxk.client.stream import AsyncStream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "ClientError",
    "Completion",
    "ConnectError",
    "Delta",
    "Logprob",
    "PolicyNotFound",
    "PolicyRefused",
    "Prompt",
    "RequestError",
    "ServerProcess",
    "Stream",
    "TopLogprob",
]


def _home(name: str) -> str:
    """The module that defines a public name."""
    homes = {
        "AsyncClient": "aio",
        "AsyncStream": "stream",
        "Choice": "completion",
        "Client": "client",
        "Completion": "completion",
        "Delta": "completion",
        "Logprob": "completion",
        "Prompt": "completion",
        "ServerProcess": "server_process",
        "Stream": "client",
        "TopLogprob": "completion",
    }
    return f"muxk.client.{homes.get(name, 'errors')}"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'muxk.client' has no attribute {name!r}")
    return getattr(import_module(_home(name)), name)
