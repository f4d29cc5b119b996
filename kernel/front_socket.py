"""One ROUTER socket of the ingress, bounded in what it keeps for a peer.

What a peer does not take at once is held back, in order and within bounds, and tried again; a peer that is
gone, or does not read for too long, is told to the gateway. Nobody waits for either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from muxk.kernel.actor import Message
from muxk.kernel.backlog import Backlog
from muxk.kernel.curve import CurveKeys
from muxk.kernel.keepalive import notice_dead_hosts
from muxk.kernel.messages import FrameReceived, PeerGone, PeerSlow, SendFrame
from muxk.kernel.unread import unread_bytes

MESSAGE_BYTES_MAX = 1024 * 1024
"""Default bound of one frame from a client; a peer that sends more is disconnected by ZeroMQ."""

SEND_BOUND = 1000
"""Default bound of frames queued for one peer."""

RECEIVE_BOUND = 64
"""Frames of one peer that ZeroMQ reads ahead; beyond it the peer's connection is not read from."""

PUMP_FRAMES = 8
"""Frames taken from the socket at once, so that what they cause is done within a millisecond."""

PUMP_BYTES = 256 * 1024
"""Bytes after which no further frame is taken at once."""

PUMP_SURPLUS = 64
"""Surplus parts of one message that are thrown away at once; the rest of them at the next look."""

RETRY_NS = 50_000_000
"""Between two tries to send what was held back."""

RETRY_FRAMES = 512
"""Frames that one such round sends, so that it takes about a millisecond."""

LINGER_MS = 1000
"""How long a closing socket may take to hand what ZeroMQ has of the last frames to the kernel."""

HANDSHAKE_MS = 5_000
"""A connection that is not set up by then is closed: strangers do not collect on the socket."""

ZAP_DOMAIN = b"muxk"


class CanNotListen(Exception):
    """The endpoint can not be bound; the text names it and says why."""


