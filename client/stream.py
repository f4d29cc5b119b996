"""`AsyncStream`: the reading side of one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

import anyio
from muxk.client.errors import RequestError
from muxk.client.session import Completion, Delta, Inbox


class AsyncStream:
    """The output of one request. Iterate it for `Delta`s, or await `result()`; both may be mixed."""

    def __init__(self, request_id: str, inbox: Inbox, abort: Callable[[str], Awaitable[None]]) -> None:
        self.request_id = request_id
        self._inbox = inbox
        self._abort = abort
        self._pending: deque[Delta] = deque()
        self._texts: list[str] = []
        self._token_ids: list[int] = []

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
        """The text that was read so far."""
        return "".join(self._texts)

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
            self._texts.append(delta.text)
            self._token_ids.extend(delta.token_ids)
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
        return Completion(
            text=self.text,
            token_ids=tuple(self._token_ids),
            finish_reason=finished.finish_reason,
            stop_reason=finished.stop_reason,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
        )

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
