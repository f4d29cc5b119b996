"""A ROUTER socket in a thread that speaks the protocol as a test says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import msgspec
import zmq
from muxk.client import protocol

WAIT_S = 10.0
"""Bound on every wait; only a broken test or client gets there."""

Frames = Iterator[tuple[protocol.Event, ...]]
Answer = Callable[[protocol.Command], Frames]
CommandType = TypeVar("CommandType", bound=protocol.Command)


def welcome(version: int = protocol.PROTOCOL_VERSION) -> protocol.Welcome:
    return protocol.Welcome(version, "fake-model", "fake-device", "muxwise", 2048, 1000)


def finished(request_id: str, reason: str = "length", tokens: int = 0) -> protocol.Finished:
    return protocol.Finished(request_id, reason, None, 3, tokens, 0)


def talkative(command: protocol.Command) -> Frames:
    """A server that answers everything at once; a request gets `max_tokens` words."""
    match command:
        case protocol.Hello():
            yield (welcome(),)
        case protocol.Submit(request_id=name, max_tokens=count):
            yield (protocol.Accepted(name, 3),)
            for number in range(count or 3):
                yield (protocol.Tokens(name, f"w{number} ", (number,)),)
            yield (finished(name, tokens=count or 3),)
        case protocol.GetState(ticket=ticket):
            yield (protocol.State(ticket, {"server": {"policy": "muxwise", "tokens": 7}}),)
        case protocol.SwapPolicy(ticket=ticket):
            yield (protocol.PolicySwapped(ticket, True, "inflight", "abcdef0123456789", ""),)
        case protocol.AbortAny(ticket=ticket):
            yield (protocol.AbortedAny(ticket, 2),)
        case protocol.Drain():
            yield (protocol.Draining(),)


def patient(command: protocol.Command) -> Frames:
    """As `talkative`, but a request gets one word and goes on until it is aborted."""
    match command:
        case protocol.Submit(request_id=name):
            yield (protocol.Accepted(name, 3), protocol.Tokens(name, "first ", (1,)))
        case protocol.Abort(request_id=name):
            yield (finished(name, "abort", 1),)
        case _:
            yield from talkative(command)


def silent_after_hello(command: protocol.Command) -> Frames:
    """Takes everything and says nothing more."""
    if isinstance(command, protocol.Hello) and command.version:
        yield (welcome(),)


class Vanish(Exception):
    """Raised by an answer: the server ends here, as a killed process does."""


class FakeGateway:
    """Answers each command with the frames that `answer` gives, until it vanishes."""

    def __init__(self, endpoint: str, answer: Answer = talkative) -> None:
        self.endpoint = endpoint
        self.answer = answer
        self._commands: queue.Queue[protocol.Command] = queue.Queue()
        self._to_say: queue.Queue[bytes | None] = queue.Queue()
        self._bound = threading.Event()
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-gateway", daemon=True)

    def wait_for(self, kind: type[CommandType]) -> CommandType:
        """The next command of a kind; others before it are passed over."""
        while True:
            command = self._commands.get(timeout=WAIT_S)
            if isinstance(command, kind):
                return command

    def say(self, *events: protocol.Event) -> None:
        """A frame to whoever spoke last."""
        self._to_say.put(msgspec.msgpack.encode({"events": list(events)}))

    def say_raw(self, payload: bytes) -> None:
        self._to_say.put(payload)

    def vanish(self) -> None:
        """As a killed process: the connection closes and nothing more is said."""
        self._to_say.put(None)
        assert self._gone.wait(WAIT_S)

    def _serve(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(self.endpoint)
        socket.bind(f"{self.endpoint}.admin")
        self._bound.set()
        try:
            self._converse(socket)
        except Vanish:
            pass
        finally:
            context.destroy(linger=0)
            self._gone.set()

    def _converse(self, socket: Any) -> None:
        decoder = msgspec.msgpack.Decoder(protocol.AnyCommand)
        peer = b""
        while True:
            if socket.poll(5):
                peer, payload = socket.recv_multipart()
                command = decoder.decode(payload)
                for events in self.answer(command):
                    socket.send_multipart((peer, msgspec.msgpack.encode({"events": list(events)})))
                self._commands.put(command)
            while not self._to_say.empty():
                said = self._to_say.get()
                if said is None:
                    return
                socket.send_multipart((peer, said))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._bound.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._to_say.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
