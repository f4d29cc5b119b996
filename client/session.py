"""What one connection knows: its live requests and open questions. No sockets; `aio.py` feeds it frames.

Invariant: every request that was submitted ends exactly once, with a `Finished` or a `RequestError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
import msgspec
from muxk.client import protocol
from muxk.client.errors import RequestError
from muxk.client.inbox import DELTAS_BOUND, UNREAD, UNREAD_BYTES_MAX, Inbox

Value = TypeVar("Value")

Reply = (
    protocol.State | protocol.Explained | protocol.PolicySwapped | protocol.ShadowSet | protocol.AbortedAny
)
"""What carries the ticket of a question."""


class Answer(Generic[Value]):
    """One value that arrives later, or the error that came instead."""

    def __init__(self) -> None:
        self._arrived = anyio.Event()
        self._value: list[Value] = []
        self._error: RequestError | None = None

    def give(self, value: Value) -> None:
        if not self._arrived.is_set():
            self._value.append(value)
            self._arrived.set()

    def fail(self, error: RequestError) -> None:
        if not self._arrived.is_set():
            self._error = error
            self._arrived.set()

    async def wait(self) -> Value:
        """The value. Raises RequestError."""
        await self._arrived.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]


class Session:
    """The requests and questions of one connection."""

    def __init__(self, deltas_bound: int = DELTAS_BOUND, unread_bytes_max: int = UNREAD_BYTES_MAX) -> None:
        self._deltas_bound = deltas_bound
        self._unread_bytes_max = unread_bytes_max
        self._decoder = msgspec.msgpack.Decoder(protocol.Frame)
        self._inboxes: dict[str, Inbox] = {}
        self._answers: dict[int, Answer[Reply]] = {}
        self._tickets = 0
        self._handlers: dict[type[protocol.Event], Callable[..., None]] = {
            protocol.Welcome: self._on_welcome,
            protocol.Accepted: self._on_accepted,
            protocol.Prompt: self._on_prompt,
            protocol.Tokens: self._on_tokens,
            protocol.TokenIds: self._on_token_ids,
            protocol.ChoiceFinished: self._on_choice_finished,
            protocol.Finished: self._on_finished,
            protocol.Failed: self._on_failed,
            protocol.DuplicateRequest: self._on_duplicate,
            protocol.State: self._on_answer,
            protocol.Explained: self._on_answer,
            protocol.PolicySwapped: self._on_answer,
            protocol.ShadowSet: self._on_answer,
            protocol.AbortedAny: self._on_answer,
            protocol.ProtocolError: self._on_protocol_error,
            protocol.Draining: self._on_draining,
        }
        self.welcome: Answer[protocol.Welcome] = Answer()
        self.draining: Answer[None] = Answer()
        self.lost: RequestError | None = None
        """Why the connection ended, once it has."""
        self.overrun: list[str] = []
        """Requests that failed because nobody reads them; whoever owns the socket aborts them."""
        self.heard_ns = 0
        """When the last frame came."""

    @property
    def busy(self) -> bool:
        """True while somebody waits for the server."""
        return bool(self._inboxes or self._answers)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._inboxes

    def open_request(self, request_id: str) -> Inbox:
        """Events of `request_id` go into the inbox from now on; the id must not be live."""
        assert request_id not in self._inboxes
        inbox = self._inboxes[request_id] = Inbox(self._deltas_bound, self._unread_bytes_max)
        return inbox

    def open_question(self) -> tuple[int, Answer[Reply]]:
        """A new ticket and where its answer will be."""
        self._tickets += 1
        answer: Answer[Reply] = Answer()
        self._answers[self._tickets] = answer
        return self._tickets, answer

    def close_question(self, ticket: int) -> None:
        self._answers.pop(ticket, None)

    def receive(self, payload: bytes, now_ns: int) -> None:
        """Hand out the events of one frame. A frame that is not one loses the connection."""
        self.heard_ns = now_ns
        try:
            frame = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.lose(RequestError("protocol", f"the server sent something that is no muxk frame: {error}"))
            return
        for event in frame.events:
            self._handlers[type(event)](event, now_ns)

    def lose(self, error: RequestError) -> None:
        """The connection is over: everything that is open fails."""
        if self.lost is None:
            self.lost = error
        inboxes, self._inboxes = self._inboxes, {}
        answers, self._answers = self._answers, {}
        for inbox in inboxes.values():
            inbox.fail(error)
        self.welcome.fail(error)
        self.draining.fail(error)
        for answer in answers.values():
            answer.fail(error)

    def _on_welcome(self, event: protocol.Welcome, _now_ns: int) -> None:
        self.welcome.give(event)

    def _on_accepted(self, event: protocol.Accepted, _now_ns: int) -> None:
        if inbox := self._inboxes.get(event.request_id):
            inbox.accept(event)

    def _on_prompt(self, event: protocol.Prompt, _now_ns: int) -> None:
        if inbox := self._inboxes.get(event.request_id):
            inbox.show_prompt(event)

    def _on_tokens(self, event: protocol.Tokens, now_ns: int) -> None:
        inbox = self._inboxes.get(event.request_id)
        if inbox is None or inbox.ended:
            return
        inbox.put(event, now_ns)
        if inbox.overrun:  # its name stays taken until the server says that it ended
            inbox.fail(RequestError("slow_reader", UNREAD))
            self.overrun.append(event.request_id)

    def _on_token_ids(self, event: protocol.TokenIds, now_ns: int) -> None:
        choices = event.choices or (0,) * len(event.request_ids)
        for name, token_id, choice in zip(event.request_ids, event.token_ids, choices, strict=False):
            self._on_tokens(protocol.Tokens(name, "", (token_id,), choice), now_ns)

    def _on_choice_finished(self, event: protocol.ChoiceFinished, _now_ns: int) -> None:
        if inbox := self._inboxes.get(event.request_id):
            inbox.finish_choice(event)

    def _on_finished(self, event: protocol.Finished, _now_ns: int) -> None:
        if inbox := self._inboxes.pop(event.request_id, None):
            inbox.finish(event)

    def _on_failed(self, event: protocol.Failed, _now_ns: int) -> None:
        if inbox := self._inboxes.pop(event.request_id, None):
            inbox.fail(RequestError(event.code, event.message))

    def _on_duplicate(self, event: protocol.DuplicateRequest, _now_ns: int) -> None:
        """Not terminal, and this client never sends a live id twice: the first request goes on."""

    def _on_answer(self, event: Reply, _now_ns: int) -> None:
        if answer := self._answers.pop(event.ticket, None):
            answer.give(event)

    def _on_protocol_error(self, event: protocol.ProtocolError, _now_ns: int) -> None:
        """One command was not understood, and the server can not say which: what is unanswered fails."""
        error = RequestError("protocol", f"the server did not understand a command: {event.message}")
        for request_id in [name for name, inbox in self._inboxes.items() if not inbox.heard]:
            self._inboxes.pop(request_id).fail(error)
        answers, self._answers = self._answers, {}
        self.welcome.fail(error)
        for answer in answers.values():
            answer.fail(error)

    def _on_draining(self, _event: protocol.Draining, _now_ns: int) -> None:
        self.draining.give(None)