class FrontSocket:
    """Opened and closed by the ingress, used from the loop thread only."""

    def __init__(
        self, prefix: bytes, max_message_bytes: int, send_bound: int, keys: CurveKeys | None
    ) -> None:
        """`prefix` goes in front of every peer's identity; with `keys` the socket speaks CURVE only."""
        assert len(prefix) == 1
        assert max_message_bytes >= 1
        assert send_bound >= 1
        self._prefix = prefix
        self._max_message_bytes = max_message_bytes
        self._send_bound = send_bound
        self._keys = keys
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint = ""
        """As it was bound."""
        self._tell: Callable[[Message], None] = _nobody
        self._surplus_of: bytes | None = None
        self._backlog = Backlog()
        self._lossy: dict[bytes, int] = {}
        """Peers that lost frames, and how often the gateway was told so and has not handled it yet. Nothing
        is sent to them meanwhile: what the gateway sends would follow a gap that it does not know of."""
        self.retry_ns: int | None = None
        """When `retry` has to be called, by the monotonic clock; None while nothing is held back."""
        self.pending = False
        """True when frames may wait in the socket: its descriptor is edge-triggered."""
        self.frames_malformed = 0
        """Messages that were not exactly one frame; the gateway saw an empty payload."""

    def open(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, tell: Callable[[Message], None]
    ) -> str:
        """Bind, and return the resolved endpoint. Raises CanNotListen."""
        socket = context.socket(zmq.ROUTER)
        try:
            self._configure(socket, endpoint)
            with _files_for_the_owner_only():
                socket.bind(endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise CanNotListen(f"can not listen on {endpoint}: {error.strerror}") from error
        self._socket, self._tell, self.pending = socket, tell, True
        self._endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return self._endpoint

    def _configure(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, self._send_bound)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_BOUND)
        socket.setsockopt(zmq.LINGER, 0)  # of a peer that is gone: what it did not take keeps nothing alive
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        notice_dead_hosts(socket)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if self._keys is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)

    def fileno(self) -> int:
        """The descriptor to wait for; readable only means that `pump` should look."""
        assert self._socket is not None
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, frame: SendFrame) -> None:
        """Send without waiting, or hold the frame back until its peer reads.

        The gateway hears PeerGone when nobody is there, and PeerSlow when too much is held back already.
        """
        self.pending = True  # a send takes the edge of a frame that arrived meanwhile
        if frame.peer in self._lossy:
            self._give_up(frame.peer, frame.payload)
            return
        try:
            behind = self._backlog.holds(frame.peer)
            if behind or not self._sent_now(frame.peer, frame.payload):
                self._hold(frame)
        except zmq.ZMQError as error:
            self._lose(frame.peer, error)

    def _hold(self, frame: SendFrame) -> None:
        now_ns = time.monotonic_ns()
        if not self._backlog.hold(frame.peer, frame.payload, now_ns):
            self._give_up(frame.peer, frame.payload)
        elif self.retry_ns is None:
            self.retry_ns = now_ns + RETRY_NS

    def _lose(self, peer: bytes, error: zmq.ZMQError) -> None:
        if error.errno != zmq.EHOSTUNREACH:
            raise error
        self._backlog.drop(peer)
        self._tell(PeerGone(peer=peer))

    def retry(self) -> None:
        """Send what was held back to peers that read again, give up those that do not; at `retry_ns`."""
        now_ns = time.monotonic_ns()
        frames = RETRY_FRAMES
        self._look()
        for peer in self._backlog.peers:
            try:
                frames -= self._retry_peer(peer, frames, now_ns)
            except zmq.ZMQError as error:
                self._lose(peer, error)
            if frames <= 0:
                break
        self.retry_ns = now_ns + RETRY_NS if self._backlog.bytes else None

    def _retry_peer(self, peer: bytes, frames: int, now_ns: int) -> int:
        """How many frames were tried."""
        backlog, tried = self._backlog, 0
        self.pending = True
        while tried < frames and (payload := backlog.oldest(peer)) is not None:
            tried += 1
            if not self._sent(peer[1:], payload):
                break
            backlog.taken(peer, now_ns)
        backlog.tried(peer)
        if backlog.stalled(peer, now_ns):
            self._give_up(peer, *backlog.drop(peer))
        return tried

    def _give_up(self, peer: bytes, oldest: bytes, *more: bytes) -> None:
        self._lossy[peer] = self._lossy.get(peer, 0) + 1
        self._tell(PeerSlow(peer, oldest, more))

    def loss_heard(self, peer: bytes) -> None:
        """The gateway has handled one PeerSlow."""
        left = self._lossy.pop(peer, 0) - 1
        if left > 0:
            self._lossy[peer] = left

    def _sent_now(self, peer: bytes, payload: bytes) -> bool:
        identity = peer[1:]
        if self._sent(identity, payload):
            return True
        self._look()
        return self._sent(identity, payload)

    def _look(self) -> None:
        """Have ZeroMQ look how far the peers have read; by itself it does about once a millisecond."""
        assert self._socket is not None
        self._socket.getsockopt(zmq.EVENTS)

    def _sent(self, identity: bytes, payload: bytes) -> bool:
        assert self._socket is not None
        try:
            self._socket.send_multipart((identity, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def pump(self, frames: int) -> int:
        """Take at most `frames` frames, and say how many; `pending` stays true when there may be more."""
        taken = 0
        for count in range(min(frames, PUMP_FRAMES)):
            try:
                message = self._receive()
            except zmq.Again:
                self.pending = False
                return count
            if message is None:
                return count
            self._tell(message)
            taken += len(message.payload)
            if taken > PUMP_BYTES:
                return count + 1
        return min(frames, PUMP_FRAMES)

    def _receive(self) -> FrameReceived | None:
        """One message; None while surplus parts of one are still to be thrown away. Raises zmq.Again."""
        socket = self._socket
        assert socket is not None
        if self._surplus_of is None:
            identity = socket.recv(zmq.NOBLOCK)
            payload = socket.recv(zmq.NOBLOCK)  # a message is there as a whole or not at all
            if not socket.getsockopt(zmq.RCVMORE):
                return FrameReceived(peer=self._prefix + identity, payload=payload)
            self.frames_malformed += 1
            self._surplus_of = self._prefix + identity
        return self._thrown_away(socket)

    def _thrown_away(self, socket: zmq.Socket[bytes]) -> FrameReceived | None:
        # Part by part and without a copy: a message of very many parts is never in memory twice.
        for _ in range(PUMP_SURPLUS):
            if not socket.getsockopt(zmq.RCVMORE):
                assert self._surplus_of is not None
                message = FrameReceived(peer=self._surplus_of, payload=b"")
                self._surplus_of = None
                return message
            socket.recv(zmq.NOBLOCK, copy=False)
        return None

    def leaving(self) -> bool:
        """Try once more to send what was held back; whether frames are on their way to peers that read late.

        False may be a moment between two frames.
        """
        if self._socket is None:
            return False
        if self._backlog.bytes:
            self.retry()
        return self._backlog.bytes > 0 or unread_bytes(self._endpoint) > 0

    def close(self) -> None:
        """Unbind; what was held back is dropped, the other frames leave within LINGER_MS. Idempotent."""
        if self._socket is not None:
            self._socket.close(linger=LINGER_MS)
            self._socket = None


@contextmanager
def _files_for_the_owner_only() -> Iterator[None]:
    """An ipc socket's file is made with mode 0600, whatever the process's umask is."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _nobody(message: Message) -> None:
    raise AssertionError("the ingress is not open")
