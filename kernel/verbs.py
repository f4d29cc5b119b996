"""The six verbs of an actor and the port of a device, as thin handles on a runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from muxk.kernel.actor import Message, Ref, Timer

Owner = TypeVar("Owner")
Owner_contra = TypeVar("Owner_contra", contravariant=True)


class Verbs(Protocol[Owner_contra]):
    """What a runtime does for its actors and devices; `owner` is one generation of one actor."""

    def now_ns(self) -> int: ...

    def sender(self, owner: Owner_contra) -> Callable[[Ref[Any], Message], None]:
        """What sends for an actor: each message goes through it."""

    def send_after(self, owner: Owner_contra, delay_ns: int, ref: Ref[Any], message: Message) -> Timer: ...

    def cancel(self, timer: Timer) -> None: ...

    def offload(self, owner: Owner_contra, function: Callable[[], Message], size: int) -> None: ...

    def halt(self, reason: str) -> None: ...

    def post(self, name: str, message: Message) -> None: ...

    def post_after(self, name: str, delay_ns: int, message: Message) -> Timer: ...

    def quiet_until_ns(self, beside: Timer) -> int: ...


class ActorContext(Generic[Owner]):
    """`actor.Context` of one generation of one actor."""

    __slots__ = ("_owner", "_runtime", "now_ns", "send")

    def __init__(self, runtime: Verbs[Owner], owner: Owner) -> None:
        self._runtime = runtime
        self._owner = owner
        self.send = runtime.sender(owner)
        self.now_ns = runtime.now_ns

    def send_after(self, delay_ns: int, ref: Ref[Any], message: Any) -> Timer:
        return self._runtime.send_after(self._owner, delay_ns, ref, message)

    def cancel(self, timer: Timer) -> None:
        self._runtime.cancel(timer)

    def offload(self, function: Callable[[], Message], size: int) -> None:
        self._runtime.offload(self._owner, function, size)

    def stop(self, reason: str) -> None:
        self._runtime.halt(reason)


class Port:
    """`device.DevicePort` to an actor. A post belongs to the generation that lives when it is made."""

    __slots__ = ("cancel", "now_ns", "post", "post_after", "quiet_until_ns")

    def __init__(self, runtime: Verbs[Any], name: str) -> None:
        self.now_ns = runtime.now_ns
        self.post = partial(runtime.post, name)
        self.post_after = partial(runtime.post_after, name)
        self.cancel = runtime.cancel
        self.quiet_until_ns = runtime.quiet_until_ns
