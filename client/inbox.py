"""The side of a stream that events go into: a bounded queue, and the end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import anyio
from muxk.client import protocol
from muxk.client.completion import Delta, read_logprobs
from muxk.client.errors import RequestError

DELTAS_BOUND = 1024
"""Deltas that wait in one stream; over it newer ones are merged, so a slow reader loses nothing."""

UNREAD_BYTES_MAX = 32 * 1024 * 1024
"""About what the unread output of one request may take; over it the request is aborted."""

TOKEN_BYTES = 40
LOGPROB_BYTES = 200
TOP_LOGPROB_BYTES = 100

UNREAD = "its output was not read, and more than a client keeps of it came"


@dataclass(slots=True)
class _Piece:
    """Output that waits; pieces of one choice may be merged."""

    choice: int
    arrived_ns: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[protocol.TokenLogprob] = field(default_factory=list)

    def delta(self) -> Delta:
        logprobs = read_logprobs(self.logprobs)
        return Delta("".join(self.texts), tuple(self.token_ids), self.arrived_ns, self.choice, logprobs)


class Inbox:
    """Of one request; its owner hands events in, its stream takes them out."""

    def __init__(self, bound: int, unread_bytes_max: int = UNREAD_BYTES_MAX) -> None:
        assert bound >= 1
        self._bound = bound
        self._unread_bytes_max = unread_bytes_max
        self._unread_bytes = 0
        self._queue: deque[_Piece] = deque()
        self._newest: dict[int, _Piece] = {}
        """Of each choice that has a piece in the queue."""
        self._changed = anyio.Event()
        self.prompt_tokens = 0
        """0 until the server accepted the request."""
        self.notes: tuple[str, ...] = ()
        self.prompt: protocol.Prompt | None = None
        self.heard = False
        """True once any event came for it."""
        self.ends: dict[int, protocol.ChoiceFinished] = {}
        """By choice, of requests with several."""
        self.finished: protocol.Finished | None = None
        self.error: RequestError | None = None

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def overrun(self) -> bool:
        """More is unread than may be."""
        return self._unread_bytes > self._unread_bytes_max

    def accept(self, event: protocol.Accepted) -> None:
        self.prompt_tokens, self.notes, self.heard = event.prompt_tokens, event.notes, True
        self._wake()

    def show_prompt(self, event: protocol.Prompt) -> None:
        self.prompt, self.heard = event, True
        self._wake()

    def put(self, event: protocol.Tokens, now_ns: int) -> None:
        """Queue output; over the bound it joins the newest of its choice that waits."""
        self.heard = True
        piece = self._newest.get(event.choice)
        if piece is None or len(self._queue) < self._bound:
            piece = self._newest[event.choice] = _Piece(event.choice, now_ns)
            self._queue.append(piece)
        piece.arrived_ns = now_ns
        piece.texts.append(event.text)
        piece.token_ids += event.token_ids
        piece.logprobs += event.logprobs
        self._unread_bytes += _size(event)
        self._wake()

    def finish_choice(self, event: protocol.ChoiceFinished) -> None:
        self.ends[event.choice] = event

    def finish(self, event: protocol.Finished) -> None:
        if not self.ended:
            self.finished = event
            self._wake()

    def fail(self, error: RequestError) -> None:
        if not self.ended:
            self.error = error
            self._wake()

    def take(self) -> list[Delta]:
        """Everything that waits, oldest first."""
        taken = [piece.delta() for piece in self._queue]
        self._queue.clear()
        self._newest.clear()
        self._unread_bytes = 0
        return taken

    async def wait(self) -> None:
        """Until something was put, accepted or ended since the last `take`."""
        if not self._queue and not self.ended:
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _size(event: protocol.Tokens) -> int:
    reported = sum(LOGPROB_BYTES + TOP_LOGPROB_BYTES * len(entry.top_ids) for entry in event.logprobs)
    return len(event.text) + TOKEN_BYTES * (1 + len(event.token_ids)) + reported
