"""What the gateway does for operators: state, aborting the requests of others, draining.

A plain helper that the gateway owns, on the gateway's own `GatewayState`. Only peers of the admin front may
change anything here; anybody may ask for the state.
"""

from __future__ import annotations

from typing import Any

from muxk.actors import protocol as wire
from muxk.actors.gateway_owner import Owner
from muxk.actors.gateway_policy import GatewayPolicy
from muxk.actors.gateway_state import GatewayOptions, GatewayState, StateCollection
from muxk.actors.refs import Everybody
from muxk.kernel.fronts import Front, front_of
from muxk.kernel.messages import ReportState, StateReported

STATE_REQUESTS_MAX = 64
"""Bound on state requests that wait for the actors' answers."""
ADMIN_ONLY = (
    "is an admin command: send it to the admin socket, which is an ipc file beside the server's own "
    "socket, or in its run directory when it listens on tcp"
)

AdminCommand = wire.SwapPolicy | wire.SetShadow | wire.AbortAny | wire.Drain


class GatewayAdmin:
    """One a gateway."""

    def __init__(
        self,
        owner: Owner,
        everybody: Everybody,
        options: GatewayOptions,
        state: GatewayState,
        policy: GatewayPolicy,
    ) -> None:
        self._owner = owner
        self._everybody = everybody
        self._options = options
        self._state = state
        self._policy = policy

    def command(self, peer: bytes, command: AdminCommand) -> None:
        """Do it, or say where to send it."""
        if front_of(peer) is not Front.ADMIN:
            self._refuse(peer, command)
            return
        match command:
            case wire.SwapPolicy():
                self._policy.swap(peer, command)
            case wire.SetShadow():
                self._policy.set_shadow(peer, command)
            case wire.AbortAny():
                self._abort_any(peer, command)
            case wire.Drain():
                self._owner.tell(peer, wire.Draining())
                self._owner.draining()

    def _refuse(self, peer: bytes, command: AdminCommand) -> None:
        reason = f"{type(command).__name__} {ADMIN_ONLY}"
        if isinstance(command, wire.SwapPolicy):
            self._owner.tell(peer, wire.PolicySwapped(command.ticket, False, "", "", reason))
        elif isinstance(command, wire.SetShadow):
            self._owner.tell(peer, wire.ShadowSet(command.ticket, False, "", "", reason))
        else:
            self._owner.tell(peer, wire.ProtocolError(reason))

    def _abort_any(self, peer: bytes, command: wire.AbortAny) -> None:
        """Requests of every client by the names that their clients gave them, or all."""
        state = self._state
        names = None if command.request_ids is None else frozenset(command.request_ids)
        chosen = [
            request
            for of_peer in state.names.values()
            for name, request in of_peer.items()
            if names is None or name in names
        ]
        for request in chosen:
            self._owner.abort_for_client(request)
        self._owner.tell(peer, wire.AbortedAny(command.ticket, len(chosen)))

    def collect_state(self, peer: bytes, ticket: int) -> None:
        """Ask every actor; `state_reported` answers when the last one has."""
        state = self._state
        if len(state.collections) >= STATE_REQUESTS_MAX:
            self._owner.tell(peer, wire.ProtocolError(f"{STATE_REQUESTS_MAX} state requests wait already"))
            return
        collection = state.next_ticket()
        state.collections[collection] = StateCollection(peer, ticket, {"server": self.server_state()})
        report = ReportState(collection)
        for ref in self._everybody.reporting:
            self._owner.send(ref, report)

    def state_reported(self, message: StateReported) -> None:
        """One actor's answer."""
        collection = self._state.collections.get(message.ticket)
        if collection is None:
            return
        collection.parts[message.actor] = message.state
        if len(collection.parts) == len(self._everybody.reporting) + 1:
            del self._state.collections[message.ticket]
            self._tell_state(collection)

    def actors_were_rebuilt(self) -> None:
        """Answers that were not given yet are lost: those who wait get what came so far."""
        for collection in self._state.collections.values():
            self._tell_state(collection)
        self._state.collections.clear()

    def _tell_state(self, collection: StateCollection) -> None:
        self._owner.tell(collection.peer, wire.State(collection.ticket, collection.parts))

    def server_state(self) -> dict[str, Any]:
        """The entry `server` of the state."""
        shown = self._state.describe(self._owner.now_ns())
        shown.update(self._policy.describe())
        shown.update(model=self._options.model, device=self._options.device)
        return shown
