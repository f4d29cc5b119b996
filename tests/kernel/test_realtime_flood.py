"""A client that floods the ingress: its frames come in between the messages of actors, not before them."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import zmq
from muxk.kernel.actor import Actor, ActorSpec, Message, Ref
from muxk.kernel.front_socket import PUMP_BYTES, PUMP_FRAMES
from muxk.kernel.ingress import Ingress
from muxk.kernel.messages import FrameReceived, PeerGone, PeerSlow
from muxk.kernel.realtime import BUSY_PUMP_EVERY, RealtimeRuntime

WAIT_MS = 10_000
PLAYER: Ref[Any] = Ref("player")
PARTNER: Ref[Any] = Ref("partner")


class Ball(Message, frozen=True):
    """player -> partner -> player, for ever: one message is always ready, as while tokens are made."""


class FloodedGateway(Actor):
    """Counts frames; stops after `frames` of them."""

    Accepts: ClassVar = FrameReceived | PeerGone | PeerSlow

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.seen = 0

    def on_frame_received(self, message: FrameReceived) -> None:
        self.seen += 1
        if self.seen == self.frames:
            self.stop("flooded")

    def on_peer_gone(self, message: PeerGone) -> None: ...

    def on_peer_slow(self, message: PeerSlow) -> None: ...


class Partner(Actor):
    Accepts: ClassVar = Ball

    def on_ball(self, message: Ball) -> None:
        self.send(PLAYER, message)


class Player(Actor):
    """Notes at each of its turns how many frames the gateway has handled."""

    Accepts: ClassVar = Ball

    def __init__(self, gateway: FloodedGateway) -> None:
        self._gateway = gateway
        self.frames_seen = [0]
        self.turns = 0

    def started(self) -> None:
        self.send(PARTNER, Ball())

    def on_ball(self, message: Ball) -> None:
        if self._gateway.seen:
            self.turns += 1
        if self._gateway.seen != self.frames_seen[-1]:
            self.frames_seen.append(self._gateway.seen)
        self.send(PARTNER, message)


def flood(endpoint: str, frames: int, frame_bytes: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, WAIT_MS)
        dealer.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        dealer.connect(endpoint)
        for _ in range(frames):
            dealer.send(bytes(frame_bytes))
    finally:
        dealer.close()
        context.term()


@pytest.mark.parametrize(
    ("frames", "frame_bytes", "at_once"),
    [(3000, 100, PUMP_FRAMES), (60, 200_000, PUMP_BYTES // 200_000 + 1)],
    ids=["many frames", "large frames"],
)
def test_actors_that_always_have_messages_get_their_turns_in_a_flood(
    realtime: Any, frames: int, frame_bytes: int, at_once: int
) -> None:
    gateway = FloodedGateway(frames)
    player = Player(gateway)
    ingress = Ingress("tcp://127.0.0.1:*")
    threads: list[threading.Thread] = []

    def then(runtime: RealtimeRuntime) -> None:
        threads.append(threading.Thread(target=flood, args=(ingress.endpoint, frames, frame_bytes)))
        threads[0].start()

    specs = [
        ActorSpec("gateway", lambda: gateway, FloodedGateway, permanent=True),
        ActorSpec("player", lambda: player, Player),
        ActorSpec("partner", Partner, Partner),
    ]
    outcome = realtime(specs, then=then, ingress=ingress)
    threads[0].join()
    assert outcome.reason == "flooded"
    between = [
        after - before for before, after in zip(player.frames_seen, player.frames_seen[1:], strict=False)
    ]
    assert max(between) <= at_once
    # Of BUSY_PUMP_EVERY messages at most PUMP_FRAMES are frames, and every second one of the rest is his.
    assert (
        player.turns >= gateway.seen // PUMP_FRAMES * (BUSY_PUMP_EVERY - PUMP_FRAMES) // 2 - BUSY_PUMP_EVERY
    )
