"""Inboxes of the realtime runtime: one ZeroMQ inproc endpoint for each generation of an actor.

Every socket is used by one thread: the loop thread owns the PULL socket and one PUSH socket, every other
thread that posts has a PUSH socket of its own. The bound is an exact count on the side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zmq
from muxk.kernel import codec
from muxk.kernel.actor import ContractError, Message
from muxk.kernel.supervisor import Child, InboxOverflow


class Inbox:
    """The inbox of one generation of an actor."""

    __slots__ = (
        "bound",
        "child",
        "decode",
        "endpoint",
        "handlers",
        "is_open",
        "lock",
        "name",
        "posted",
        "pull",
        "push",
        "receive",
        "received",
        "send",
        "sent",
    )

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], child: Child) -> None:
        self.child = child
        self.name = child.name
        self.bound = child.spec.inbox_bound
        self.endpoint = f"inproc://{child.name}/{child.generation}"
        self.handlers = child.handlers
        self.decode: Callable[[bytes], Message] = codec.decoder(child.spec.actor_class)
        self.is_open = True
        self.lock = threading.Lock()
        self.sent = 0
        """Messages queued by the loop thread."""
        self.posted = 0
        """Messages queued by other threads; `lock` guards it."""
        self.received = 0
        """Messages taken out, by the loop thread."""
        self.pull = context.socket(zmq.PULL)
        self.pull.setsockopt(zmq.RCVHWM, 0)
        self.pull.bind(self.endpoint)
        self.push = self.connect(context)
        self.receive: Callable[[int], bytes] = self.pull.recv
        self.send: Callable[[bytes, int], object] = self.push.send

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """A PUSH socket to this inbox, for the calling thread."""
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.LINGER, 0)
        # No high-water mark: ZeroMQ learns of messages read in batches and looks about once a millisecond,
        # so a mark fails sends to an inbox that is nearly empty. The exact count is the bound.
        push.setsockopt(zmq.SNDHWM, 0)
        push.connect(self.endpoint)
        return push

    @property
    def depth(self) -> int:
        """Messages that wait."""
        return self.sent + self.posted - self.received

    def reserve(self) -> bool:
        """Count a message of a foreign thread; False when it does not fit."""
        with self.lock:
            fits = self.depth < self.bound
            self.posted += fits
        return fits

    def overflow(self) -> InboxOverflow:
        """What to crash the receiver with when a message does not fit."""
        return InboxOverflow(self.name, self.bound)

    def check_accepts(self, message_type: type[Any]) -> None:
        """Raise ContractError, at the sender, for a message the receiver has no handler for."""
        if message_type not in self.handlers:
            raise ContractError(f"{self.name} does not accept {message_type.__name__}")

    def close(self) -> None:
        """Discard what waits; idempotent. Only from the loop thread."""
        self.is_open = False
        self.pull.close(linger=0)
        self.push.close(linger=0)


class PostLane:
    """The PUSH sockets of one foreign thread. The lock lets the loop thread close them at shutdown."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.thread = threading.current_thread()
        self.lock = threading.Lock()
        self.closed = False
        self._context = context
        self._sockets: dict[str, tuple[Inbox, zmq.Socket[bytes]]] = {}

    def push(self, inbox: Inbox, frame: bytes) -> bool:
        """Queue a frame, holding `lock`; False when the inbox was closed a moment ago."""
        try:
            self._socket(inbox).send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _socket(self, inbox: Inbox) -> zmq.Socket[bytes]:
        known = self._sockets.get(inbox.name)
        if known is not None and known[0] is inbox:
            return known[1]
        if known is not None:
            known[1].close(linger=0)
        socket = inbox.connect(self._context)
        self._sockets[inbox.name] = (inbox, socket)
        return socket

    def close(self) -> None:
        """Close all sockets, from any thread; idempotent."""
        with self.lock:
            self.closed = True
            for _, socket in self._sockets.values():
                socket.close(linger=0)
            self._sockets.clear()


class PostLanes:
    """A lane for every foreign thread that ever posted and still lives."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._local = threading.local()
        self._lock = threading.Lock()
        self._lanes: list[PostLane] = []
        self._closed = False

    def current(self) -> PostLane | None:
        """The lane of the calling thread, or None after `close`."""
        lane: PostLane | None = getattr(self._local, "lane", None)
        if lane is not None:
            return lane
        with self._lock:
            if self._closed:
                return None
            self._sweep()
            lane = PostLane(self._context)
            self._lanes.append(lane)
        self._local.lane = lane
        return lane

    def _sweep(self) -> None:
        for lane in [lane for lane in self._lanes if not lane.thread.is_alive()]:
            lane.close()
            self._lanes.remove(lane)

    def close(self) -> None:
        """Close the lanes of all threads; later posts are dropped."""
        with self._lock:
            self._closed = True
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
