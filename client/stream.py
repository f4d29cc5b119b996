"""`AsyncStream`: the reading side of one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

import anyio
from muxk.client import protocol
from muxk.client.completion import Choice, Completion, Delta, Logprob, Prompt, read_prompt
from muxk.client.errors import RequestError
from muxk.client.inbox import Inbox


@dataclass(slots=True)
class _Read:
    """What was read of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs


class AsyncStream:
    """The output of one request. Iterate it for `Delta`s, or await `result()`; both may be mixed.

    Deltas of several choices come as the server makes them; `Delta.choice` tells them apart. Output that
    nobody reads is kept, the newest pieces merged, up to about 32 MiB a request; over that the request is
    aborted, and its stream raises RequestError with the code `slow_reader` behind what was kept. The other
    streams of the client do not notice.
    """

    def __init__(
        self, request_id: str, choices: int, inbox: Inbox, abort: Callable[[str], Awaitable[None]]
    ) -> None:
        self.request_id = request_id
        self._inbox = inbox
        self._abort = abort
        self._pending: deque[Delta] = deque()
        self._read = {index: _Read() for index in range(choices)}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 until the server accepted the request."""
        return self._inbox.prompt_tokens

    @property
    def ended(self) -> bool:
        """True once the terminal event is here; deltas may still wait to be read."""
        return self._inbox.ended

    @property
    def text(self) -> str:
        """The text of choice 0 that was read so far."""
        return "".join(self._read[0].texts)

    @property
    def prompt(self) -> Prompt | None:
        """The prompt as the model read it, with `echo` or `prompt_logprobs`; there before its first delta."""
        return None if self._inbox.prompt is None else read_prompt(self._inbox.prompt)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the server had to say when it accepted the request: fields that have no effect there."""
        return self._inbox.notes

    async def accepted(self) -> int:
        """Wait until the server took the request; its prompt tokens. Raises RequestError."""
        while not self._inbox.heard and not self._inbox.ended:
            await self._inbox.wait()
        if self._inbox.error is not None and not self._inbox.heard:
            raise self._inbox.error
        return self._inbox.prompt_tokens

    async def deltas(self) -> list[Delta]:
        """All that was not read yet, at least one; empty at the end. Raises RequestError."""
        taken = [*self._pending, *self._take()]
        self._pending.clear()
        while not taken and not self._inbox.ended:
            await self._inbox.wait()
            taken = self._take()
        if not taken and self._inbox.error is not None:
            raise self._inbox.error
        return taken

    def _take(self) -> list[Delta]:
        taken = self._inbox.take()
        for delta in taken:
            self._read.setdefault(delta.choice, _Read()).add(delta)
        return taken

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._pending:
            self._pending.extend(await self.deltas())
        if not self._pending:
            raise StopAsyncIteration
        return self._pending.popleft()

    async def result(self, timeout_s: float | None = None) -> Completion:
        """Read to the end. Raises RequestError; after a `timeout` the request goes on."""
        with anyio.move_on_after(timeout_s):
            while await self.deltas():
                pass
        finished = self._inbox.finished
        if finished is None:
            raise RequestError("timeout", f"request {self.request_id} did not end within {timeout_s} s")
        choices = tuple(self._choice(index, finished) for index in sorted(self._read))
        return Completion(
            text=choices[0].text,
            token_ids=choices[0].token_ids,
            finish_reason=finished.finish_reason,
            stop_reason=finished.stop_reason,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
            choices=choices,
            prompt=self.prompt,
            notes=self.notes,
        )

    def _choice(self, index: int, finished: protocol.Finished) -> Choice:
        """A choice without an end of its own ended with the request."""
        end = self._inbox.ends.get(index, finished)
        read = self._read[index]
        text, token_ids, logprobs = "".join(read.texts), tuple(read.token_ids), tuple(read.logprobs)
        return Choice(index, text, token_ids, end.finish_reason, end.stop_reason, logprobs)

    async def abort(self) -> None:
        """End the request; it then finishes with the reason `abort`. Nothing happens after its end."""
        await self._abort(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leaving the block early aborts the request."""
        if not self.ended:
            with anyio.CancelScope(shield=True):
                await self.abort()
