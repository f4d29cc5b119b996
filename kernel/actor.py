"""The actor contract: run-to-completion state machines whose only effects are six verbs.

An actor is a class with `Accepts = A | B | C` (frozen tagged msgspec Structs) and one synchronous method
`on_<snake_case_of_A>(self, message: A)` for each of them. A handler never awaits, reads a clock, starts a
thread or does I/O; it calls `now_ns`, `send`, `send_after`, `cancel`, `offload` and `stop`. That buys
determinism (the virtual runtime replays a run exactly), invariants that hold for a whole handler, and speed.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

M_contra = TypeVar("M_contra", contravariant=True)
M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of everything an actor can receive; what is frozen and made of values is in no cycle."""


@dataclass(frozen=True, slots=True)
class Ref(Generic[M_contra]):
    """The address of an inbox that accepts `M_contra`; mypy refuses to send it anything else."""

    name: str


class Timer(msgspec.Struct, frozen=True, gc=False):
    """Names a pending `send_after`, for `cancel`."""

    timer_id: int


class Context(Protocol):
    """What a runtime gives to one actor."""

    def now_ns(self) -> int: ...

    def send(self, ref: Ref[Any], message: Any) -> None: ...

    def send_after(self, delay_ns: int, ref: Ref[Any], message: Any) -> Timer: ...

    def cancel(self, timer: Timer) -> None: ...

    def offload(self, function: Callable[[], Message], size: int) -> None: ...

    def stop(self, reason: str) -> None: ...


class Actor:
    """Base of all actors; subclasses take their own state and the refs they send to in `__init__`."""

    Accepts: ClassVar[Any]

    context: Context
    """Set by `bind`."""

    def bind(self, context: Context) -> None:
        """The runtime calls it before `started`. The verbs that are used most are the context's own from then
        on, which saves a call each time."""
        self.context = context
        self.now_ns = context.now_ns  # type: ignore[method-assign]
        self.send = context.send  # type: ignore[method-assign]

    def started(self) -> None:
        """Called once, before the first message."""

    def draining(self) -> None:
        """Called when the supervisor asks to finish what is accepted and take no more."""

    def idle(self) -> None:
        """Called now and then when no actor has anything to do: the place for invariant checks."""

    def describe(self) -> dict[str, Any]:
        """A small copy of the state, for crash reports and `muxk state`."""
        return {}

    def now_ns(self) -> int:
        """Integer nanoseconds of the runtime's monotonic clock."""
        return self.context.now_ns()

    def send(self, ref: Ref[M], message: M) -> None:
        """Queue a message; delivery is FIFO for each pair of sender and receiver."""
        self.context.send(ref, message)

    def send_after(self, delay_ns: int, ref: Ref[M], message: M) -> Timer:
        """Send after a delay; the timer can be cancelled until it fires."""
        return self.context.send_after(delay_ns, ref, message)

    def cancel(self, timer: Timer) -> None:
        """Forget a timer; one that has fired is ignored."""
        self.context.cancel(timer)

    def offload(self, function: Callable[[], Message], size: int) -> None:
        """Run a function on another thread; the message it returns arrives in this actor's inbox.

        `size` is what its time grows with (bytes of text, tokens): the virtual runtime charges for it.
        """
        self.context.offload(function, size)

    def stop(self, reason: str) -> None:
        """Stop the whole runtime in an orderly way."""
        self.context.stop(reason)


def accepted_types(actor_class: type[Actor]) -> tuple[type[Message], ...]:
    """The message types of `Accepts`, in the order written."""
    accepts = actor_class.Accepts
    if isinstance(accepts, types.UnionType):
        return typing.get_args(accepts)
    return (accepts,)


def handler_name(message_type: type[Message]) -> str:
    """`PagesReserved` -> `on_pages_reserved`."""
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", message_type.__name__).lower()


class ContractError(TypeError):
    """Handlers and `Accepts` of an actor differ."""


def check_contract(actor_class: type[Actor]) -> dict[type[Message], str]:
    """The dispatch table of an actor class.

    Raises:
        ContractError: a handler is missing, or there is one for a message that is not accepted.
    """
    table = {accepted: handler_name(accepted) for accepted in accepted_types(actor_class)}
    wanted = set(table.values())
    written = {name for name in dir(actor_class) if name.startswith("on_")}
    if missing := sorted(wanted - written):
        raise ContractError(f"{actor_class.__name__} accepts but does not handle: {', '.join(missing)}")
    if extra := sorted(written - wanted):
        raise ContractError(f"{actor_class.__name__} handles but does not accept: {', '.join(extra)}")
    return table


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """How the supervisor makes one child. Children start in list order and stop in reverse."""

    name: str
    factory: Callable[[], Actor]
    actor_class: type[Actor]
    inbox_bound: int = 65_536
    """Messages its inbox may hold; one more is a crash of the receiver, never a silent drop."""
    permanent: bool = False
    """True for a child that outlives a crash of the others and is told of it (the gateway)."""
