"""What the gateway knows of clients and their live requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from muxk.actors import protocol as wire
from muxk.actors.latency import LatencyWindow
from muxk.actors.messages import TextRow

ERROR_CHARS_MAX = 500
"""Of an error that quotes what a client sent: an answer must not be as long as the question."""


def cut(text: str, length: int = ERROR_CHARS_MAX) -> str:
    """`text`, or its beginning and how long it was."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


@dataclass(frozen=True)
class GatewayOptions:
    """What the gateway tells clients about the server."""

    model: str
    device: str
    policy_name: str
    policy_sha: str
    vocabulary_size: int
    max_context_tokens: int
    seed: int
    """Seeds of requests that bring none are drawn from it."""


@dataclass(slots=True)
class Live:
    """A request from its arrival until its owner has let go of it."""

    peer: bytes
    name: str
    arrival_ns: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    last_token_ns: int = 0
    ended: bool = False
    """The client has its terminal event, or is gone."""

    def finished(self, reason: str, stop: str | None) -> wire.Finished:
        return wire.Finished(
            request_id=self.name,
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )


@dataclass(slots=True)
class StateCollection:
    """A state request that waits for the actors' answers."""

    peer: bytes
    ticket: int
    parts: dict[str, Any]


@dataclass
class GatewayState:
    policy_name: str
    policy_sha: str
    live: dict[int, Live] = field(default_factory=dict)
    names: dict[bytes, dict[str, int]] = field(default_factory=dict)
    """Client's name -> internal id, of requests without a terminal event, by peer."""
    owed: dict[bytes, dict[str, wire.Finished | wire.Failed]] = field(default_factory=dict)
    """Terminal events that a peer did not take because it does not read, by peer and name. Each is sent
    again, and comes back here when that frame is not taken either."""
    swaps: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    collections: dict[int, StateCollection] = field(default_factory=dict)
    latency: LatencyWindow = field(default_factory=LatencyWindow)
    last_request: int = 0
    last_ticket: int = 0
    seeds_drawn: int = 0
    ready: bool = False
    draining: bool = False
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    aborts: int = 0
    finished: int = 0
    broken_frames: int = 0
    slow_peers: int = 0
    tokens: int = 0

    def add(self, peer: bytes, name: str, now_ns: int) -> int:
        """Name a new request of a peer."""
        self.last_request += 1
        self.accepted += 1
        self.live[self.last_request] = Live(peer, name, now_ns)
        self.names.setdefault(peer, {})[name] = self.last_request
        return self.last_request

    def end_for_client(self, request_id: int) -> None:
        """The client may use the name again; idempotent."""
        live = self.live.get(request_id)
        if live is None or live.ended:
            return
        live.ended = True
        names = self.names[live.peer]
        del names[live.name]
        if not names:
            del self.names[live.peer]

    def owe(self, peer: bytes, events: Iterable[wire.Finished | wire.Failed], bound: int) -> None:
        """Keep terminal events to be sent again; beyond the bound a peer that never reads loses them."""
        owed = self.owed.setdefault(peer, {})
        for event in events:
            if len(owed) < bound:
                owed[event.request_id] = event

    def note_tokens(self, live: Live, row: TextRow, now_ns: int) -> None:
        if live.last_token_ns == 0:
            self.latency.first_tokens_ns.append(now_ns - live.arrival_ns)
        else:
            self.latency.gaps_ns.append(now_ns - live.last_token_ns)
        live.last_token_ns = now_ns
        live.completion_tokens += len(row.tokens)
        live.cached_tokens = row.reused_tokens
        self.tokens += len(row.tokens)
        if row.finish_reason is not None:
            self.finished += 1

    def next_ticket(self) -> int:
        self.last_ticket += 1
        return self.last_ticket

    def draw_seed(self, server_seed: int) -> int:
        """A seed for a request that brought none: as random as the server's own seed."""
        self.seeds_drawn += 1
        text = f"{server_seed}/{self.seeds_drawn}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")

    def describe(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "policy": self.policy_name,
            "policy_sha": self.policy_sha,
            "ready": self.ready,
            "draining": self.draining,
            "clients": len(self.names),
            "live": len(self.live),
            "accepted": self.accepted,
            "finished": self.finished,
            "refused": self.refused,
            "failed": self.failed,
            "aborts": self.aborts,
            "broken_frames": self.broken_frames,
            "slow_peers": self.slow_peers,
            "tokens": self.tokens,
        }
        shown.update(self.latency.describe())
        return shown
