"""Ingress: the ROUTER sockets that clients and operators connect to, polled by the realtime runtime's loop.

Every frame becomes `FrameReceived` to the actor named `gateway`; `SendFrame` to `Ref("ingress")` sends one
without waiting; `front_socket.py` says what happens to a peer that does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import zmq
from muxk.kernel.actor import ActorSpec, ContractError, Message, accepted_types
from muxk.kernel.curve import CurveServer
from muxk.kernel.front_socket import MESSAGE_BYTES_MAX, SEND_BOUND, CanNotListen, FrontSocket
from muxk.kernel.fronts import ADMIN_PREFIX, CLIENT_PREFIX
from muxk.kernel.gatekeeper import Gatekeeper
from muxk.kernel.messages import FrameReceived, LossHeard, PeerGone, PeerSlow, SendFrame
from muxk.kernel.names import GATEWAY_NAME

__all__ = ["MESSAGE_BYTES_MAX", "SEND_BOUND", "CanNotListen", "Ingress", "check_gateway"]

AdminEndpoint = Callable[[str], str]
"""The clients' endpoint as it was bound -> the ipc endpoint of the admin socket. Raises CanNotListen."""

LEAVE_S = 5.0
"""How long a server that stops in order waits for clients to read what it has for them."""

LOOK_S = 0.01
"""Between two looks whether they have."""

LOOKS = 2
"""In a row that find that they have, before it goes: one may fall between two frames."""

Source = FrontSocket | Gatekeeper
"""What the runtime waits for: it has a `fileno` and is `pending` when it should be looked at."""


class Ingress:
    """The client socket, and the admin socket if there is one. Used from the loop thread only."""

    def __init__(
        self,
        endpoint: str,
        max_message_bytes: int = MESSAGE_BYTES_MAX,
        send_bound: int = SEND_BOUND,
        admin: AdminEndpoint | None = None,
        curve: CurveServer | None = None,
    ) -> None:
        """`endpoint` is `ipc://...`, or `tcp://127.0.0.1:*` for a free port. `curve` is for clients only."""
        self._endpoint = endpoint
        self._admin = admin
        self._gatekeeper = Gatekeeper(curve.allows) if curve is not None else None
        keys = None if curve is None else curve.keys
        self._clients = FrontSocket(CLIENT_PREFIX, max_message_bytes, send_bound, keys)
        self._admins = FrontSocket(ADMIN_PREFIX, max_message_bytes, send_bound, None)
        self._fronts = (self._clients,) if admin is None else (self._admins, self._clients)
        keepers = () if self._gatekeeper is None else (self._gatekeeper,)
        self.sources: Sequence[Source] = (*keepers, *self._fronts)
        """What is open, and waited for; the most urgent first."""

    @property
    def endpoint(self) -> str:
        """The clients' endpoint, resolved once it is open; before that, the one that was asked for."""
        return self._endpoint

    @property
    def frames_malformed(self) -> int:
        """Messages that were not exactly one frame; the gateway saw an empty payload."""
        return self._clients.frames_malformed + self._admins.frames_malformed

    @property
    def pending(self) -> bool:
        """True when `pump` should look."""
        return any(source.pending for source in self.sources)

    def open(self, context: zmq.Context[zmq.Socket[bytes]], tell: Callable[[Message], None]) -> None:
        """Bind; `tell` queues a message for the gateway. Raises CanNotListen."""
        try:
            if self._gatekeeper is not None:
                self._gatekeeper.open(context)
            self._endpoint = self._clients.open(context, self._endpoint, tell)
            if self._admin is not None:
                self._admins.open(context, self._admin(self._endpoint), tell)
        except BaseException:
            self.close()
            raise

    def send(self, message: SendFrame | LossHeard) -> None:
        """Send without waiting; the gateway hears PeerGone or PeerSlow when that fails."""
        front = self._admins if message.peer.startswith(ADMIN_PREFIX) else self._clients
        if isinstance(message, LossHeard):
            front.loss_heard(message.peer)
        else:
            front.send(message)

    @property
    def retry_ns(self) -> int | None:
        """When `retry` has to be called, by the monotonic clock; None while nothing is held back."""
        wanted_ns = [front.retry_ns for front in self._fronts if front.retry_ns is not None]
        return min(wanted_ns, default=None)

    def retry(self) -> None:
        """Send what was held back to peers that read again, give up those that do not; at `retry_ns`."""
        for front in self._fronts:
            front.retry()

    def pump(self, frames: int) -> None:
        """Take at most `frames` frames from what is pending."""
        for source in self.sources:
            if source.pending and frames > 0:
                frames -= source.pump(frames)

    async def see_off(self, hurried: Callable[[], bool]) -> None:
        """Until peers have read what they were sent, for LEAVE_S at most, or until somebody is in a hurry."""
        with anyio.move_on_after(LEAVE_S):
            looks = 0
            while looks < LOOKS and not hurried():
                await anyio.sleep(LOOK_S)
                late = [front.leaving() for front in self._fronts]
                looks = 0 if any(late) else looks + 1

    def close(self) -> None:
        """Unbind; what was held back is dropped, the other frames leave within a moment. Idempotent."""
        self._clients.close()
        self._admins.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()


def check_gateway(specs: Sequence[ActorSpec]) -> None:
    """Raise ContractError unless one of the actors is a gateway that hears what the ingress says."""
    for spec in specs:
        if spec.name == GATEWAY_NAME:
            missing = {FrameReceived, PeerGone, PeerSlow} - set(accepted_types(spec.actor_class))
            if missing:
                names = ", ".join(sorted(message.__name__ for message in missing))
                raise ContractError(f"the gateway of an ingress has to accept {names}")
            return
    raise ContractError(f"an ingress needs an actor named {GATEWAY_NAME}")
