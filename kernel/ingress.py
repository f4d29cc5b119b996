"""Ingress: the ROUTER socket that clients connect to, polled by the realtime runtime's loop.

Every frame becomes `FrameReceived` to the actor named `gateway`; `SendFrame` to `Ref("ingress")` sends one
without waiting. What a peer does not take at once is held back, in order and within bounds, and tried again;
a peer that is gone, or does not read for too long, is told to the gateway. Nobody waits for either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq
from muxk.kernel.actor import ActorSpec, ContractError, Message, accepted_types
from muxk.kernel.backlog import Backlog
from muxk.kernel.messages import FrameReceived, PeerGone, PeerSlow, SendFrame
from muxk.kernel.names import GATEWAY_NAME

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

RETRY_NS = 50_000_000
"""Between two tries to send what was held back."""

RETRY_FRAMES = 512
"""Frames that one such round sends, so that it takes about a millisecond."""

LINGER_MS = 200
"""How long a stopping server waits for the last frames to leave."""

HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000


class CanNotListen(Exception):
    """The endpoint can not be bound; the text names it and says why."""


class Ingress:
    """One ROUTER socket. Opened and closed by the runtime, used from the loop thread only."""

    def __init__(
        self,
        endpoint: str,
        max_message_bytes: int = MESSAGE_BYTES_MAX,
        send_bound: int = SEND_BOUND,
    ) -> None:
        """`endpoint` is `ipc://...` in a directory of mode 0700, or `tcp://127.0.0.1:*` for a free port."""
        assert max_message_bytes >= 1
        assert send_bound >= 1
        self._endpoint = endpoint
        self._max_message_bytes = max_message_bytes
        self._send_bound = send_bound
        self._socket: zmq.Socket[bytes] | None = None
        self._tell: Callable[[Message], None] = _nobody
        self._backlog = Backlog()
        self.retry_ns: int | None = None
        """When `retry` has to be called, by the monotonic clock; None while nothing is held back."""
        self.pending = False
        """True when frames may wait in the socket: its descriptor is edge-triggered."""
        self.frames_malformed = 0
        """Messages that were not exactly one frame; the gateway saw an empty payload."""

    @property
    def endpoint(self) -> str:
        """The resolved endpoint, once it is open; before that, the one that was asked for."""
        return self._endpoint

    def open(self, context: zmq.Context[zmq.Socket[bytes]], tell: Callable[[Message], None]) -> None:
        """Bind; `tell` queues a message for the gateway. Raises CanNotListen."""
        socket = context.socket(zmq.ROUTER)
        try:
            self._configure(socket)
            socket.bind(
                self._endpoint.replace(":0", ":*") if self._endpoint.endswith(":0") else self._endpoint
            )
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise CanNotListen(f"can not listen on {self._endpoint}: {error.strerror}") from error
        self._endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._socket, self._tell, self.pending = socket, tell, True

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, self._send_bound)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_BOUND)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)

    def fileno(self) -> int:
        """The descriptor to wait for; readable only means that `pump` should look."""
        assert self._socket is not None
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, frame: SendFrame) -> None:
        """Send without waiting, or hold the frame back until its peer reads.

        The gateway hears PeerGone when nobody is there, and PeerSlow when too much is held back already.
        """
        self.pending = True  # a send takes the edge of a frame that arrived meanwhile
        try:
            behind = self._backlog.holds(frame.peer)
            if behind or not (self._sent(frame) or self._sent_after_look(frame)):
                self._hold(frame)
        except zmq.ZMQError as error:
            self._lose(frame.peer, error)

    def _hold(self, frame: SendFrame) -> None:
        now_ns = time.monotonic_ns()
        if not self._backlog.hold(frame.peer, frame.payload, now_ns):
            self._tell(PeerSlow(peer=frame.peer, payload=frame.payload))
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
            frame = SendFrame(peer, payload)
            if not (self._sent(frame) or self._sent_after_look(frame)):
                break
            backlog.taken(peer, now_ns)
        backlog.tried(peer)
        if backlog.stalled(peer, now_ns):
            oldest, *more = backlog.drop(peer)
            self._tell(PeerSlow(peer, oldest, tuple(more)))
        return tried

    def _sent(self, frame: SendFrame) -> bool:
        assert self._socket is not None
        try:
            self._socket.send_multipart((frame.peer, frame.payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _sent_after_look(self, frame: SendFrame) -> bool:
        # ZeroMQ looks how far the peer has read about once a millisecond; asking for EVENTS makes it look.
        assert self._socket is not None
        self._socket.getsockopt(zmq.EVENTS)
        return self._sent(frame)

    def pump(self, frames: int) -> None:
        """Take at most `frames` frames; `pending` stays true when there may be more."""
        assert self._socket is not None
        taken = 0
        for _ in range(min(frames, PUMP_FRAMES)):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.pending = False
                return
            self._tell(self._received(parts))
            taken += sum(map(len, parts))
            if taken > PUMP_BYTES:
                return

    def _received(self, parts: list[bytes]) -> FrameReceived:
        if len(parts) == 2:
            return FrameReceived(peer=parts[0], payload=parts[1])
        self.frames_malformed += 1
        return FrameReceived(peer=parts[0], payload=b"")

    def close(self) -> None:
        """Unbind; frames already queued leave within LINGER_MS. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _nobody(message: Message) -> None:
    raise AssertionError("the ingress is not open")


def check_gateway(specs: Sequence[ActorSpec]) -> None:
    """Raise ContractError unless one of the actors is a gateway that hears what the ingress says."""
    for spec in specs:
        if spec.name == GATEWAY_NAME:
            missing = {FrameReceived, PeerGone, PeerSlow} - set(accepted_types(spec.actor_class))
            if missing:
                names = ", ".join(sorted(message.__name__ for message in missing))
                raise ContractError(f"the gateway of an ingress has to accept {names}")
            return
    raise ContractError(f"an ingress needs an actor named {GATEWAY_NAME}")
