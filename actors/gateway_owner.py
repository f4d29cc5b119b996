"""What the gateway's helpers need of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from muxk.actors.gateway_state import Live
from muxk.kernel.actor import Message, Timer


class Owner(Protocol):
    """The gateway."""

    def now_ns(self) -> int: ...

    def send(self, ref: Any, message: Any) -> None: ...

    def send_after(self, delay_ns: int, ref: Any, message: Any) -> Timer: ...

    def cancel(self, timer: Timer) -> None: ...

    def offload(self, function: Callable[[], Message], size: int) -> None: ...

    def stop(self, reason: str) -> None: ...

    def draining(self) -> None: ...

    def abort_for_client(self, request: Live) -> None:
        """End a live request: its client gets the terminal event."""

    def abort_untold(self, request: Live) -> None:
        """End a live request whose client has its terminal event, gets it later, or is gone."""

    def forget(self, choice_id: int) -> None:
        """Nobody works on a choice any more."""

    def tell(self, peer: bytes, *events: Any) -> None: ...
