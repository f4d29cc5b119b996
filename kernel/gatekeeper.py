"""Gatekeeper: answers ZeroMQ's question whether the key of a new connection may come in (ZAP, RFC 27).

It is polled by the runtime's loop as the sockets are, so it needs no thread. ZeroMQ asks before a peer's
first frame; a peer that is refused is disconnected and the gateway never hears of it.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
QUESTION_PARTS = 7
"""Version, id, domain, address, identity, mechanism, and for CURVE 32 bytes of the client's key."""
PUMP_QUESTIONS = 8
"""Answered at once, so that strangers who knock do not hold up tokens."""


class Gatekeeper:
    """One a ZeroMQ context; used from the loop thread only."""

    def __init__(self, allows: Callable[[bytes], bool]) -> None:
        """`allows` is asked about the 32 bytes of a public key."""
        self._allows = allows
        self._socket: zmq.Socket[bytes] | None = None
        self.pending = False
        """True when questions may wait: the descriptor is edge-triggered."""
        self.refused = 0

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Before any socket with keys is bound."""
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self.pending = True

    def fileno(self) -> int:
        """The descriptor to wait for; readable only means that `pump` should look."""
        assert self._socket is not None
        return int(self._socket.getsockopt(zmq.FD))

    def pump(self, _frames: int) -> int:
        """Answer what is asked. Takes no frames: the result is 0."""
        assert self._socket is not None
        for _ in range(PUMP_QUESTIONS):
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.pending = False
                break
            self._socket.send_multipart(self._answer(question))
        return 0

    def _answer(self, question: list[bytes]) -> list[bytes]:
        assert len(question) >= 2, "ZeroMQ itself asks"
        allowed = (
            len(question) == QUESTION_PARTS
            and question[0] == ZAP_VERSION
            and question[5] == b"CURVE"
            and self._allows(question[6])
        )
        self.refused += not allowed
        status = (b"200", b"OK") if allowed else (b"400", b"unknown key")
        return [ZAP_VERSION, question[1], *status, b"", b""]

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
