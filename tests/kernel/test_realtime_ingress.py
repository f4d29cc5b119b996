"""The ingress, with real DEALER sockets in other threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import ClassVar

import anyio
import pytest
import zmq
from ingress_driver import TCP, WAIT_MS, Clients, Gateway, ask, serve
from muxk.client.wire import Wire
from muxk.kernel.actor import Actor, ActorSpec, ContractError, Ref
from muxk.kernel.ingress import CanNotListen, Ingress
from muxk.kernel.messages import FrameReceived, SendFrame
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.trace import Trace


@pytest.mark.parametrize("transport", ["tcp", "tcp port 0", "ipc"])
def test_frames_come_in_and_go_out_to_the_peer_that_sent_them(transport: str, tmp_path: Path) -> None:
    endpoints = {"tcp": TCP, "tcp port 0": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/s"}

    def client(clients: Clients) -> None:
        one, two = clients.dealer(), clients.dealer()
        for index in range(50):
            one.send(b"one %d" % index)
            two.send(b"two %d" % index)
        for index in range(50):
            assert one.recv() == b"one %d" % index
            assert two.recv() == b"two %d" % index

    serve(client, Ingress(endpoints[transport], 1 << 20, 1000))


def test_a_message_that_is_not_one_frame_reaches_the_gateway_as_an_empty_payload() -> None:
    def client(clients: Clients) -> None:
        dealer = clients.dealer()
        dealer.send_multipart([b"", b"delimiter as REQ sockets send it"])
        assert dealer.recv() == b""
        dealer.send_multipart([b"x"] * 300)
        assert dealer.recv() == b""
        assert ask(dealer, b"") == b""
        assert ask(dealer, bytes(range(256))) == bytes(range(256))

    ingress = Ingress(TCP, 1 << 20, 100)
    serve(client, ingress)
    assert ingress.frames_malformed == 2


def test_bytes_that_are_no_zeromq_at_all_are_ignored() -> None:
    import socket as plain

    def client(clients: Clients) -> None:
        host, port = clients.endpoint.removeprefix("tcp://").split(":")
        with plain.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(2000))
        assert ask(clients.dealer(), b"still here") == b"still here"

    serve(client)


def test_a_frame_over_the_limit_ends_only_the_connection_of_its_sender() -> None:
    def client(clients: Clients) -> None:
        good, bad = clients.dealer(), clients.dealer(RCVTIMEO=100, RECONNECT_IVL=-1, LINGER=0)
        assert ask(good, b"before") == b"before"
        bad.send(bytes(5000))
        with pytest.raises(zmq.Again):
            bad.recv()
        assert ask(good, b"after") == b"after"
        assert ask(good, bytes(4000)) == bytes(4000)

    gateway = serve(client, Ingress(TCP, 4096, 100))
    assert max(map(len, gateway.frames)) == 4000


def test_the_gateway_hears_that_a_peer_is_gone_when_it_sends_to_it() -> None:
    def client(clients: Clients) -> None:
        first, second = clients.dealer(), clients.dealer(RCVTIMEO=20)
        assert ask(first, b"hello") == b"hello"
        first.close(linger=0)
        for _ in range(WAIT_MS // 20):
            second.send(b"poke the first")
            try:
                assert second.recv() == b"gone"
                return
            except zmq.Again:
                continue
        raise AssertionError("never heard that the peer is gone")

    serve(client)


def test_the_gateway_hears_that_a_peer_does_not_read_and_others_are_served() -> None:
    def client(clients: Clients) -> None:
        first, second = clients.dealer(RCVHWM=1), clients.dealer()
        assert ask(first, b"hello") == b"hello"
        assert ask(second, b"flood the first") == b"slow"
        assert ask(second, b"echo") == b"echo"

    serve(client, Ingress(TCP, 1 << 20, 4))


def test_a_reader_that_keeps_up_is_never_called_slow_in_a_short_burst() -> None:
    def client(clients: Clients) -> None:
        dealer = clients.dealer()
        for index in range(300):
            assert ask(dealer, b"%d" % index) == b"%d" % index

    serve(client, Ingress(TCP, 1 << 20, 2))


def test_a_flood_of_frames_waits_outside_instead_of_overflowing_the_gateway() -> None:
    def client(clients: Clients) -> None:
        dealer = clients.dealer()
        reader = threading.Thread(target=lambda: [dealer.send(b"%d" % index) for index in range(3000)])
        reader.start()
        reader.join()
        assert [dealer.recv() for _ in range(3000)] == [b"%d" % index for index in range(3000)]

    serve(client, Ingress(TCP, 1 << 20, 10_000), bound=16)


def test_no_socket_sends_heartbeats_since_libzmq_aborts_the_process_by_them(tmp_path: Path) -> None:
    # A server that pings a peer which left while its frames wait behind the high-water mark is gone: see
    # kernel/keepalive.py. A client likewise, when its server goes.
    with zmq.Context() as context:
        ingress = Ingress(f"ipc://{tmp_path}/s", admin=lambda bound: f"{bound}.admin")
        ingress.open(context, print)
        wire = Wire(ingress.endpoint, print)
        sockets = [wire._socket, *(front._socket for front in ingress._fronts)]
        assert [socket.getsockopt(zmq.HEARTBEAT_IVL) for socket in sockets if socket is not None] == [0] * 3
        wire.close()
        ingress.close()


def test_an_endpoint_in_use_is_an_error_that_leaves_nothing_open() -> None:
    def client(clients: Clients) -> None:
        spec = ActorSpec("gateway", Gateway, Gateway)
        runtime = RealtimeRuntime([spec], trace=Trace(), ingress=Ingress(clients.endpoint, 1 << 20, 10))
        with pytest.raises(CanNotListen, match=r"can not listen on tcp://.*in use"):
            anyio.run(runtime.run)

    serve(client)


class Deaf(Actor):
    Accepts: ClassVar = FrameReceived

    def on_frame_received(self, message: FrameReceived) -> None: ...


def test_an_ingress_without_a_gateway_that_hears_it_is_refused() -> None:
    ingress = Ingress(TCP, 1, 1)
    with pytest.raises(ContractError, match="an actor named gateway"):
        RealtimeRuntime([ActorSpec("deaf", Deaf, Deaf)], trace=Trace(), ingress=ingress)
    with pytest.raises(ContractError, match="PeerGone, PeerSlow"):
        RealtimeRuntime([ActorSpec("gateway", Deaf, Deaf)], trace=Trace(), ingress=ingress)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_twenty_runs_with_clients_leave_no_descriptor() -> None:
    def client(clients: Clients) -> None:
        assert ask(clients.dealer(), b"hello") == b"hello"

    serve(client)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        serve(client)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_send_to_the_ingress_without_one_is_an_error_of_the_sender() -> None:
    class Sender(Actor):
        Accepts: ClassVar = FrameReceived

        def started(self) -> None:
            self.send(Ref("ingress"), SendFrame(peer=b"", payload=b""))

        def on_frame_received(self, message: FrameReceived) -> None: ...

    runtime = RealtimeRuntime([ActorSpec("sender", Sender, Sender)], trace=Trace())
    with pytest.raises(LookupError, match="ingress"):
        anyio.run(runtime.run)
