"""One DEALER socket with its monitor, for use from one event loop. Never waits, except in `readable`.

The descriptors are edge-triggered and any call on a socket may take the edge, so every wake-up and every send
is followed by reading until the socket is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import anyio
import zmq
from muxk.kernel.curve import CurveClient
from muxk.kernel.keepalive import notice_dead_hosts
from zmq.utils.monitor import recv_monitor_message

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""A server that sends a larger frame is disconnected by ZeroMQ."""

SEND_BOUND = 4096
"""Commands that may wait in the socket."""

RECEIVE_BOUND = 4096
"""Frames that wait while the event loop is blocked; beyond them the server holds back, then gives up."""

NEVER_AGAIN_MS = 24 * 3600 * 1000
"""Until ZeroMQ would connect again; `Wire` disconnects before. With -1, 'do not reconnect', the end of the
connection throws away what the server sent before and nobody read yet."""

LINGER_MS = 200
"""How long closing may take to get the last command out."""

LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Wire:
    """A connection that is never remade: when the peer goes, `lost` says so and stays true."""

    def __init__(
        self, endpoint: str, receive: Callable[[bytes], None], curve: CurveClient | None = None
    ) -> None:
        """`receive` is called with each frame; `curve` is for a server that wants keys.

        Raises zmq.ZMQError when the endpoint makes no sense.
        """
        self._endpoint = endpoint
        self._receive = receive
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._configure()
            if curve is not None:
                self._use_keys(curve)
            events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | LOST | HANDSHAKE_FAILED
            self._monitor = self._socket.get_monitor_socket(events)
            self._socket.connect(endpoint)
        except (zmq.ZMQError, OSError):
            self._context.destroy(linger=0)
            raise
        self.connected = False
        self.set_up = False
        """The two sides understood each other, and the server let this client in."""
        self.lost = False

    def _configure(self) -> None:
        self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_AGAIN_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.setsockopt(zmq.SNDHWM, SEND_BOUND)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_BOUND)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        notice_dead_hosts(self._socket)

    def _use_keys(self, curve: CurveClient) -> None:
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.keys.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.keys.secret)

    def try_send(self, payload: bytes) -> bool:
        """Send one frame; False when too many wait. Frames that came meanwhile are received."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self.drain()
        return True

    def drain(self) -> None:
        """Receive every frame that is there."""
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(payload)

    def watch(self) -> None:
        """Read what happened to the connection; frames that came before its end are received first."""
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_CONNECTED:
                self.connected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.set_up = True
            else:
                self.drain()
                self._lose()

    def _lose(self) -> None:
        """Requests do not survive the connection, so neither does the wire."""
        self.lost = True
        with suppress(zmq.ZMQError):  # ZeroMQ may have given the connection up by itself
            self._socket.disconnect(self._endpoint)

    async def readable(self) -> None:
        """Until frames may have come."""
        await anyio.wait_readable(int(self._socket.getsockopt(zmq.FD)))

    async def changed(self) -> None:
        """Until something may have happened to the connection."""
        await anyio.wait_readable(int(self._monitor.getsockopt(zmq.FD)))

    def close(self) -> None:
        """Close; idempotent. Nobody may wait in `readable` or `changed` any more."""
        if self._context.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=LINGER_MS if self.connected and not self.lost else 0)
