"""`Client`: the blocking face of `AsyncClient`, for scripts, threads and the command line.

An event loop in a background thread owns the connection; calls go to it and wait. A client may be used from
several threads, each stream from one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal
from muxk.client import protocol
from muxk.client.aio import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, SILENCE_S, AsyncClient
from muxk.client.commands import ExplainQuestion, Message, Sampling
from muxk.client.completion import Completion, Delta, Prompt
from muxk.client.inbox import DELTAS_BOUND
from muxk.client.stream import AsyncStream


class Stream:
    """The output of one request. Iterate it for `Delta`s, or call `result()`; both may be mixed.

    What happens when nobody reads it: see `AsyncStream`.
    """

    def __init__(self, stream: AsyncStream, portal: BlockingPortal) -> None:
        self._stream = stream
        self._portal = portal
        self._pending: deque[Delta] = deque()

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 until the server accepted the request."""
        return self._stream.prompt_tokens

    @property
    def text(self) -> str:
        """The text of choice 0 that was read so far."""
        return self._stream.text

    @property
    def prompt(self) -> Prompt | None:
        """The prompt as the model read it, with `echo` or `prompt_logprobs`; there before its first delta."""
        return self._stream.prompt

    @property
    def notes(self) -> tuple[str, ...]:
        """What the server had to say when it accepted the request: fields that have no effect there."""
        return self._stream.notes

    def accepted(self) -> int:
        """Wait until the server took the request; its prompt tokens. Raises RequestError."""
        return self._portal.call(self._stream.accepted)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if not self._pending:
            self._pending.extend(self._portal.call(self._stream.deltas))
        if not self._pending:
            raise StopIteration
        return self._pending.popleft()

    def result(self, timeout_s: float | None = None) -> Completion:
        """Read to the end. Raises RequestError; after a `timeout` the request goes on."""
        return self._portal.call(self._stream.result, timeout_s)

    def abort(self) -> None:
        """End the request; it then finishes with the reason `abort`. Nothing happens after its end."""
        self._portal.call(self._stream.abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaving the block early aborts the request."""
        if not self._stream.ended:
            self.abort()


class Client:
    """A connection to a muxk server.

        with Client() as client:
            for delta in client.submit("Once upon a time", max_tokens=40):
                print(delta.text, end="", flush=True)

    Raises ConnectError when no server answers.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        silence_s: float = SILENCE_S,
        deltas_bound: int = DELTAS_BOUND,
        admin: str | None = None,
        server_key: str | Path | None = None,
        keys: str | Path | None = None,
    ) -> None:
        """`endpoint` None finds the server that the same user started; the rest is as for `AsyncClient`."""
        client = AsyncClient(
            endpoint,
            connect_timeout_s=connect_timeout_s,
            answer_timeout_s=answer_timeout_s,
            silence_s=silence_s,
            deltas_bound=deltas_bound,
            admin=admin,
            server_key=server_key,
            keys=keys,
        )
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
            self._closing = stack.pop_all()

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    @property
    def server(self) -> protocol.Welcome:
        """What the server said of itself: model, device, policy at that time, context, vocabulary."""
        return self._client.server

    def submit(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        request_id: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """Send a request: a text, token ids, or chat messages; see `AsyncClient.submit`."""

        async def submit() -> AsyncStream:
            return await self._client.submit(
                prompt, token_ids=token_ids, messages=messages, request_id=request_id, **sampling
            )

        return Stream(self._portal.call(submit), self._portal)

    def abort(self, request_id: str) -> None:
        """End a request; one that is not live is ignored."""
        self._portal.call(self._client.abort, request_id)

    def state(self) -> dict[str, Any]:
        """A snapshot of the server: one entry an actor, plus `server`. Raises RequestError."""
        return self._portal.call(self._client.state)

    def swap(self, policy: str | Path, settings: Mapping[str, str] | None = None) -> protocol.PolicySwapped:
        """Replace the running policy; see `AsyncClient.swap`. Raises PolicyRefused, PolicyNotFound."""
        return self._portal.call(self._client.swap, policy, settings)

    def set_shadow(
        self, policy: str | Path | None, settings: Mapping[str, str] | None = None
    ) -> protocol.ShadowSet:
        """Have another policy asked too, which never acts; None ends that. Raises as `swap` does."""
        return self._portal.call(self._client.set_shadow, policy, settings)

    def explain(self, **question: Unpack[ExplainQuestion]) -> protocol.Explained:
        """Why requests wait, and what the policy decided; see `AsyncClient.explain`. Raises RequestError."""

        async def explain() -> protocol.Explained:
            return await self._client.explain(**question)

        return self._portal.call(explain)

    def abort_any(self, request_ids: Sequence[str] | None = None) -> int:
        """End live requests of every client, by their names, or all; how many. Raises RequestError."""
        return self._portal.call(self._client.abort_any, request_ids)

    def drain(self) -> None:
        """Have the server refuse new requests, finish what it accepted, and stop. Raises RequestError."""
        self._portal.call(self._client.drain)

    def ping(self) -> float:
        """Round trip to the server's gateway in seconds. Raises RequestError."""
        return self._portal.call(self._client.ping)

    def close(self) -> None:
        """Close the connection; live requests are aborted by the server. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
