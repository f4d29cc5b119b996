"""Many connections from one process, for the soak test: each sends a request now and then, and reads or not.

`python -m muxk.client.soak_clients ENDPOINT WORK`, with a `Work` as JSON, writes one JSON line when it is
connected, and one with what it saw at its end.
"""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from random import Random

import msgspec
import zmq
from muxk.client import protocol

PROMPT_TOKENS = 40
TOKENS = 24
"""Of each answer."""
LONG_EVERY = 20
"""One slow client in so many asks for `Work.long_tokens`."""
SLOW_RECEIVE_BOUND = 1
LINGER_MS = 1_000
POLL_MS = 200
NEVER_S = float("inf")


class Role(StrEnum):
    """What the clients of a process do."""

    GOOD = "good"
    """Read at once, and measure gaps."""
    SLOW = "slow"
    """Read nothing."""


class Work(msgspec.Struct, frozen=True):
    """What one process does."""

    role: Role
    clients: int
    seconds: float
    think_s: float
    """Between the end of a request and the next one of its client, on average; a slow one does not wait."""
    long_tokens: int
    """Of the answers of some slow clients: enough of them to fill every buffer on the way."""


class Seen(msgspec.Struct):
    """What the clients of one process saw."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    gaps_us: list[int] = []
    reasons: dict[str, int] = {}
    """Of failures: code and message, and how often."""


class Connection:
    """One DEALER with at most one request at a time."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, work: Work, random: Random, number: int
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._slow = work.role is Role.SLOW
        if self._slow:
            self.socket.setsockopt(zmq.RCVHWM, SLOW_RECEIVE_BOUND)
        self.socket.connect(endpoint)
        self._random = random
        self._think_s = work.think_s
        self._tokens = work.long_tokens if self._slow and number % LONG_EVERY == 0 else TOKENS
        self._sent = 0
        self._last_ns = 0
        self.due_s = time.monotonic() + random.uniform(0.2, work.think_s)

    def submit(self, seen: Seen) -> None:
        """Send the next request."""
        self._sent += 1
        prompt = [self._random.randrange(32, 120) for _ in range(PROMPT_TOKENS)]
        command = protocol.Submit(
            f"r{self._sent}", prompt_token_ids=prompt, max_tokens=self._tokens, ignore_eos=True
        )
        self.socket.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)
        self._last_ns = 0
        self.due_s = self._later() if self._slow else NEVER_S
        seen.requests += 1

    def _later(self) -> float:
        return time.monotonic() + self._random.expovariate(1 / self._think_s)

    def read(self, decoder: msgspec.msgpack.Decoder[protocol.Frame], seen: Seen) -> None:
        """Take every frame that is there."""
        while True:
            try:
                payload = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for event in decoder.decode(payload).events:
                self._note(event, seen)

    def _note(self, event: protocol.Event, seen: Seen) -> None:
        match event:
            case protocol.Tokens(token_ids=ids):
                now_ns = time.perf_counter_ns()
                if self._last_ns:
                    seen.gaps_us.append((now_ns - self._last_ns) // 1000)
                self._last_ns = now_ns
                seen.tokens += len(ids)
            case protocol.Finished():
                seen.finished += 1
                self.due_s = self._later()
            case protocol.Failed(code=code, message=message):
                seen.failed += 1
                reason = f"{code}: {message}"
                seen.reasons[reason] = seen.reasons.get(reason, 0) + 1
                self.due_s = self._later()


def run(endpoint: str, work: Work) -> Seen:
    """Connect, say so on stdout, and work for some time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    random = Random(work.clients)
    connections = [Connection(context, endpoint, work, random, number) for number in range(work.clients)]
    good = work.role is Role.GOOD
    by_socket = {connection.socket: connection for connection in connections}
    poller = zmq.Poller()
    if good:
        for connection in connections:
            poller.register(connection.socket, zmq.POLLIN)
    say({"connected": work.clients})
    decoder = msgspec.msgpack.Decoder(protocol.Frame)
    seen = Seen()
    end_s = time.monotonic() + work.seconds
    while (now_s := time.monotonic()) < end_s:
        for connection in connections:
            if connection.due_s <= now_s:
                connection.submit(seen)
        next_s = min(connection.due_s for connection in connections)
        wait_ms = int(min(POLL_MS, 1000 * (next_s - now_s) + 1))
        for socket, _ in poller.poll(max(0, wait_ms)) if good else _sleep(wait_ms):
            by_socket[socket].read(decoder, seen)
    context.destroy(linger=0)
    return seen


def _sleep(wait_ms: int) -> list[tuple[zmq.Socket[bytes], int]]:
    time.sleep(max(0, wait_ms) / 1000)
    return []


def say(message: object) -> None:
    """One JSON line for the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    say(run(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Work)))
