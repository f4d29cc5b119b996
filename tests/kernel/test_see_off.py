"""What was sent to a client that reads late arrives before a server that stops in order is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
import zmq
from ingress_driver import TCP, WAIT_MS
from muxk.kernel import ingress as ingress_module
from muxk.kernel.actor import Actor, ActorSpec
from muxk.kernel.ingress import LEAVE_S, Ingress
from muxk.kernel.messages import FrameReceived, PeerGone, PeerSlow, SendFrame
from muxk.kernel.names import INGRESS
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.trace import Trace
from muxk.kernel.unread import unread_bytes

BEHIND = 30
"""Frames sent after the first one that is held back."""
FEW = 60
"""Frames that fit what the kernel holds for a connection."""
FRAME = bytes(1000)

Reads = Callable[["Stopping", "zmq.Socket[bytes]"], None]


class Flooder(Actor):
    """Sends what its peer asks for, then stops, all in one handler."""

    Accepts: ClassVar = FrameReceived | PeerGone | PeerSlow

    def __init__(self, ingress: Ingress, stopped: threading.Event) -> None:
        self._ingress = ingress
        self._stopped = stopped
        self.sent = 0

    def on_frame_received(self, message: FrameReceived) -> None:
        while message.payload == b"flood" and self._ingress.retry_ns is None:
            self._send(message.peer)
        for _ in range(BEHIND if message.payload == b"flood" else FEW):
            self._send(message.peer)
        self.stop("drained")
        self._stopped.set()

    def _send(self, peer: bytes) -> None:
        self.send(INGRESS, SendFrame(peer, b"%06d" % self.sent + FRAME))
        self.sent += 1

    def on_peer_gone(self, message: PeerGone) -> None: ...

    def on_peer_slow(self, message: PeerSlow) -> None: ...


class Stopping:
    """A server of a Flooder, and one client of it, which reads nothing until the server is to stop."""

    def __init__(self, endpoint: str, asked: bytes = b"flood") -> None:
        self._asked = asked
        self.ingress = Ingress(endpoint, send_bound=2 if asked == b"flood" else FEW)
        self.stopped, self.gone = threading.Event(), threading.Event()
        self.gateway = Flooder(self.ingress, self.stopped)
        spec = ActorSpec("gateway", lambda: self.gateway, Flooder, inbox_bound=4096, permanent=True)
        self.runtime = RealtimeRuntime([spec], trace=Trace(), ingress=self.ingress)

    def run(self, read: Reads) -> None:
        """`read` runs in a thread of its own; the client's own queue has room for two frames."""

        def client() -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.RCVHWM, 2)
                dealer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.RECONNECT_IVL, 3_600_000)
                dealer.connect(self.ingress.endpoint)
                dealer.send(self._asked)
                assert self.stopped.wait(WAIT_MS / 1000)
                read(self, dealer)

        async def serve(*, task_status: Any) -> None:
            assert await self.runtime.run(task_status=task_status) == "drained"
            self.gone.set()

        async def main() -> None:
            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    await tasks.start(serve)
                    await anyio.to_thread.run_sync(client)

        anyio.run(main)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_frames_that_were_held_back_arrive_in_their_order_before_the_server_is_gone(
    transport: str, tmp_path: Path
) -> None:
    numbers: list[int] = []

    def read_all(server: Stopping, dealer: zmq.Socket[bytes]) -> None:
        while len(numbers) < server.gateway.sent:
            numbers.append(int(dealer.recv()[:6]))

    server = Stopping(f"ipc://{tmp_path}/s" if transport == "ipc" else TCP)
    server.run(read_all)
    assert server.gateway.sent > BEHIND
    assert numbers == list(range(server.gateway.sent))


def test_what_the_kernel_holds_for_a_late_reader_is_not_lost_by_the_end_of_the_server(tmp_path: Path) -> None:
    # Over ipc the end of a connection is noticed at once, and libzmq drops what was not read by then when the
    # client's own queue is full.
    numbers: list[int] = []

    def read_late(server: Stopping, dealer: zmq.Socket[bytes]) -> None:
        assert not server.gone.wait(0.3)
        while len(numbers) < server.gateway.sent:
            numbers.append(int(dealer.recv()[:6]))

    server = Stopping(f"ipc://{tmp_path}/s", b"a few")
    server.run(read_late)
    assert numbers == list(range(server.gateway.sent))


def test_a_client_that_never_reads_keeps_a_stopping_server_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress_module, "LEAVE_S", 0.2)
    started_s = time.monotonic()
    Stopping(f"ipc://{tmp_path}/s").run(lambda server, _: _assert_gone(server))
    assert time.monotonic() - started_s > 0.2


def test_whoever_asks_again_need_not_wait_for_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress_module, "LEAVE_S", 60.0)

    def hurry(server: Stopping, _: zmq.Socket[bytes]) -> None:
        server.runtime.request_stop("stopped by a second signal")
        _assert_gone(server)

    Stopping(f"ipc://{tmp_path}/s").run(hurry)


def _assert_gone(server: Stopping) -> None:
    assert server.gone.wait(WAIT_MS / 1000)


def test_a_server_without_late_readers_is_gone_at_once(tmp_path: Path) -> None:
    started_s = time.monotonic()

    async def main() -> None:
        ingress = Ingress(f"ipc://{tmp_path}/s", admin=lambda bound: f"{bound}.admin")
        with zmq.Context() as context:
            ingress.open(context, lambda message: None)
            await ingress.see_off(lambda: False)
            ingress.close()

    anyio.run(main)
    assert time.monotonic() - started_s < LEAVE_S / 2


@pytest.mark.parametrize("name", ["s", "@abstract"])
def test_bytes_that_a_peer_has_not_read_are_those_of_connections_to_the_endpoint_only(
    name: str, tmp_path: Path
) -> None:
    path = f"{tmp_path}/{name}" if name == "s" else f"{name}/{tmp_path}"
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX) as client,
        socket.create_server(("127.0.0.1", 0)) as over_tcp,
    ):
        listening.bind("\0" + path[1:] if path.startswith("@") else path)
        listening.listen()
        client.connect(listening.getsockname())
        connection, _ = listening.accept()
        with connection:
            assert unread_bytes(f"ipc://{path}") == 0
            connection.sendall(bytes(100))
            client.sendall(bytes(100))
            assert unread_bytes(f"ipc://{path}") >= 100
            assert unread_bytes(f"ipc://{path}.other") == 0
            assert unread_bytes(f"tcp://127.0.0.1:{over_tcp.getsockname()[1]}") == 0
            client.recv(100)
            assert unread_bytes(f"ipc://{path}") == 0


def test_bytes_on_a_full_tcp_connection_are_seen_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with socket.create_connection(listening.getsockname()) as client:
            connection, _ = listening.accept()
            with connection:
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    while True:
                        connection.send(bytes(1 << 20))
                assert unread_bytes(endpoint) > 0
                client.close()
