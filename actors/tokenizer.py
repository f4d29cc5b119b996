"""tokenizer: text to tokens at the front of a request's life, tokens to text at its end.

The gateway sends it prompts; encoding runs on the runtime's thread, off the loop, one at a time, because a
prompt can take long and the library's tokenizer is not safe for two threads. Detokenising is a table look-up
and an incremental UTF-8 decoder, a few microseconds a token, and stays in the handler. Invariant: it holds
text state for exactly those requests that were encoded and have no terminal event yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from muxk.actors.messages import (
    AbortRequest,
    AdmitRequest,
    EmittedRow,
    EncodeFailed,
    EncodeRequest,
    PromptEncoded,
    Request,
    RequestAborted,
    RequestFailed,
    RequestRefused,
    StopRequest,
    TextEmitted,
    TextRow,
    TokensEmitted,
)
from muxk.actors.refs import Refs, TokenizerInbox
from muxk.kernel.actor import Actor, Message
from muxk.kernel.messages import ReportState, StateReported
from muxk.kernel.work import int32_bytes
from muxk.models.detokenizer import Detokenizer, StopMatcher


class Tokenizer(Protocol):
    """What the actor needs of a model's tokenizer."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def chat(self, turns: Sequence[tuple[str, str]]) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class TextState:
    """The text side of one live request."""

    detokenizer: Detokenizer
    matcher: StopMatcher | None


@dataclass
class TokenizerState:
    encoding: int | None = None
    """The request on the thread."""
    waiting: dict[int, EncodeRequest] = field(default_factory=dict)
    """In order of arrival; bounded by the gateway's bound on live requests."""
    aborted_encoding: bool = False
    live: dict[int, TextState] = field(default_factory=dict)
    late_rows: int = 0
    encoded: int = 0


class TokenizerActor(Actor):
    """One a server."""

    Accepts = TokenizerInbox

    def __init__(self, refs: Refs, tokenizer: Tokenizer) -> None:
        self._refs = refs
        self._tokenizer = tokenizer
        self.state = TokenizerState()

    # --- text to tokens ---

    def on_encode_request(self, message: EncodeRequest) -> None:
        if message.token_ids is not None:
            self._admit(message, int32_bytes(message.token_ids))
            return
        self.state.waiting[message.request_id] = message
        self._encode_next()

    def _encode_next(self) -> None:
        state = self.state
        if state.encoding is not None or not state.waiting:
            return
        request = state.waiting.pop(next(iter(state.waiting)))
        state.encoding = request.request_id
        state.aborted_encoding = False
        self.offload(_encoder(self._tokenizer, request), size=_text_size(request))

    def on_prompt_encoded(self, message: PromptEncoded) -> None:
        state = self.state
        state.encoding = None
        state.encoded += 1
        request_id = message.request.request_id
        if state.aborted_encoding:
            self.send(self._refs.gateway, RequestAborted(request_id))
        elif not message.prompt:
            reason = "prompt is empty: it has no tokens"
            self.send(self._refs.gateway, RequestRefused(request_id, "invalid", reason))
        else:
            self._admit(message.request, message.prompt)
        self._encode_next()

    def on_encode_failed(self, message: EncodeFailed) -> None:
        self.state.encoding = None
        self.send(self._refs.gateway, RequestRefused(message.request_id, "invalid", message.reason))
        self._encode_next()

    def _admit(self, message: EncodeRequest, prompt: bytes) -> None:
        stops = message.params.stop
        matcher = StopMatcher(stops) if stops else None
        skipped = self._tokenizer.special_ids if message.params.skip_special_tokens else frozenset()
        detokenizer = Detokenizer(self._tokenizer.token_bytes, skipped)
        self.state.live[message.request_id] = TextState(detokenizer, matcher)
        request = Request(
            request_id=message.request_id,
            arrival_ns=message.arrival_ns,
            deadline_ns=0,
            prompt=prompt,
            generated=b"",
            params=message.params,
            priority=message.priority,
            recomputes=0,
        )
        self.send(self._refs.admission, AdmitRequest(request, message.max_tokens_given))

    # --- tokens to text ---

    def on_tokens_emitted(self, message: TokensEmitted) -> None:
        rows = []
        for row in message.rows:
            text_state = self.state.live.get(row.request_id)
            if text_state is None:
                self.state.late_rows += 1
                continue
            rows.append(self._text_row(row, text_state))
        if rows:
            self.send(self._refs.gateway, TextEmitted(tuple(rows)))

    def _text_row(self, row: EmittedRow, text_state: TextState) -> TextRow:
        text = text_state.detokenizer.push(row.tokens)
        if row.finish_reason is not None:
            text += text_state.detokenizer.finish()
        stop: str | None = None
        finish_reason = row.finish_reason
        if text_state.matcher is not None:
            text, stop = text_state.matcher.push(text)
            if stop is not None:
                if finish_reason is None:
                    self.send(self._refs.decode, StopRequest(row.request_id))
                finish_reason = "stop"
            elif finish_reason is not None:
                text += text_state.matcher.finish()
        if finish_reason is not None:
            del self.state.live[row.request_id]
        return TextRow(row.request_id, text, row.tokens, finish_reason, row.reused_tokens, stop)

    def on_request_refused(self, message: RequestRefused) -> None:
        self.state.live.pop(message.request_id, None)
        self.send(self._refs.gateway, message)

    def on_request_failed(self, message: RequestFailed) -> None:
        self.state.live.pop(message.request_id, None)
        self.send(self._refs.gateway, message)

    def on_abort_request(self, message: AbortRequest) -> None:
        """It is first in the chain of owners: end what waits here, else pass it on behind the request."""
        state = self.state
        request_id = message.request_id
        state.live.pop(request_id, None)
        if state.encoding == request_id:
            state.aborted_encoding = True
            return
        if state.waiting.pop(request_id, None) is not None:
            self.send(self._refs.gateway, RequestAborted(request_id))
            return
        self.send(self._refs.admission, message)

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, "tokenizer", self.describe()))

    def describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "waiting": len(state.waiting),
            "encoded": state.encoded,
            "live": len(state.live),
            "late_rows": state.late_rows,
        }


def _text_size(request: EncodeRequest) -> int:
    """Characters to encode: what the time on the thread grows with."""
    if request.text is not None:
        return len(request.text)
    return sum(len(turn.content) for turn in request.turns or ())


def _encoder(tokenizer: Tokenizer, request: EncodeRequest) -> Callable[[], Message]:
    """A function for the runtime's thread: it touches nothing but its arguments."""

    def encode() -> Message:
        try:
            if request.text is not None:
                ids = tokenizer.encode(request.text)
            else:
                ids = tokenizer.chat([(turn.role, turn.content) for turn in request.turns or ()])
        except Exception as error:  # a prompt or template that can not be encoded refuses its request only
            return EncodeFailed(request.request_id, f"prompt can not be encoded: {error}")
        return PromptEncoded(request, int32_bytes(ids))

    return encode
