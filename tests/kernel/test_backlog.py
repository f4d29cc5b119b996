"""What a peer does not take is held back in its order, within bounds, and sent once the peer reads again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from muxk.kernel import front_socket as front_module
from muxk.kernel.actor import Message
from muxk.kernel.backlog import FRAME_BYTES, STALLED_NS, Backlog
from muxk.kernel.ingress import Ingress
from muxk.kernel.messages import FrameReceived, LossHeard, PeerGone, PeerSlow, SendFrame

WAIT_MS = 10_000
BIG = bytes(50_000)


def test_frames_come_out_in_their_order_and_a_drained_peer_is_forgotten() -> None:
    backlog = Backlog()
    for number in range(3):
        assert backlog.hold(b"a", b"%d" % number, 0)
    assert backlog.hold(b"b", b"other", 0)
    taken = []
    while (frame := backlog.oldest(b"a")) is not None:
        taken.append(frame)
        backlog.taken(b"a", 1)
    assert taken == [b"0", b"1", b"2"]
    assert backlog.peers == [b"b"]
    assert backlog.drop(b"b") == (b"other",)
    assert backlog.bytes == 0


def test_one_peer_and_all_together_have_bounds() -> None:
    backlog = Backlog(peer_bytes_max=2000, total_bytes_max=3000)
    assert backlog.hold(b"a", bytes(1900), 0)
    assert not backlog.hold(b"a", bytes(1900), 0)
    assert not backlog.hold(b"b", bytes(1900), 0)
    assert backlog.hold(b"b", bytes(100), 0)
    assert backlog.bytes <= 3000


def test_a_peer_is_stalled_when_it_took_nothing_for_long_and_not_when_it_takes_a_little() -> None:
    backlog = Backlog()
    for peer in (b"dead", b"slow"):
        for number in range(3):
            backlog.hold(peer, b"%d" % number, 0)
    backlog.taken(b"slow", STALLED_NS // 2)
    assert not backlog.stalled(b"dead", STALLED_NS - 1)
    assert backlog.stalled(b"dead", STALLED_NS)
    assert not backlog.stalled(b"slow", STALLED_NS)
    assert not backlog.stalled(b"unknown", STALLED_NS)


@given(st.lists(st.tuples(st.sampled_from(["hold", "take", "drop", "try"]), st.integers(0, 3)), max_size=80))
def test_the_bytes_that_are_counted_are_those_that_are_held(steps: list[tuple[str, int]]) -> None:
    backlog = Backlog(peer_bytes_max=700, total_bytes_max=1500)
    model: dict[bytes, list[bytes]] = {}
    for number, (step, which) in enumerate(steps):
        peer = b"%d" % which
        if step == "hold" and backlog.hold(peer, bytes(number), 0):
            model.setdefault(peer, []).append(bytes(number))
        elif step == "take" and backlog.holds(peer):
            assert backlog.oldest(peer) == model[peer].pop(0)
            backlog.taken(peer, 0)
        elif step == "drop":
            assert backlog.drop(peer) == tuple(model.pop(peer, []))
        elif step == "try":
            backlog.tried(peer)
        model = {key: frames for key, frames in model.items() if frames}
        assert sorted(backlog.peers) == sorted(model)
        assert backlog.bytes == sum(len(frame) + FRAME_BYTES for frames in model.values() for frame in frames)


class OneClient:
    """An open ingress and one DEALER that has said hello."""

    def __init__(self, endpoint: str) -> None:
        self.told: list[Message] = []
        self.context: zmq.Context[Any] = zmq.Context()
        self.ingress = Ingress(endpoint, send_bound=2)
        self.ingress.open(self.context, self.told.append)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RCVHWM, 2)
        self.dealer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(self.ingress.endpoint)
        self.dealer.send(b"hello")
        self.until(lambda: bool(self.told))
        received = self.told.pop()
        assert isinstance(received, FrameReceived)
        self.peer = received.peer

    def until(self, done: Callable[[], bool]) -> None:
        poller = zmq.Poller()
        poller.register(self.ingress.sources[0].fileno(), zmq.POLLIN)
        for _ in range(WAIT_MS // 10):
            self.ingress.sources[0].pending = True  # as the runtime says when the descriptor does
            self.ingress.pump(8)
            if done():
                return
            poller.poll(10)
        raise AssertionError("it did not happen")

    def stuff(self) -> None:
        """Send until a frame stays held back: ZeroMQ's thread needs a while to fill the socket's buffers."""
        quiet = 0
        poller = zmq.Poller()
        poller.register(self.ingress.sources[0].fileno(), zmq.POLLIN)
        while quiet < 30:  # nothing tells that a buffer stays full
            if self.ingress.retry_ns is None:
                self.ingress.send(SendFrame(self.peer, BIG))
                quiet = 0
            poller.poll(10)
            self.ingress.retry()
            quiet += 1

    def fill(self, frames: int) -> None:
        for number in range(frames):
            self.ingress.send(SendFrame(self.peer, b"%06d" % number + BIG))


@contextmanager
def one_client(folder: Path) -> Iterator[OneClient]:
    client = OneClient(f"ipc://{folder}/s")
    try:
        yield client
    finally:
        client.ingress.close()
        client.context.destroy(linger=0)


def test_a_peer_that_reads_late_gets_everything_in_order(tmp_path: Path) -> None:
    with one_client(tmp_path) as client:
        sent = 0
        while client.ingress.retry_ns is None:
            client.ingress.send(SendFrame(client.peer, b"%06d" % sent + BIG))
            sent += 1
        for _ in range(3):
            client.ingress.send(SendFrame(client.peer, b"%06d" % sent + BIG))
            sent += 1
        assert client.told == []
        for number in range(sent):
            while not client.dealer.poll(10):
                client.ingress.retry()
            assert client.dealer.recv()[:6] == b"%06d" % number
        client.ingress.retry()
        assert client.ingress.retry_ns is None
        assert client.told == []


def test_a_peer_over_its_bound_is_told_with_the_frame_that_was_lost(tmp_path: Path) -> None:
    with one_client(tmp_path) as client:
        client.fill(60)
        [*slow] = client.told
        assert slow
        assert all(isinstance(message, PeerSlow) and message.payload.endswith(BIG) for message in slow)


def test_no_frame_follows_one_that_was_lost_before_the_gateway_has_heard_of_it(tmp_path: Path) -> None:
    with one_client(tmp_path) as client:
        client.fill(60)
        small = [b"%06d small" % number for number in range(60, 63)]
        client.ingress.send(SendFrame(client.peer, small[0]))
        losses = len(client.told)
        for _ in range(losses):
            client.ingress.send(SendFrame(client.peer, small[1]))
            client.ingress.send(LossHeard(client.peer))
        assert len(client.told) == 2 * losses
        for _ in range(losses):
            client.ingress.send(LossHeard(client.peer))
        client.ingress.send(SendFrame(client.peer, small[2]))
        assert len(client.told) == 2 * losses
        received = []
        while not received or received[-1] != small[2]:
            client.ingress.retry()
            if client.dealer.poll(10):
                received.append(client.dealer.recv())
        assert [int(frame[:6]) for frame in received] == [*range(len(received) - 1), 62]


def test_a_peer_that_takes_nothing_for_long_is_told_once_with_all_that_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_client(tmp_path) as client:
        client.stuff()
        client.ingress.send(SendFrame(client.peer, b"last"))
        assert client.ingress.retry_ns is not None
        late_ns = client.ingress.retry_ns + STALLED_NS
        monkeypatch.setattr(front_module.time, "monotonic_ns", lambda: late_ns)
        client.ingress.retry()
        [slow] = client.told
        assert isinstance(slow, PeerSlow)
        assert (slow.payload, slow.more) == (BIG, (b"last",))
        assert client.ingress.retry_ns is None


def test_a_peer_that_leaves_while_frames_are_held_back_is_gone_and_they_are_forgotten(tmp_path: Path) -> None:
    with one_client(tmp_path) as client:
        client.stuff()
        client.dealer.close()

        def gone() -> bool:
            client.ingress.retry()
            return bool(client.told)

        client.until(gone)
        assert client.told == [PeerGone(client.peer)]
        assert client.ingress.retry_ns is None
