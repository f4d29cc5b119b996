"""The asynchronous client: many streams in one loop, and how it ends."""

from __future__ import annotations

import anyio
import pytest
import zmq
from fake_gateway import FakeGateway, finished, patient
from muxk.client import AsyncClient, RequestError, protocol
from muxk.client.wire import Wire

STREAMS = 200


def test_two_hundred_streams_at_once_are_all_whole(endpoint: str) -> None:
    async def main() -> list[str]:
        texts = []

        async def one(number: int) -> None:
            stream = await client.submit(str(number), max_tokens=5)
            texts.append("".join([delta.text async for delta in stream]))

        async with AsyncClient(endpoint) as client, anyio.create_task_group() as tasks:
            for number in range(STREAMS):
                tasks.start_soon(one, number)
        return texts

    with FakeGateway(endpoint):
        assert anyio.run(main) == ["w0 w1 w2 w3 w4 "] * STREAMS


def test_an_error_in_the_block_comes_out_as_it_is(endpoint: str) -> None:
    async def main() -> None:
        async with AsyncClient(endpoint):
            raise KeyError("mine")

    with FakeGateway(endpoint), pytest.raises(KeyError, match="mine"):
        anyio.run(main)


def test_a_cancelled_reader_leaves_the_stream_readable(endpoint: str) -> None:
    async def main() -> str:
        async with AsyncClient(endpoint) as client:
            stream = await client.submit("go on")
            await stream.accepted()
            with anyio.move_on_after(0.02):
                await stream.result()
            gateway.say(protocol.Tokens(stream.request_id, "more", (2,)), finished(stream.request_id))
            return (await stream.result()).text

    with FakeGateway(endpoint, patient) as gateway:
        assert anyio.run(main) == "first more"


def test_a_client_that_is_not_open_says_so(endpoint: str) -> None:
    async def main() -> None:
        client = AsyncClient(endpoint)
        assert not client.connected
        with pytest.raises(RequestError, match="not connected"):
            await client.submit("hello")
        async with client:
            assert client.connected
            stream = await client.submit("hello")
        with pytest.raises(RequestError, match="the client was closed"):
            await stream.result()

    with FakeGateway(endpoint, patient):
        anyio.run(main)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_client_that_was_busy_when_its_server_ended_reads_all_that_was_sent(
    transport: str, endpoint: str
) -> None:
    read: list[bytes] = []
    sent = [b"%d" % number for number in range(100)]

    async def until_lost(wire: Wire) -> None:
        with anyio.fail_after(10):
            wire.watch()
            while not wire.lost:
                await wire.changed()
                wire.watch()

    with zmq.Context() as context:
        server = context.socket(zmq.ROUTER)
        server.bind(endpoint if transport == "ipc" else "tcp://127.0.0.1:*")
        wire = Wire(server.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), read.append)
        wire.try_send(b"hello")
        peer, _ = server.recv_multipart()
        for payload in sent:
            server.send_multipart((peer, payload))
        server.close(linger=10_000)
    anyio.run(until_lost, wire)
    wire.close()
    assert read == sent
