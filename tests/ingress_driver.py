"""An ingress with an echoing gateway in the test's loop, and real DEALER sockets in another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import anyio
import zmq
from muxk.kernel.actor import Actor, ActorSpec
from muxk.kernel.ingress import Ingress
from muxk.kernel.messages import FrameReceived, PeerGone, PeerSlow, SendFrame
from muxk.kernel.names import INGRESS
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.trace import Trace

WAIT_MS = 10_000
TCP = "tcp://127.0.0.1:*"


class Gateway(Actor):
    """Echoes; some payloads are commands. It tells its last peer what it hears about others."""

    Accepts: ClassVar = FrameReceived | PeerGone | PeerSlow

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.peers: list[bytes] = []
        self.first: bytes | None = None
        self.last = b""
        self.told = False

    def on_frame_received(self, message: FrameReceived) -> None:
        self.first = self.first or message.peer
        self.last = message.peer
        self.frames.append(message.payload)
        self.peers.append(message.peer)
        if message.payload == b"quit":
            self.stop("quit")
        elif message.payload == b"poke the first":
            self.send(INGRESS, SendFrame(peer=self.first, payload=b"poke"))
        elif message.payload == b"flood the first":
            self._flood(self.first)
        else:
            self.send(INGRESS, SendFrame(peer=message.peer, payload=message.payload))

    def _flood(self, peer: bytes) -> None:
        for _ in range(200):
            self.send(INGRESS, SendFrame(peer=peer, payload=bytes(1 << 20)))

    def on_peer_gone(self, message: PeerGone) -> None:
        self.send(INGRESS, SendFrame(peer=self.last, payload=b"gone" if message.peer == self.first else b"?"))

    def on_peer_slow(self, message: PeerSlow) -> None:
        if message.peer == self.first and not self.told:
            self.told = True
            self.send(INGRESS, SendFrame(peer=self.last, payload=b"slow"))


class Clients:
    """Makes DEALER sockets for a test's client thread; closes them all."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def dealer(
        self, kind: int = zmq.DEALER, endpoint: str | None = None, **options: int | bytes
    ) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(endpoint or self.endpoint)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


def serve(
    client: Callable[[Clients], None],
    ingress: Ingress | None = None,
    bound: int = 4096,
    **options: int | bytes,
) -> Gateway:
    """Run a gateway while `client` runs in a thread; the client's errors are the test's.

    `options` are those of the socket that stops it at the end.
    """
    ingress = ingress or Ingress(TCP, 1 << 20, 100)
    gateway = Gateway()
    spec = ActorSpec("gateway", lambda: gateway, Gateway, inbox_bound=bound, permanent=True)
    runtime = RealtimeRuntime([spec], trace=Trace(), ingress=ingress)

    def run_client() -> None:
        clients = Clients(ingress.endpoint)
        try:
            client(clients)
            clients.dealer(**options).send(b"quit")
        finally:
            clients.close()

    async def main() -> None:
        reasons = []

        async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            reasons.append(await runtime.run(task_status=task_status))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                await tasks.start(run)
                await anyio.to_thread.run_sync(run_client)
        assert reasons == ["quit"]

    anyio.run(main)
    return gateway


def ask(socket: zmq.Socket[bytes], payload: bytes) -> bytes:
    socket.send(payload)
    return socket.recv()
