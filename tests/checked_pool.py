"""A server whose KV pool checks after every message that no page is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from muxk.actors import engine
from muxk.actors.kv_pool import KvPool
from virtual_server import VirtualServer


def checked(handler: Callable[[KvPool, Any], None]) -> Callable[[KvPool, Any], None]:
    def handle(self: CheckedPool, message: Any) -> None:
        handler(self, message)
        self.state.pool.check()
        self.checks += 1

    return handle


class CheckedPool(KvPool):
    """The pool, whose named invariant is checked after every message."""

    checks = 0


for _name in [name for name in dir(KvPool) if name.startswith("on_")]:
    setattr(CheckedPool, _name, checked(getattr(KvPool, _name)))


def checked_server(*arguments: Any, **more: Any) -> tuple[VirtualServer, CheckedPool]:
    """A server that runs, and its pool: another one later on means that the engine was rebuilt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "KvPool", CheckedPool)
        server = VirtualServer(*arguments, **more)
    server.runtime.start()
    pool = server.runtime.actor("kv_pool")
    assert isinstance(pool, CheckedPool)
    return server, pool
