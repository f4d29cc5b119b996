"""The wire protocol between a client and the gateway: msgspec MessagePack over ZeroMQ DEALER/ROUTER.

A client connects one DEALER socket and sends one frame a command. The server answers with frames that hold
a list of events. A request is named by the client; names are private to the connection. Every accepted or
refused request gets exactly one terminal event: `Finished` or `Failed`. Nothing is ever pickled.

The readable description, with an example exchange, is in `client/protocol.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 1


class Command(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what a client sends."""


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of what the server sends."""


class Hello(Command, frozen=True):
    """First command of a connection; answered by `Welcome` or `ProtocolError`."""

    version: int = PROTOCOL_VERSION


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class Submit(Command, frozen=True):
    """Generate. Exactly one of `prompt`, `prompt_token_ids` and `messages`. Fields as vLLM names them."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    max_tokens: int | None = None
    """None: the room left in the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    seed: int | None = None
    """None: one is drawn."""
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    priority: int = 0
    """Lower is sooner, where the policy looks at it."""


class Abort(Command, frozen=True):
    """End a request; a request that is not live is ignored."""

    request_id: str


class GetState(Command, frozen=True):
    """Ask for `State`."""

    ticket: int = 0


class SwapPolicy(Command, frozen=True):
    """Admin: replace the running policy; answered by `PolicySwapped`."""

    source: str
    """The YAML text."""
    filename: str = "<client>"
    """For error places."""
    settings: dict[str, str] = {}
    """Values of the policy's params, as `--set` gives them."""
    ticket: int = 0


class AbortAny(Command, frozen=True):
    """Admin: end requests of every client, by the names their clients gave them; answered by `AbortedAny`."""

    request_ids: list[str] | None = None
    """None: all live requests."""
    ticket: int = 0


class Drain(Command, frozen=True):
    """Admin: finish what is accepted, refuse new requests, then stop the server."""


class Welcome(Event, frozen=True):
    """The connection is open."""

    version: int
    model: str
    device: str
    policy: str
    max_context_tokens: int
    vocabulary_size: int


class Accepted(Event, frozen=True):
    """The request waits for prefill."""

    request_id: str
    prompt_tokens: int


class Tokens(Event, frozen=True):
    """New output of a request. `text` may lag behind `token_ids`: it never splits a character."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]


class Finished(Event, frozen=True):
    """Terminal: the request ended well."""

    request_id: str
    finish_reason: str
    """`stop`, `length` or `abort`."""
    stop_reason: str | None
    """The stop string that ended it, if one did."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Failed(Event, frozen=True):
    """Terminal: the request was refused or broke."""

    request_id: str
    code: str
    """`invalid`, `never_fits`, `overloaded`, `draining`, `engine_failed`, `slow_reader`."""
    message: str


class DuplicateRequest(Event, frozen=True):
    """Not terminal: a `Submit` named a request of this connection that is still live; it was ignored."""

    request_id: str


class State(Event, frozen=True):
    """A snapshot: one entry an actor, plus `server`."""

    ticket: int
    state: dict[str, Any]


class PolicySwapped(Event, frozen=True):
    """The outcome of `SwapPolicy`: when `accepted` is false the old policy goes on."""

    ticket: int
    accepted: bool
    name: str
    sha: str
    report: str


class AbortedAny(Event, frozen=True):
    """The outcome of `AbortAny`: how many requests it ended."""

    ticket: int
    requests: int


class ProtocolError(Event, frozen=True):
    """A frame could not be understood; it was ignored."""

    message: str


class Draining(Event, frozen=True):
    """The server takes no new requests and stops when the live ones have ended."""


class Frame(msgspec.Struct, frozen=True):
    """One frame from the server."""

    events: tuple[
        Welcome
        | Accepted
        | Tokens
        | Finished
        | Failed
        | DuplicateRequest
        | State
        | PolicySwapped
        | AbortedAny
        | ProtocolError
        | Draining,
        ...,
    ]


AnyCommand = Hello | Submit | Abort | GetState | SwapPolicy | AbortAny | Drain
