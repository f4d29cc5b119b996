"""Clients that are gone or do not read, and how long a server that drains waits for those who do not.

Ends that a client did not take are kept and told again, until it takes them, uses their names again, or goes.
"""

from __future__ import annotations

import msgspec
from muxk.actors import protocol as wire
from muxk.actors.gateway_owner import Owner
from muxk.actors.gateway_requests import lost_ends, slow_reader
from muxk.actors.gateway_state import GatewayState
from muxk.actors.messages import KeepAlive
from muxk.actors.refs import Refs
from muxk.kernel.actor import Timer
from muxk.kernel.messages import LossHeard, PeerSlow

KEEP_ALIVE_NS = 1_000_000_000
OWED_PER_FRAME = 256
COMES_BACK_NS = 1_000_000
"""After which a frame that a client did not take has come back."""
OWED_LAST_NS = 3_000_000_000
"""How long a drained server waits for clients that do not read to take the ends of their requests."""
OWED_AGAIN_NS = 100_000_000
"""Between two tries meanwhile."""


class GatewayPeers:
    """One a gateway."""

    def __init__(self, owner: Owner, refs: Refs, state: GatewayState, owed_max: int) -> None:
        """`owed_max` bounds the ends that are kept for one client."""
        self._owner = owner
        self._refs = refs
        self._state = state
        self._owed_max = owed_max
        self._frames = msgspec.msgpack.Decoder(wire.Frame)
        self._timer: Timer | None = None

    def gone(self, peer: bytes) -> None:
        self._state.owed.pop(peer, None)
        for request in list(self._state.names.get(peer, {}).values()):
            self._owner.abort_untold(request)

    def slow(self, message: PeerSlow) -> None:
        """Frames were lost, so that its streams can not be whole any more; ends are sent again later."""
        self._owner.send(self._refs.ingress, LossHeard(message.peer))
        state = self._state
        requests = dict(state.names.get(message.peer, {}))
        lost = [
            event for frame in (message.payload, *message.more) for event in self._frames.decode(frame).events
        ]
        ends = [*lost_ends(lost), *(slow_reader(name) for name in requests)]
        if ends:
            state.slow_peers += bool(requests)
            state.owe(message.peer, ends, self._owed_max)
        for request in requests.values():
            self._owner.abort_untold(request)

    def start(self) -> None:
        self._again_in(KEEP_ALIVE_NS)

    def keep_alive(self) -> None:
        """Look who is gone, and tell what is owed; each time it is due."""
        state = self._state
        for peer in list(state.names):
            self._owner.tell(peer)
        if state.drained_ns is not None and self._stopped(state.drained_ns):
            return
        for peer, owed in list(state.owed.items()):
            self._tell_owed(peer, owed)
        self._again_in(KEEP_ALIVE_NS if state.drained_ns is None else OWED_AGAIN_NS)

    def _again_in(self, delay_ns: int) -> None:
        self._timer = self._owner.send_after(delay_ns, self._refs.gateway, KeepAlive())

    def _tell_owed(self, peer: bytes, owed: dict[str, wire.Finished | wire.Failed]) -> None:
        """One frame of ends; what is not taken comes back by PeerSlow."""
        told = list(owed)[:OWED_PER_FRAME]
        self._owner.tell(peer, *(owed.pop(name) for name in told))
        if not owed:
            self._state.owed.pop(peer, None)

    # --- drain ---

    def look_if_drained(self) -> None:
        """Stop once nobody is live, but not before what was sent just now had time to come back."""
        state = self._state
        if state.draining and not state.live and state.drained_ns is None:
            state.drained_ns = self._owner.now_ns()
            if self._timer is not None:
                self._owner.cancel(self._timer)
            self._again_in(COMES_BACK_NS)

    def _stopped(self, drained_ns: int) -> bool:
        """True but while clients are owed ends and have had less than OWED_LAST_NS to take them."""
        late = self._owner.now_ns() - drained_ns >= OWED_LAST_NS
        if late or not self._state.owed:
            self._owner.stop("drained")
            return True
        return False
