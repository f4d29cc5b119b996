"""tokenizer: text to tokens at the front of a request's life, tokens to text at its end.

The gateway sends it prompts; encoding runs on the runtime's thread, off the loop, one at a time, because a
prompt can take long and the library's tokenizer is not safe for two threads. Detokenising is a table look-up
and an incremental UTF-8 decoder, a few microseconds a token, and stays in the handler. A request with `n`
choices is encoded once and goes on as `n` requests. The tokens of a request that wants no text do not come
by here. Invariant: it holds text state for exactly those choices that were encoded, whose tokens come by, and
that have not ended yet.
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
    SamplingParams,
    StopRequest,
    TextEmitted,
    TextRow,
    TokensEmitted,
)
from muxk.actors.refs import Refs, TokenizerInbox
from muxk.actors.text_output import TextOutput, WantedPrompt, choice_params
from muxk.kernel.actor import Actor, Message
from muxk.kernel.messages import ReportRequests, ReportState, RequestsReported, StateReported
from muxk.kernel.statuses import Reason, StatusReport
from muxk.kernel.work import int32_bytes

PROMPT_LOGPROBS_MAX = 1 << 15
"""Log-probabilities of one prompt: its tokens times how many are reported of each."""


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


@dataclass
class TokenizerState:
    encoding: int | None = None
    """The request on the thread."""
    waiting: dict[int, EncodeRequest] = field(default_factory=dict)
    """In order of arrival; bounded by the gateway's bound on live requests."""
    unencoded: dict[int, int] = field(default_factory=dict)
    """Choice -> its request, of those that wait or are on the thread and were not aborted."""
    live: dict[int, TextOutput] = field(default_factory=dict)
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
        self.state.unencoded |= dict.fromkeys(_choice_ids(message), message.request_id)
        if message.token_ids is not None:
            self._admit(message, message.token_ids)
            return
        self.state.waiting[message.request_id] = message
        self._encode_next()

    def _encode_next(self) -> None:
        state = self.state
        if state.encoding is not None or not state.waiting:
            return
        request = state.waiting.pop(next(iter(state.waiting)))
        state.encoding = request.request_id
        self.offload(_encoder(self._tokenizer, request), size=_text_size(request))

    def on_prompt_encoded(self, message: PromptEncoded) -> None:
        self.state.encoding = None
        self.state.encoded += 1
        self._admit(message.request, message.prompt)
        self._encode_next()

    def on_encode_failed(self, message: EncodeFailed) -> None:
        self.state.encoding = None
        self._refuse(message.request, message.reason)
        self._encode_next()

    def _refuse(self, request: EncodeRequest, reason: str) -> None:
        for choice_id in self._take_unencoded(request):
            self.send(self._refs.gateway, RequestRefused(choice_id, "invalid", reason))

    def _take_unencoded(self, request: EncodeRequest) -> list[int]:
        """Its choices that were not aborted meanwhile."""
        unencoded = self.state.unencoded
        return [choice_id for choice_id in _choice_ids(request) if unencoded.pop(choice_id, None) is not None]

    def _admit(self, message: EncodeRequest, prompt: bytes) -> None:
        """All choices one after the other, so that they wait side by side and share the prompt's pages."""
        if message.truncate_prompt_tokens is not None:
            prompt = prompt[-4 * message.truncate_prompt_tokens :]
        problem = _prompt_problem(message, len(prompt) // 4)
        if problem is not None:
            self._refuse(message, problem)
            return
        for choice_id in self._take_unencoded(message):
            params = choice_params(message.params, choice_id - message.request_id)
            as_ids = _goes_as_ids(message)
            if not as_ids:
                self.state.live[choice_id] = self._text_output(message, params, prompt)
            request = Request(
                request_id=choice_id,
                arrival_ns=message.arrival_ns,
                deadline_ns=0,
                prompt=prompt,
                generated=b"",
                params=params,
                priority=message.priority,
                recomputes=0,
                request_class=message.request_class,
                deadline_given_ns=message.deadline_given_ns,
                as_ids=as_ids,
            )
            self.send(self._refs.intake, AdmitRequest(request, message.max_tokens_given))

    def _text_output(self, message: EncodeRequest, params: SamplingParams, prompt: bytes) -> TextOutput:
        """Choice 0 tells the prompt to a client that asked for it."""
        wanted = None
        if params.choice == 0 and (message.echo or params.prompt_logprobs is not None):
            text = None if message.truncate_prompt_tokens is not None else message.text
            wanted = WantedPrompt(prompt, text, message.echo and params.detokenize)
        tokenizer = self._tokenizer
        return TextOutput(params, tokenizer.token_bytes, tokenizer.special_ids, message.generate, wanted)

    # --- tokens to text ---

    def on_tokens_emitted(self, message: TokensEmitted) -> None:
        rows = []
        for row in message.rows:
            output = self.state.live.get(row.request_id)
            if output is None:
                self._late(row, message.group)
                continue
            rows.append(self._text_row(row, output, message.group))
        if rows:
            self.send(self._refs.gateway, TextEmitted(tuple(rows)))

    def _late(self, row: EmittedRow, group: int) -> None:
        """Of a request that has ended: its stop may have missed it while it moved between devices."""
        self.state.late_rows += 1
        if self._refs.placement is not None and row.finish_reason is None:
            self.send(self._refs.stops, StopRequest(row.request_id, group))

    def _text_row(self, row: EmittedRow, output: TextOutput, group: int) -> TextRow:
        text_row = output.row(row)
        if text_row.finish_reason is not None:
            del self.state.live[row.request_id]
            if row.finish_reason is None:
                self.send(self._refs.stops, StopRequest(row.request_id, group))
        return text_row

    def on_request_refused(self, message: RequestRefused) -> None:
        self.state.live.pop(message.request_id, None)
        self.send(self._refs.gateway, message)

    def on_request_failed(self, message: RequestFailed) -> None:
        self.state.live.pop(message.request_id, None)
        self.send(self._refs.gateway, message)

    def on_abort_request(self, message: AbortRequest) -> None:
        """It is first in the chain of owners: end what waits here, else pass it on behind the request."""
        state = self.state
        request_id = state.unencoded.pop(message.request_id, None)
        if request_id is None:
            state.live.pop(message.request_id, None)
            self.send(self._refs.intake, message)
            return
        request = state.waiting.get(request_id)
        if request is not None and not any(choice in state.unencoded for choice in _choice_ids(request)):
            del state.waiting[request_id]
        self.send(self._refs.gateway, RequestAborted(message.request_id))

    def on_report_requests(self, message: ReportRequests) -> None:
        report = StatusReport("tokenizer", message.request_ids)
        for choice_id, request_id in self.state.unencoded.items():
            if report.wants(choice_id):
                runs = request_id == self.state.encoding
                detail = "its prompt is being encoded" if runs else "prompts of others are encoded first"
                report.add(choice_id, Reason.ENCODING, detail)
        self.send(self._refs.gateway, RequestsReported.of(report, message.ticket))

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


def _choice_ids(request: EncodeRequest) -> range:
    return range(request.request_id, request.request_id + request.choices)


def _prompt_problem(message: EncodeRequest, prompt_tokens: int) -> str | None:
    """Why a prompt of so many tokens can not be served, if it can not."""
    if prompt_tokens == 0:
        return "prompt is empty: it has no tokens"
    wanted = message.params.prompt_logprobs
    if wanted is None or prompt_tokens * (1 + wanted) <= PROMPT_LOGPROBS_MAX:
        return None
    fits = PROMPT_LOGPROBS_MAX // prompt_tokens - 1
    hint = f"it may be {fits} at most" if fits >= 0 else "the prompt is too long for any report"
    return f"prompt_logprobs is {wanted}; for a prompt of {prompt_tokens} tokens {hint}"


def _goes_as_ids(message: EncodeRequest) -> bool:
    """Nothing is to be done here for its tokens, the first of which may bring the prompt along."""
    tells_prompt = message.echo or message.params.prompt_logprobs is not None
    return not (message.params.detokenize or tells_prompt)


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
            return EncodeFailed(request, f"prompt can not be encoded: {error}")
        return PromptEncoded(request, int32_bytes(ids))

    return encode
