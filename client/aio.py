"""`AsyncClient`: many streams over one connection, on the asyncio backend of anyio.

It reads a raw DEALER socket (`wire.py`) and hands events to a `Session`. A connection is never remade: when
the server goes, everything that is open fails with `RequestError` and a new client is needed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self, Unpack

import anyio
import zmq
from anyio.abc import TaskGroup
from msgspec.structs import replace
from muxk.client import protocol
from muxk.client.address import find
from muxk.client.commands import ExplainQuestion, Message, Sampling, encode, make_submit
from muxk.client.errors import ConnectError, PolicyRefused, RequestError
from muxk.client.inbox import DELTAS_BOUND
from muxk.client.policy_files import shadow_command, swap_command
from muxk.client.session import Answer, Reply, Session
from muxk.client.stream import AsyncStream
from muxk.client.wire import Wire

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""For `state`, `swap`, `drain` and `ping`."""

SILENCE_S = 30.0
"""A server that says nothing for this long while somebody waits, and answers no ping, is given up."""

SEND_RETRY_S = 0.002


class AsyncClient:
    """A connection to a muxk server: `async with AsyncClient() as client: ...`."""

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
        """`endpoint` None finds the server that the same user started with `muxk run`.

        `admin` is the server's admin socket, for `swap`, `abort_any` and `drain`; None finds the one of a
        server of the same user. `server_key` and `keys` are files that `muxk keys` made: the server's
        public key and this client's own pair. Raises ConnectError when they can not be used.
        """
        self._address = find(endpoint, admin=admin, server_key=server_key, keys=keys)
        self.endpoint = self._address.endpoint
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._silence_s = silence_s
        self._deltas_bound = deltas_bound
        self._session: Session | None = None
        self._wire: Wire | None = None
        self._tasks: TaskGroup | None = None
        self._welcome: protocol.Welcome | None = None

    @property
    def server(self) -> protocol.Welcome:
        """What the server said of itself: model, device, policy at that time, context, vocabulary."""
        if self._welcome is None:
            raise RequestError("closed", "the client is not connected")
        return self._welcome

    @property
    def connected(self) -> bool:
        """False before the block, after it, and once the server is gone."""
        return self._session is not None and self._session.lost is None

    async def __aenter__(self) -> Self:
        """Connect and say hello. Raises ConnectError."""
        session = self._session = Session(self._deltas_bound)
        wire = self._wire = self._open_wire(session)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._tasks.start_soon(_read, wire)
            self._tasks.start_soon(_monitor, wire, session)
            self._tasks.start_soon(_watch, wire, session, self._silence_s)
            self._welcome = await self._greet(session)
        except BaseException:
            await self._shut()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._shut()

    async def _shut(self) -> None:
        tasks, wire, session = self._tasks, self._wire, self._session
        self._tasks = self._wire = self._session = None
        try:
            if session is not None:
                session.lose(RequestError("closed", "the client was closed"))
            if tasks is not None:
                tasks.cancel_scope.cancel()
                await tasks.__aexit__(None, None, None)  # None: or an error of the block comes in a group
        finally:
            if wire is not None:
                wire.close()

    def _open_wire(self, session: Session) -> Wire:
        def receive(payload: bytes) -> None:
            session.receive(payload, time.perf_counter_ns())
            while session.overrun:
                wire.try_send(encode(protocol.Abort(session.overrun.pop())))

        try:
            wire = Wire(self.endpoint, receive, self._address.curve)
            return wire
        except (zmq.ZMQError, OSError) as error:
            raise ConnectError(self.endpoint, f"the endpoint can not be used ({error})") from error

    async def _greet(self, session: Session) -> protocol.Welcome:
        """Hello and its answer."""
        try:
            with anyio.fail_after(self._connect_timeout_s):
                await self._send(protocol.Hello())
                welcome = await session.welcome.wait()
        except TimeoutError:
            reason = f"it did not answer within {self._connect_timeout_s:g} s"
            raise ConnectError(self.endpoint, reason) from None
        except RequestError as error:
            raise ConnectError(self.endpoint, error.message) from None
        if welcome.version != protocol.PROTOCOL_VERSION:
            versions = f"version {welcome.version}, this client {protocol.PROTOCOL_VERSION}"
            raise ConnectError(self.endpoint, f"the server speaks protocol {versions}")
        return welcome

    def _live_session(self) -> Session:
        if self._session is None:
            raise RequestError("closed", "the client is not connected")
        if self._session.lost is not None:
            raise self._session.lost
        return self._session

    async def _send(self, command: protocol.Command) -> None:
        payload = encode(command)
        while True:
            self._live_session()
            assert self._wire is not None
            if self._wire.try_send(payload):
                return
            await anyio.sleep(SEND_RETRY_S)

    async def submit(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        request_id: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """Send a request: a text, token ids, or chat messages (`{"role": ..., "content": ...}`).

        The other arguments are the fields of `protocol.Submit`, with the names and meanings of vLLM's
        SamplingParams. Raises RequestError when the request can not be sent; what the server refuses is
        raised by the stream.
        """
        name = request_id if request_id is not None else uuid.uuid4().hex
        command = make_submit(name, prompt, token_ids, messages, sampling)
        encode(command)  # a mistake is raised before the request is open
        session = self._live_session()
        if session.is_live(name):
            raise RequestError("invalid", f"request {name!r} is still live")
        stream = AsyncStream(name, max(1, command.n), session.open_request(name), self.abort)
        await self._send(command)
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request; one that is not live is ignored."""
        session = self._session
        if session is not None and session.lost is None and session.is_live(request_id):
            await self._send(protocol.Abort(request_id))

    async def state(self) -> dict[str, Any]:
        """A snapshot of the server: one entry an actor, plus `server`. Raises RequestError."""
        session = self._live_session()
        ticket, answer = session.open_question()
        event = await self._ask(protocol.GetState(ticket), ticket, answer)
        assert isinstance(event, protocol.State)
        return event.state

    async def swap(
        self, policy: str | Path, settings: Mapping[str, str] | None = None
    ) -> protocol.PolicySwapped:
        """Replace the running policy by a file, a shipped name, or YAML text of several lines.

        Any other name is that of a policy in Python that is installed where the server runs. Requests go on.
        Raises PolicyRefused with every mistake (the old policy stays), PolicyNotFound, ConnectError when the
        admin socket is not there, RequestError.
        """
        command = swap_command(policy, settings)
        async with self._as_admin() as admin:
            ticket, answer = admin._live_session().open_question()
            event = await admin._ask(replace(command, ticket=ticket), ticket, answer)
        assert isinstance(event, protocol.PolicySwapped)
        if not event.accepted:
            raise PolicyRefused(event.report)
        return event

    async def set_shadow(
        self, policy: str | Path | None, settings: Mapping[str, str] | None = None
    ) -> protocol.ShadowSet:
        """Have another policy asked too, which never acts; None ends that. Raises as `swap` does."""
        command = shadow_command(policy, settings)
        async with self._as_admin() as admin:
            ticket, answer = admin._live_session().open_question()
            event = await admin._ask(replace(command, ticket=ticket), ticket, answer)
        assert isinstance(event, protocol.ShadowSet)
        if not event.accepted:
            raise PolicyRefused(event.report)
        return event

    async def explain(self, **question: Unpack[ExplainQuestion]) -> protocol.Explained:
        """Why requests wait, and what the policy decided; the arguments are the fields of `protocol.Explain`.

        A connection to the clients' socket learns of its own requests only. Raises RequestError.
        """
        ticket, answer = self._live_session().open_question()
        event = await self._ask(protocol.Explain(**question, ticket=ticket), ticket, answer)
        assert isinstance(event, protocol.Explained)
        if event.error:
            raise RequestError("not_explained", event.error)
        return event

    async def abort_any(self, request_ids: Sequence[str] | None = None) -> int:
        """End live requests of every client, by their names, or all; how many. Raises as `swap` does."""
        async with self._as_admin() as admin:
            ticket, answer = admin._live_session().open_question()
            names = None if request_ids is None else list(request_ids)
            event = await admin._ask(protocol.AbortAny(names, ticket), ticket, answer)
        assert isinstance(event, protocol.AbortedAny)
        return event.requests

    async def drain(self) -> None:
        """Have the server refuse new requests, finish what it accepted, and stop. Raises as `swap` does."""
        async with self._as_admin() as admin:
            session = admin._live_session()
            try:
                with _answer_within(self._answer_timeout_s):
                    await admin._send(protocol.Drain())
                    await session.draining.wait()
            except RequestError as error:
                if error.code != "server_gone":  # an idle server has nothing to finish and stops at once
                    raise

    @asynccontextmanager
    async def _as_admin(self) -> AsyncIterator[AsyncClient]:
        """A connection to the admin socket: this one if it leads there, else another for the moment."""
        if self.endpoint == self._address.admin:
            yield self
            return
        self._live_session()
        admin = AsyncClient(
            self._address.checked_admin(),
            admin=self._address.admin,
            connect_timeout_s=self._connect_timeout_s,
            answer_timeout_s=self._answer_timeout_s,
        )
        async with admin:
            yield admin

    async def ping(self) -> float:
        """Round trip to the server's gateway in seconds. Raises RequestError."""
        session = self._live_session()
        session.welcome = Answer()
        started = time.perf_counter()
        with _answer_within(self._answer_timeout_s):
            await self._send(protocol.Hello())
            await session.welcome.wait()
        return time.perf_counter() - started

    async def _ask(
        self,
        command: protocol.Command,
        ticket: int,
        answer: Answer[Reply],
    ) -> Reply:
        session = self._live_session()
        try:
            with _answer_within(self._answer_timeout_s):
                await self._send(command)
                return await answer.wait()
        finally:
            session.close_question(ticket)


@contextmanager
def _answer_within(timeout_s: float) -> Iterator[None]:
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError:
        raise RequestError("timeout", f"the server did not answer within {timeout_s:g} s") from None


async def _read(wire: Wire) -> None:
    while True:
        wire.drain()
        await wire.readable()


async def _monitor(wire: Wire, session: Session) -> None:
    """Notice the moment when the server goes."""
    wire.watch()  # a refusal may have come before anybody waited for it
    while not wire.lost:
        await wire.changed()
        wire.watch()
    session.lose(RequestError("server_gone", _why_lost(wire)))


def _why_lost(wire: Wire) -> str:
    if wire.set_up:
        return "the server is gone"
    if wire.connected:
        return "the server closed the connection before it was set up: it wants other keys, or none"
    return "nothing listens there"


async def _watch(wire: Wire, session: Session, silence_s: float) -> None:
    """Give up a server that is connected but says nothing, not even in answer to a ping."""
    half_ns = int(silence_s * 1e9 / 2)
    pinged_ns = 0
    while session.lost is None:
        await anyio.sleep(silence_s / 8)
        now_ns = time.perf_counter_ns()
        if session.heard_ns > pinged_ns:
            pinged_ns = 0
        if pinged_ns and now_ns - pinged_ns > half_ns:
            text = f"the server has been silent for {silence_s:g} s"
            session.lose(RequestError("server_silent", text))
        elif not pinged_ns and session.busy and now_ns - session.heard_ns > half_ns:
            pinged_ns = now_ns
            wire.try_send(encode(protocol.Hello()))
