"""Frames that peers did not take yet: held back in their order, within bounds, until the peers read again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

PEER_BYTES_MAX = 256 * 1024
"""Bytes held back for one peer; a single frame may be longer."""

TOTAL_BYTES_MAX = 64 * 1024 * 1024
"""Bytes held back for all peers together."""

FRAME_BYTES = 100
"""What a frame takes besides its payload."""

STALLED_NS = 10_000_000_000
"""A peer that takes nothing for so long is given up."""


@dataclass(slots=True)
class _Held:
    """Of one peer."""

    since_ns: int
    """When it last took a frame, or else when the first one was held back."""
    frames: deque[bytes] = field(default_factory=deque)
    bytes: int = 0


class Backlog:
    """Frames by peer; a peer without any is not known here."""

    def __init__(self, peer_bytes_max: int = PEER_BYTES_MAX, total_bytes_max: int = TOTAL_BYTES_MAX) -> None:
        self._peer_bytes_max = peer_bytes_max
        self._total_bytes_max = total_bytes_max
        self._held: dict[bytes, _Held] = {}
        self.bytes = 0
        """Of all peers."""

    def holds(self, peer: bytes) -> bool:
        """Frames of this peer wait: a newer one has to wait behind them."""
        return peer in self._held

    @property
    def peers(self) -> list[bytes]:
        """Those with frames, the one that was tried longest ago first."""
        return list(self._held)

    def hold(self, peer: bytes, payload: bytes, now_ns: int) -> bool:
        """Hold a frame back behind the others of its peer; False when that is over a bound."""
        held = self._held.get(peer)
        size = len(payload) + FRAME_BYTES
        too_much = held is not None and held.bytes + size > self._peer_bytes_max
        if too_much or self.bytes + size > self._total_bytes_max:
            return False
        if held is None:
            held = self._held[peer] = _Held(now_ns)
        held.frames.append(payload)
        held.bytes += size
        self.bytes += size
        return True

    def oldest(self, peer: bytes) -> bytes | None:
        """The frame to try next; None when nothing is held back."""
        held = self._held.get(peer)
        return None if held is None else held.frames[0]

    def taken(self, peer: bytes, now_ns: int) -> None:
        """The peer took the oldest frame."""
        held = self._held[peer]
        size = len(held.frames.popleft()) + FRAME_BYTES
        held.bytes -= size
        self.bytes -= size
        held.since_ns = now_ns
        if not held.frames:
            del self._held[peer]

    def tried(self, peer: bytes) -> None:
        """Others go first the next time."""
        held = self._held.pop(peer, None)
        if held is not None:
            self._held[peer] = held

    def stalled(self, peer: bytes, now_ns: int) -> bool:
        """It has taken nothing for STALLED_NS."""
        held = self._held.get(peer)
        return held is not None and now_ns - held.since_ns >= STALLED_NS

    def drop(self, peer: bytes) -> tuple[bytes, ...]:
        """Give its frames up: they come back, the oldest first."""
        held = self._held.pop(peer, None)
        if held is None:
            return ()
        self.bytes -= held.bytes
        return tuple(held.frames)
