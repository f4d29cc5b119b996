"""Token ids that a client does not read, over real sockets: it loses its streams, and nobody else does."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import zmq
from muxk.actors import protocol as wire
from muxk.client.aio import AsyncClient
from muxk.kernel.devices.sim import SimCosts, SimDevice
from served_device import generate, serve_device
from virtual_server import expected_tokens, one_by_one

PROMPT = [65 + index for index in range(20)]
CHOICES = 16
TOKENS = 400
WAIT_MS = 20_000
LONG_NAME = "x" * 256
"""Of a request whose frames fill every buffer on the way soon: each has the name once for each choice."""


class Late:
    """A connection that takes two frames, and more only when they are read."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RCVHWM, 2)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._dealer.connect(endpoint)

    def submit(self, max_tokens: int) -> None:
        submit = wire.Submit(
            LONG_NAME,
            prompt_token_ids=PROMPT,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            n=CHOICES,
        )
        self._dealer.send(msgspec.msgpack.encode(submit))

    def read(self) -> tuple[dict[int, list[int]], wire.Event]:
        """The tokens of each choice up to the terminal event, and that."""
        tokens: dict[int, list[int]] = {}
        while True:
            for event in msgspec.msgpack.decode(self._dealer.recv(), type=wire.Frame).events:
                if isinstance(event, wire.TokenIds):
                    for row in one_by_one(event):
                        tokens.setdefault(row.choice, []).extend(row.token_ids)
                elif isinstance(event, wire.Finished | wire.Failed):
                    return tokens, event

    def close(self) -> None:
        self._dealer.close()
        self._context.term()


def test_a_client_that_does_not_read_loses_its_own_stream_only_and_is_served_once_it_reads(
    tmp_path: Path,
) -> None:
    async def scenario(client: AsyncClient) -> None:
        late = Late(client.endpoint)
        try:
            late.submit(TOKENS)
            others = await generate(client, {"a": PROMPT, "b": PROMPT[:9]}, 200, temperature=0.0)
            assert others == {"a": answer[:200], "b": expected_tokens(PROMPT[:9], 200)}
            with anyio.fail_after(WAIT_MS / 1000):
                while not (await client.state())["server"]["slow_peers"]:
                    await anyio.sleep(0.01)
            tokens, end = await anyio.to_thread.run_sync(late.read)
            assert isinstance(end, wire.Failed)
            assert end.code == "slow_reader"
            assert len(tokens) == CHOICES
            for got in tokens.values():
                assert got == answer[: len(got)]
                assert 0 < len(got) < TOKENS
            late.submit(5)
            tokens, end = await anyio.to_thread.run_sync(late.read)
            assert tokens == dict.fromkeys(range(CHOICES), answer[:5])
            assert isinstance(end, wire.Finished)
            state = await client.state()
            assert (state["server"]["live"], state["kv_pool"]["pages_used"]) == (0, 0)
        finally:
            late.close()

    answer = expected_tokens(PROMPT, TOKENS)
    costs = SimCosts(decode_base_ns=500_000, decode_row_ns=1_000)
    assert serve_device(SimDevice(pages=1025, costs=costs), tmp_path, scenario, send_bound=2)
