"""gateway: the server's face to clients.

It decodes frames from the ingress, validates, gives each request an id of its own inside, so that names of
two clients can not collide, and turns what comes back into events. It outlives a crash of the other actors.
Invariants: every request of a client gets exactly one terminal event; nothing a peer sends raises here; a
peer that is gone, or does not read, has its requests aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from muxk.actors import protocol as wire
from muxk.actors.gateway_admin import GatewayAdmin
from muxk.actors.gateway_explain import GatewayExplain
from muxk.actors.gateway_output import GatewayOutput
from muxk.actors.gateway_peers import GatewayPeers
from muxk.actors.gateway_policy import GatewayPolicy, Notice
from muxk.actors.gateway_requests import encode_request
from muxk.actors.gateway_state import GatewayOptions, GatewayState, Live, cut, text_chars
from muxk.actors.group_messages import RequestEnded
from muxk.actors.messages import (
    AbortRequest,
    EstimatorReady,
    IdsEmitted,
    KeepAlive,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    RequestRefused,
    TextEmitted,
)
from muxk.actors.policy_compiler import Compile
from muxk.actors.policy_messages import (
    ExplanationMade,
    PolicyCompiled,
    PolicyFileRead,
    PolicyFileUnreadable,
)
from muxk.actors.refs import Everybody, GatewayInbox, Refs
from muxk.actors.validation import REQUEST_ID_CHARS_MAX, Invalid, ModelLimits, validate
from muxk.kernel.actor import Actor
from muxk.kernel.messages import (
    EngineFailed,
    FrameReceived,
    LaneMoved,
    LaneStuck,
    PeerGone,
    PeerSlow,
    RequestsReported,
    SendFrame,
    StateReported,
)
from muxk.kernel.policy import PolicyBook

LIVE_MAX = 8192
"""Bound on live requests of all peers."""
LIVE_PER_PEER_MAX = 2048
UNREAD_CHARS_MAX = 1 << 26
"""Bound on prompts that wait for the tokenizer: many small ones must not fill the memory together."""


def _tell_nobody(text: str) -> None:
    """Where nobody wants to hear of policy files."""


class _NamedCommand(msgspec.Struct, tag_field="type", tag="Submit"):
    """As much of a broken `Submit` as is needed to fail it by name."""

    request_id: str


class Gateway(Actor):
    """One a server; permanent."""

    Accepts = GatewayInbox

    def __init__(
        self,
        refs: Refs,
        options: GatewayOptions,
        book: PolicyBook,
        compile_policy: Compile,
        on_ready: Callable[[], None],
        notice: Notice = _tell_nobody,
        groups: tuple[Refs, ...] = (),
    ) -> None:
        """`notice` tells of policy files that were read again; `groups` are those of several devices."""
        everybody = Everybody(refs.tokenizer, groups or (refs,))
        self._refs = refs
        self._options = options
        self._on_ready = on_ready
        self._limits = ModelLimits(options.vocabulary_size, options.context_tokens[-1])
        self._decoder = msgspec.msgpack.Decoder(wire.AnyCommand)
        self._named = msgspec.msgpack.Decoder(_NamedCommand)
        self._encoder = msgspec.msgpack.Encoder()
        self._journal = book.journal
        self.state = GatewayState(policy=options.policy)
        self._policy = GatewayPolicy(self, everybody, options, self.state, book, compile_policy, notice)
        self._admin = GatewayAdmin(self, everybody, options, self.state, self._policy)
        self._output = GatewayOutput(self, self.state)
        self._peers = GatewayPeers(self, refs, self.state, LIVE_PER_PEER_MAX)
        self._explain = GatewayExplain(self, everybody, self.state, book)

    def started(self) -> None:
        self._journal.zero_ns = self.now_ns()
        self.state.policy = replace(self.state.policy, since_ns=self.now_ns())
        self._peers.start()

    # --- frames from clients ---

    def on_frame_received(self, message: FrameReceived) -> None:
        try:
            command = self._decoder.decode(message.payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self._answer_broken(message, error)
            return
        match command:
            case wire.Submit():
                self._submit(message.peer, command)
            case wire.Abort():
                self._abort_named(message.peer, command.request_id)
            case wire.GetState():
                self._admin.collect_state(message.peer, command.ticket)
            case wire.Explain():
                self._explain.ask(message.peer, command)
            case wire.SwapPolicy() | wire.SetShadow() | wire.AbortAny() | wire.Drain():
                self._admin.command(message.peer, command)
            case wire.Hello():
                self._hello(message.peer, command)

    def _answer_broken(self, message: FrameReceived, error: Exception) -> None:
        """A broken `Submit` fails by its name when it has one; anything else is a protocol error."""
        self.state.broken_frames += 1
        try:
            request_id = self._named.decode(message.payload).request_id
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            self.tell(message.peer, wire.ProtocolError(cut(f"frame can not be understood: {error}")))
            return
        request_id = request_id[:REQUEST_ID_CHARS_MAX]
        if request_id in self.state.names.get(message.peer, {}):
            self.tell(message.peer, wire.DuplicateRequest(request_id))
        else:
            self.tell(message.peer, wire.Failed(request_id, "invalid", cut(str(error))))

    def _hello(self, peer: bytes, command: wire.Hello) -> None:
        options = self._options
        if command.version != wire.PROTOCOL_VERSION:
            text = f"this server speaks protocol {wire.PROTOCOL_VERSION}, the client {command.version}"
            self.tell(peer, wire.ProtocolError(text))
            return
        welcome = wire.Welcome(
            version=wire.PROTOCOL_VERSION,
            model=options.model,
            device=options.device,
            policy=self.state.policy.name,
            max_context_tokens=self._policy.max_context_tokens,
            vocabulary_size=options.vocabulary_size,
        )
        self.tell(peer, welcome)

    def _submit(self, peer: bytes, submit: wire.Submit) -> None:
        state = self.state
        if submit.request_id in state.names.get(peer, {}):
            self.tell(peer, wire.DuplicateRequest(submit.request_id))
            return
        refusal = self._refusal(peer, 1, 0)
        if refusal is None:
            try:
                params = validate(submit, self._limits, state.draw_seed(self._options.seed))
            except Invalid as error:
                refusal = "invalid", cut(str(error))
            else:
                refusal = self._refusal(peer, submit.n, text_chars(submit))
        if refusal is not None:
            self.tell(peer, wire.Failed(submit.request_id[:REQUEST_ID_CHARS_MAX], *refusal))
            return
        state.owed.get(peer, {}).pop(submit.request_id, None)
        request_id = state.add(peer, submit, self.now_ns())
        if self._journal.sink is not None:
            self._journal.sink.name_request(request_id, submit.n, submit.request_id)
        self.send(self._refs.tokenizer, encode_request(submit, params, request_id, self.now_ns()))

    def _refusal(self, peer: bytes, choices: int, chars: int) -> tuple[str, str] | None:
        """(code, message) when no request of so many choices and characters can be taken now."""
        if self.state.draining:
            return "draining", "the server is draining and takes no new requests"
        for reason in self.state.stuck_lanes.values():
            return "engine_failed", reason
        if len(self.state.live) + choices > LIVE_MAX:
            return "overloaded", f"{LIVE_MAX} requests are live, the bound of this server"
        if self.state.live_of(peer) + choices > LIVE_PER_PEER_MAX:
            return "overloaded", f"{LIVE_PER_PEER_MAX} requests of this client are live, the bound"
        if self.state.unread_chars + chars > UNREAD_CHARS_MAX:
            return "overloaded", f"prompts of {UNREAD_CHARS_MAX} characters wait to be read, the bound"
        return None

    def _abort_named(self, peer: bytes, name: str) -> None:
        request = self.state.names.get(peer, {}).get(name)
        if request is not None:
            self.abort_for_client(request)

    def abort_for_client(self, request: Live) -> None:
        """End a request that is live for its client, who gets the terminal event."""
        self.tell(request.peer, request.finished("abort", None))
        self.abort_untold(request)

    def abort_untold(self, request: Live) -> None:
        """The client has its terminal event, or is gone; wait for the owners to let go."""
        self.state.end_for_client(request)
        self.state.aborts += 1
        self._abort_choices(request)

    def _abort_choices(self, request: Live) -> None:
        for choice_id in request.choices:
            if choice_id in self.state.live:
                self.send(self._refs.tokenizer, AbortRequest(choice_id, lap=0, returning=False))

    # --- what becomes of requests ---

    def on_request_accepted(self, message: RequestAccepted) -> None:
        choice = self.state.live.get(message.request_id)
        if choice is None:
            return
        request = choice.request
        request.prompt_tokens = message.prompt_tokens
        request.class_name = message.request_class
        request.accepted += 1
        self.state.prompt_was_read(request)
        if not request.ended and request.accepted == len(request.choices):
            accepted = wire.Accepted(
                request.name, message.prompt_tokens, message.notes, message.request_class
            )
            self.tell(request.peer, accepted)

    def on_request_refused(self, message: RequestRefused) -> None:
        self.state.refused += self._fail(message.request_id, message.code, message.reason)

    def on_request_failed(self, message: RequestFailed) -> None:
        self.state.failed += self._fail(message.request_id, message.code, message.reason)

    def _fail(self, choice_id: int, code: str, reason: str) -> bool:
        """A choice is over, and with it the whole request; True if its client had no terminal event yet."""
        choice = self.state.drop(choice_id)
        if choice is None:
            return False
        self._tell_placement(choice_id, choice.completion_tokens)
        request = choice.request
        tells = not request.ended
        if tells:
            self.tell(request.peer, wire.Failed(request.name, code, reason))
            self.state.end_for_client(request)
            self._abort_choices(request)
        self._peers.look_if_drained()
        return tells

    def on_text_emitted(self, message: TextEmitted) -> None:
        self._output.text(message)

    def on_ids_emitted(self, message: IdsEmitted) -> None:
        self._output.ids(message)

    def on_request_aborted(self, message: RequestAborted) -> None:
        choice = self.state.live.get(message.request_id)
        if choice is not None and choice.request.ended:  # else a stop's abort overtook the text that ends it
            self.forget(message.request_id)

    def forget(self, choice_id: int) -> None:
        """Nobody works on a choice any more."""
        choice = self.state.drop(choice_id)
        assert choice is not None
        self._tell_placement(choice_id, choice.completion_tokens)
        request = choice.request
        if request.all_finished:
            self.state.end_for_client(request)
        self._peers.look_if_drained()

    def _tell_placement(self, choice_id: int, tokens: int) -> None:
        if self._refs.placement is not None:
            self.send(self._refs.placement, RequestEnded(choice_id, tokens))

    def on_lane_stuck(self, message: LaneStuck) -> None:
        """Fail who waits for the lane, and take nobody new; pages stay with the item until it ends."""
        self.state.stuck_lanes[message.lane] = message.reason
        stuck = frozenset(message.requests)
        for choice_id, choice in list(self.state.live.items()):
            request = choice.request
            waits = message.decoding or choice_id in stuck or choice.last_token_ns == 0
            if waits and not request.ended:
                self.state.failed += 1
                self.tell(request.peer, wire.Failed(request.name, "engine_failed", message.reason))
                self.state.end_for_client(request)
                self._abort_choices(request)

    def on_lane_moved(self, message: LaneMoved) -> None:
        self.state.stuck_lanes.pop(message.lane, None)

    # --- peers ---

    def on_peer_gone(self, message: PeerGone) -> None:
        self._peers.gone(message.peer)

    def on_peer_slow(self, message: PeerSlow) -> None:
        self._peers.slow(message)

    def on_keep_alive(self, message: KeepAlive) -> None:
        self._peers.keep_alive()

    def tell(self, peer: bytes, *events: Any) -> None:
        """One frame to a peer; called by the gateway and its helpers only."""
        self.send(self._refs.ingress, SendFrame(peer, self._encoder.encode(wire.Frame(events))))

    # --- policy, state, drain ---

    def on_policy_compiled(self, message: PolicyCompiled) -> None:
        self._policy.compiled(message)

    def on_policy_file_read(self, message: PolicyFileRead) -> None:
        self._policy.file_read(message)

    def on_policy_file_unreadable(self, message: PolicyFileUnreadable) -> None:
        self._policy.file_unreadable(message)

    def on_requests_reported(self, message: RequestsReported) -> None:
        self._explain.reported(message)

    def on_explanation_made(self, message: ExplanationMade) -> None:
        self._explain.made(message)

    def on_state_reported(self, message: StateReported) -> None:
        self._admin.state_reported(message)

    def on_estimator_ready(self, message: EstimatorReady) -> None:
        self.state.ready = True
        self._on_ready()

    def on_engine_failed(self, message: EngineFailed) -> None:
        """The others were rebuilt and know none of the live requests any more."""
        state = self.state
        self._admin.actors_were_rebuilt()
        self._explain.actors_were_rebuilt()
        state.ready = False
        state.stuck_lanes.clear()
        reason = f"{message.actor} failed and was restarted: {message.reason}"
        requests = [request for of_peer in state.names.values() for request in of_peer.values()]
        state.live.clear()
        state.failed += len(requests)
        for request in requests:
            self.tell(request.peer, wire.Failed(request.name, "engine_failed", reason))
            state.end_for_client(request)
        self._peers.look_if_drained()
        self._policy.announce()

    def draining(self) -> None:
        if self.state.draining:
            return
        self.state.draining = True
        for peer in list(self.state.names):
            self.tell(peer, wire.Draining())
        self._peers.look_if_drained()

    def describe(self) -> dict[str, Any]:
        return self._admin.server_state()
