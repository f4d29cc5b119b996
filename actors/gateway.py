"""gateway: the server's face to clients.

It decodes frames from the ingress, validates, gives each request an id of its own inside, so that names of
two clients can not collide, and turns what comes back into events. It outlives a crash of the other actors.
Invariants: every request of a client gets exactly one terminal event; nothing a peer sends raises here; a
peer that is gone, or does not read, has its requests aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from muxk.actors import protocol as wire
from muxk.actors.gateway_state import GatewayOptions, GatewayState, Live, StateCollection
from muxk.actors.messages import (
    AbortRequest,
    ChatTurn,
    EncodeRequest,
    EstimatorReady,
    KeepAlive,
    PolicyCompiled,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    RequestRefused,
    TextEmitted,
    TextRow,
)
from muxk.actors.policy_compiler import Compile, compiler
from muxk.actors.refs import GatewayInbox, Refs
from muxk.actors.validation import REQUEST_ID_CHARS_MAX, Invalid, ModelLimits, validate
from muxk.kernel.actor import Actor
from muxk.kernel.messages import (
    EngineFailed,
    FrameReceived,
    PeerGone,
    PeerSlow,
    PolicyChanged,
    ReportState,
    SendFrame,
    StateReported,
)
from muxk.kernel.policy import PolicyBook

LIVE_MAX = 8192
"""Bound on live requests of all peers."""
LIVE_PER_PEER_MAX = 2048
STATE_REQUESTS_MAX = 64
"""Bound on state requests that wait for the actors' answers."""
SWAPS_MAX = 8
"""Bound on policies that wait to be compiled."""
KEEP_ALIVE_NS = 1_000_000_000
OWED_PER_FRAME = 256
ERROR_CHARS_MAX = 500
"""Of an error that quotes what a client sent: an answer must not be as long as the question."""
REPORT_CHARS_MAX = 20_000
FILENAME_CHARS_MAX = 1024
SLOW_READER = "the client did not read its events in time, so that some were lost"
REPORTING_ACTORS = 7


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
    ) -> None:
        self._refs = refs
        self._options = options
        self._book = book
        self._compile = compile_policy
        self._on_ready = on_ready
        self._limits = ModelLimits(options.vocabulary_size, options.max_context_tokens)
        self._decoder = msgspec.msgpack.Decoder(wire.AnyCommand)
        self._frames = msgspec.msgpack.Decoder(wire.Frame)
        self._named = msgspec.msgpack.Decoder(_NamedCommand)
        self._encoder = msgspec.msgpack.Encoder()
        self.state = GatewayState(policy_name=options.policy_name, policy_sha=options.policy_sha)

    def started(self) -> None:
        self.send_after(KEEP_ALIVE_NS, self._refs.gateway, KeepAlive())

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
                self._collect_state(message.peer, command.ticket)
            case wire.SwapPolicy():
                self._swap(message.peer, command)
            case wire.Drain():
                self._tell(message.peer, wire.Draining())
                self.draining()
            case wire.Hello():
                self._hello(message.peer, command)

    def _answer_broken(self, message: FrameReceived, error: Exception) -> None:
        """A broken `Submit` fails by its name when it has one; anything else is a protocol error."""
        self.state.broken_frames += 1
        try:
            request_id = self._named.decode(message.payload).request_id
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            self._tell(message.peer, wire.ProtocolError(_cut(f"frame can not be understood: {error}")))
            return
        request_id = request_id[:REQUEST_ID_CHARS_MAX]
        if request_id in self.state.names.get(message.peer, {}):
            self._tell(message.peer, wire.DuplicateRequest(request_id))
        else:
            self._tell(message.peer, wire.Failed(request_id, "invalid", _cut(str(error))))

    def _hello(self, peer: bytes, command: wire.Hello) -> None:
        options = self._options
        if command.version != wire.PROTOCOL_VERSION:
            text = f"this server speaks protocol {wire.PROTOCOL_VERSION}, the client {command.version}"
            self._tell(peer, wire.ProtocolError(text))
            return
        welcome = wire.Welcome(
            version=wire.PROTOCOL_VERSION,
            model=options.model,
            device=options.device,
            policy=self.state.policy_name,
            max_context_tokens=options.max_context_tokens,
            vocabulary_size=options.vocabulary_size,
        )
        self._tell(peer, welcome)

    def _submit(self, peer: bytes, submit: wire.Submit) -> None:
        state = self.state
        names = state.names.get(peer, {})
        if submit.request_id in names:
            self._tell(peer, wire.DuplicateRequest(submit.request_id))
            return
        name = submit.request_id[:REQUEST_ID_CHARS_MAX]
        refusal = self._refusal(len(names) + len(state.owed.get(peer, ())))
        if refusal is not None:
            self._tell(peer, wire.Failed(name, *refusal))
            return
        try:
            params = validate(submit, self._limits, state.draw_seed(self._options.seed))
        except Invalid as error:
            self._tell(peer, wire.Failed(name, "invalid", _cut(str(error))))
            return
        state.owed.get(peer, {}).pop(submit.request_id, None)
        request_id = state.add(peer, submit.request_id, self.now_ns())
        turns = submit.messages and tuple(ChatTurn(turn.role, turn.content) for turn in submit.messages)
        encode = EncodeRequest(
            request_id=request_id,
            arrival_ns=self.now_ns(),
            text=submit.prompt,
            turns=turns or None,
            token_ids=None if submit.prompt_token_ids is None else tuple(submit.prompt_token_ids),
            params=params,
            max_tokens_given=submit.max_tokens is not None,
            priority=submit.priority,
        )
        self.send(self._refs.tokenizer, encode)

    def _refusal(self, live_of_peer: int) -> tuple[str, str] | None:
        """(code, message) when no request at all can be taken now."""
        if self.state.draining:
            return "draining", "the server is draining and takes no new requests"
        if len(self.state.live) >= LIVE_MAX:
            return "overloaded", f"{LIVE_MAX} requests are live, the bound of this server"
        if live_of_peer >= LIVE_PER_PEER_MAX:
            return "overloaded", f"{LIVE_PER_PEER_MAX} requests of this client are live, the bound"
        return None

    def _abort_named(self, peer: bytes, name: str) -> None:
        request_id = self.state.names.get(peer, {}).get(name)
        if request_id is None:
            return
        live = self.state.live[request_id]
        self._tell(peer, live.finished("abort", None))
        self._abort(request_id)

    def _abort(self, request_id: int) -> None:
        """The client has its terminal event, or is gone; wait for the owner to let go."""
        self.state.end_for_client(request_id)
        self.state.aborts += 1
        self.send(self._refs.tokenizer, AbortRequest(request_id, lap=0, returning=False))

    # --- what becomes of requests ---

    def on_request_accepted(self, message: RequestAccepted) -> None:
        live = self.state.live.get(message.request_id)
        if live is None:
            return
        live.prompt_tokens = message.prompt_tokens
        if not live.ended:
            self._tell(live.peer, wire.Accepted(live.name, message.prompt_tokens))

    def on_request_refused(self, message: RequestRefused) -> None:
        self.state.refused += 1
        self._fail(message.request_id, message.code, message.reason)

    def on_request_failed(self, message: RequestFailed) -> None:
        self.state.failed += 1
        self._fail(message.request_id, message.code, message.reason)

    def _fail(self, request_id: int, code: str, reason: str) -> None:
        live = self.state.live.get(request_id)
        if live is None:
            return
        if not live.ended:
            self._tell(live.peer, wire.Failed(live.name, code, reason))
        self._forget(request_id)

    def on_text_emitted(self, message: TextEmitted) -> None:
        """One frame a peer and step."""
        events: dict[bytes, list[Any]] = {}
        now_ns = self.now_ns()
        for row in message.rows:
            live = self.state.live.get(row.request_id)
            if live is None:
                continue
            if not live.ended:
                events.setdefault(live.peer, []).extend(self._row_events(live, row, now_ns))
            if row.finish_reason is not None:
                self._forget(row.request_id)
        for peer, of_peer in events.items():
            self._tell(peer, *of_peer)

    def _row_events(self, live: Live, row: TextRow, now_ns: int) -> list[Any]:
        self.state.note_tokens(live, row, now_ns)
        events: list[Any] = [wire.Tokens(live.name, row.text, row.tokens)]
        if row.finish_reason is not None:
            events.append(live.finished(row.finish_reason, row.stop_reason))
        return events

    def on_request_aborted(self, message: RequestAborted) -> None:
        live = self.state.live.get(message.request_id)
        if live is not None and live.ended:  # else a stop string's abort overtook the text that ends it
            self._forget(message.request_id)

    def _forget(self, request_id: int) -> None:
        self.state.end_for_client(request_id)
        self.state.live.pop(request_id, None)
        self._stop_if_drained()

    # --- peers ---

    def on_peer_gone(self, message: PeerGone) -> None:
        self.state.owed.pop(message.peer, None)
        for request_id in list(self.state.names.get(message.peer, {}).values()):
            self._abort(request_id)

    def on_peer_slow(self, message: PeerSlow) -> None:
        """A frame was lost, so that its streams can not be whole any more; ends are sent again later."""
        state = self.state
        names = dict(state.names.get(message.peer, {}))
        lost = self._frames.decode(message.payload).events
        ends = [event for event in lost if isinstance(event, wire.Finished | wire.Failed)]
        ends += [wire.Failed(name, "slow_reader", SLOW_READER) for name in names]
        if ends:
            state.slow_peers += bool(names)
            state.owe(message.peer, ends, LIVE_PER_PEER_MAX)
        for request_id in names.values():
            self._abort(request_id)

    def on_keep_alive(self, message: KeepAlive) -> None:
        for peer in list(self.state.names):
            self._tell(peer)
        for peer, owed in list(self.state.owed.items()):
            self._tell_owed(peer, owed)
        self.send_after(KEEP_ALIVE_NS, self._refs.gateway, KeepAlive())

    def _tell_owed(self, peer: bytes, owed: dict[str, wire.Finished | wire.Failed]) -> None:
        """One frame of ends; what is not taken comes back by PeerSlow."""
        told = list(owed)[:OWED_PER_FRAME]
        self._tell(peer, *(owed.pop(name) for name in told))
        if not owed:
            self.state.owed.pop(peer, None)

    def _tell(self, peer: bytes, *events: Any) -> None:
        self.send(self._refs.ingress, SendFrame(peer, self._encoder.encode(wire.Frame(events))))

    # --- policy, state, drain ---

    def _swap(self, peer: bytes, command: wire.SwapPolicy) -> None:
        state = self.state
        report = ""
        if len(state.swaps) >= SWAPS_MAX:
            report = f"{SWAPS_MAX} policies are being compiled already"
        elif len(command.filename) > FILENAME_CHARS_MAX:
            report = (
                f"filename has {len(command.filename)} characters; at most {FILENAME_CHARS_MAX} are allowed"
            )
        if report:
            self._tell(peer, wire.PolicySwapped(command.ticket, False, "", "", report))
            return
        ticket = state.next_ticket()
        state.swaps[ticket] = (peer, command.ticket)
        self.offload(compiler(self._compile, self._book, command, ticket), size=len(command.source))

    def on_policy_compiled(self, message: PolicyCompiled) -> None:
        waiting = self.state.swaps.pop(message.ticket, None)
        accepted = bool(message.sha)
        if accepted:
            self.state.policy_name, self.state.policy_sha = message.name, message.sha
            self._announce_policy()
        if waiting is not None:
            peer, ticket = waiting
            report = _cut(message.report, REPORT_CHARS_MAX)
            answer = wire.PolicySwapped(ticket, accepted, message.name, message.sha, report)
            self._tell(peer, answer)

    def _announce_policy(self) -> None:
        changed = PolicyChanged(self.state.policy_sha)
        self.send(self._refs.arbiter, changed)
        self.send(self._refs.admission, changed)
        self.send(self._refs.decode, changed)

    def _collect_state(self, peer: bytes, ticket: int) -> None:
        state = self.state
        if len(state.collections) >= STATE_REQUESTS_MAX:
            self._tell(peer, wire.ProtocolError(f"{STATE_REQUESTS_MAX} state requests wait already"))
            return
        collection = state.next_ticket()
        state.collections[collection] = StateCollection(peer, ticket, {"server": self._server_state()})
        report = ReportState(collection)
        self.send(self._refs.tokenizer, report)
        self.send(self._refs.admission, report)
        self.send(self._refs.kv_pool, report)
        self.send(self._refs.prefill, report)
        self.send(self._refs.decode, report)
        self.send(self._refs.estimator, report)
        self.send(self._refs.arbiter, report)

    def on_state_reported(self, message: StateReported) -> None:
        collection = self.state.collections.get(message.ticket)
        if collection is None:
            return
        collection.parts[message.actor] = message.state
        if len(collection.parts) == REPORTING_ACTORS + 1:
            del self.state.collections[message.ticket]
            self._tell(collection.peer, wire.State(collection.ticket, collection.parts))

    def _server_state(self) -> dict[str, Any]:
        shown = self.state.describe()
        shown.update(model=self._options.model, device=self._options.device)
        return shown

    def on_estimator_ready(self, message: EstimatorReady) -> None:
        self.state.ready = True
        self._on_ready()

    def on_engine_failed(self, message: EngineFailed) -> None:
        """The others were rebuilt and know none of the live requests any more."""
        state = self.state
        for collection in state.collections.values():
            self._tell(collection.peer, wire.State(collection.ticket, collection.parts))
        state.collections.clear()
        state.ready = False
        reason = f"{message.actor} failed and was restarted: {message.reason}"
        for request_id in list(state.live):
            self._fail(request_id, "engine_failed", reason)
        self._announce_policy()

    def draining(self) -> None:
        if self.state.draining:
            return
        self.state.draining = True
        for peer in list(self.state.names):
            self._tell(peer, wire.Draining())
        self._stop_if_drained()

    def _stop_if_drained(self) -> None:
        if self.state.draining and not self.state.live:
            self.stop("drained")

    def describe(self) -> dict[str, Any]:
        return self._server_state()


def _cut(text: str, length: int = ERROR_CHARS_MAX) -> str:
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"
