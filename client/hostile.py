"""Messages that no client should send, for the soak test and the tests: same seed, same messages.

`python -m muxk.client.hostile ENDPOINT SEED MESSAGES` sends them over sockets of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import zmq
from muxk.client import protocol

Parts = list[bytes]

SIZE_BOUND = 1024 * 1024
"""Of a frame that the server takes."""
RARE = 400
"""One message in so many is as large as the bound allows, or nested as deep as fits."""
RECONNECT_EVERY = 5_000
"""Messages after which a sender starts again with a new connection."""
SENDERS = 4
"""The even ones read what the server answers, the odd ones never do."""
SEND_TIMEOUT_MS = 20_000

NUMBERS = (float("nan"), float("inf"), -float("inf"), -1, 0, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, 5e-324)
FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "priority", "logit_bias"),
    *("prompt", "prompt_token_ids", "messages", "stop_token_ids", "logprobs", "prompt_logprobs", "echo"),
    *("detokenize", "ignore_eos", "min_tokens", "deadline", "request_class"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, "", "x" * 5000, b"\x00\xff", [], {}, [[]], {"a": {}}, [None], ["", "x"], {"-1": 1.0}),
    *([2**40], [-1], [1.5], [{"role": 1, "content": None}], {"99999999": float("nan")}),
)
COMMANDS: tuple[protocol.AnyCommand, ...] = (
    protocol.Hello(version=77),
    protocol.Submit("valid", prompt="hello", max_tokens=1),
    protocol.Submit("ids", prompt_token_ids=[1, 2, 3], max_tokens=2, stop=["a", "b"]),
    protocol.Submit("without text", prompt="hello", max_tokens=3, detokenize=False),
    protocol.Explain(),
    protocol.Explain("request", "valid", count=1_000_000),
    protocol.Explain("latest"),
    protocol.Abort("nobody"),
    protocol.SwapPolicy("spec: {}"),
    protocol.AbortAny(),
    protocol.Drain(),
)


def messages(seed: int) -> Iterator[Parts]:
    """An endless sequence of messages, each as the parts of a ZeroMQ message."""
    random = Random(seed)
    kinds: tuple[Callable[[Random], bytes], ...] = (
        *(_noise, _truncated, _flipped, _bad_number, _wrong_type, _twice, _header, _valid),
    )
    while True:
        if random.randrange(RARE) == 0:
            yield [_large(random)]
        elif random.randrange(20) == 0:
            yield [_noise(random) for _ in range(random.randrange(2, 30))]
        else:
            yield [random.choice(kinds)(random)]


def _valid(random: Random) -> bytes:
    return msgspec.msgpack.encode(random.choice(COMMANDS))


def _noise(random: Random) -> bytes:
    return random.randbytes(random.choice((0, 1, 2, 7, 40, 300, 2000)))


def _truncated(random: Random) -> bytes:
    whole = _valid(random)
    return whole[: random.randrange(len(whole))]


def _flipped(random: Random) -> bytes:
    """A valid command with one bit changed."""
    changed = bytearray(_valid(random))
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _submit(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "Submit", "request_id": "r", "prompt": "x", "max_tokens": 1, **fields}
    )


def _bad_number(random: Random) -> bytes:
    return _submit(**{random.choice(FIELDS[1:9]): random.choice(NUMBERS)})


def _wrong_type(random: Random) -> bytes:
    return _submit(**{random.choice(FIELDS[1:]): random.choice(VALUES)})


def _twice(random: Random) -> bytes:
    """A map with a key that comes twice, in a map header that says so."""
    key = msgspec.msgpack.encode(random.choice(("type", "request_id", "prompt")))
    entry = key + msgspec.msgpack.encode(random.choice(("Submit", "Abort", 5)))
    return b"\x84" + entry * 2 + msgspec.msgpack.encode("max_tokens") + b"\x01" + entry


def _header(random: Random) -> bytes:
    """Announces up to 4 GiB that do not follow."""
    return random.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + b"\xff\xff\xff\xff" + _noise(random)


def _large(random: Random) -> bytes:
    depth = random.choice((100, 1_000, 10_000, SIZE_BOUND // 4))
    return random.choice(
        (
            b"\x91" * depth,
            b"\x81\xa1a" * depth,
            _submit(messages=[])[:-1] + b"\x91" * depth,
            random.randbytes(SIZE_BOUND),
            _submit(prompt="y" * (SIZE_BOUND - 200)),
            _submit(prompt_token_ids=[2**40] * 100_000),
        )
    )


class Sender:
    """One connection; never raises for what the server does with it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, reads: bool) -> None:
        self._context = context
        self._endpoint = endpoint
        self._reads = reads
        self._sent = 0
        self._connect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, SEND_TIMEOUT_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        self._socket.connect(self._endpoint)

    def send(self, parts: Parts) -> None:
        """Raises zmq.Again when the server has taken nothing for SEND_TIMEOUT_MS."""
        self._sent += 1
        if self._sent % RECONNECT_EVERY == 0:
            self._socket.close()
            self._connect()
        self._socket.send_multipart(parts)
        while self._reads and self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._socket.close()


def send_all(endpoint: str, seed: int, count: int) -> None:
    """Send `count` messages, and return when they have left. Raises zmq.Again when the server hangs."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    senders = [Sender(context, endpoint, reads=index % 2 == 0) for index in range(SENDERS)]
    source = messages(seed)
    try:
        for index in range(count):
            senders[index % SENDERS].send(next(source))
    finally:
        for sender in senders:
            sender.close()
        context.term()


if __name__ == "__main__":
    send_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
