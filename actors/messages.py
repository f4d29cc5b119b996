"""All messages between actors, in the order of a request's life (sender -> receiver).

Messages to and from the arbiter are in `kernel/messages.py`. Commands are imperative, facts are past tense.
Token columns are `int32` bytes, see `kernel/work.py`.
"""

from __future__ import annotations

import msgspec
from muxk.actors.protocol import TokenLogprob
from muxk.kernel.actor import Message
from muxk.kernel.messages import DecodeStepDone
from muxk.kernel.view import RequestClass
from muxk.kernel.work import RowLogprobs


class SamplingParams(msgspec.Struct, frozen=True):
    """Validated sampling parameters of one request."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    stop: tuple[str, ...]
    ignore_eos: bool
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), ascending in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """No end of the sequence before so many generated tokens."""
    logprobs: int | None = None
    """Most likely tokens to report beside each generated one; None: no report."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    """False: the client wants token ids and no text."""

    @property
    def penalises(self) -> bool:
        """The sampler has to know what was generated."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class ChatTurn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Request(msgspec.Struct, frozen=True):
    """A tokenised request, as it travels from tokenizer to decode (and back, when recomputed)."""

    request_id: int
    arrival_ns: int
    deadline_ns: int
    """When its first token is due; 0 until admission sets it."""
    prompt: bytes
    """int32[prompt_tokens], what the client sent."""
    generated: bytes
    """int32[generated_tokens]; not empty only for a request that is recomputed."""
    params: SamplingParams
    priority: int
    recomputes: int
    request_class: str = ""
    """What the client named; policies map it to SLOs."""
    deadline_given_ns: int | None = None
    """The client's own deadline for its first token, from arrival on, in place of the policy's TTFT SLO."""
    notes: tuple[str, ...] = ()
    """What the client is told with `Accepted`: fields that have no effect here."""
    in_class: RequestClass | None = None
    """What the policy made of it; None until admission asks."""
    classified_by: str = ""
    """The sha of that policy."""
    decode_group: int | None = None
    """The group that decodes it, where there are several; None: the one that computes its prompt."""
    as_ids: bool = False
    """Its tokens go from decode to the gateway as they are: they become no text, and no prompt is told."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def generated_tokens(self) -> int:
        return len(self.generated) // 4

    @property
    def tokens(self) -> bytes:
        """Everything prefill has to compute: the prompt and, after a recompute, what was generated."""
        return self.prompt + self.generated


class EncodeRequest(Message, frozen=True):
    """gateway -> tokenizer: a validated request; exactly one of the three prompts is set."""

    request_id: int
    """Of its first choice; those of the others follow it."""
    arrival_ns: int
    text: str | None
    turns: tuple[ChatTurn, ...] | None
    token_ids: bytes | None
    """int32."""
    params: SamplingParams
    max_tokens_given: bool
    """False when the client named no `max_tokens`: admission then gives the room left in the context."""
    priority: int
    choices: int = 1
    generate: bool = True
    """False: the prompt is only read; `max_tokens` is 1 for the actors behind, and that token is dropped."""
    echo: bool = False
    truncate_prompt_tokens: int | None = None
    request_class: str = ""
    deadline_given_ns: int | None = None
    """From its arrival on."""


class PromptEncoded(Message, frozen=True):
    """tokenizer -> tokenizer, from its thread: the tokens of a prompt."""

    request: EncodeRequest
    prompt: bytes


class EncodeFailed(Message, frozen=True):
    """tokenizer -> tokenizer, from its thread: the prompt could not be encoded."""

    request: EncodeRequest
    reason: str


class AdmitRequest(Message, frozen=True):
    """tokenizer -> admission: a tokenised request."""

    request: Request
    max_tokens_given: bool


class RequestAccepted(Message, frozen=True):
    """admission -> gateway: it waits for prefill."""

    request_id: int
    prompt_tokens: int
    notes: tuple[str, ...] = ()
    """`Request.notes`, for the client."""
    request_class: str = ""
    """The class that the policy put it in."""


class RequestRefused(Message, frozen=True):
    """admission -> tokenizer -> gateway: the request ends here."""

    request_id: int
    code: str
    reason: str


class ReservePages(Message, frozen=True):
    """admission -> kv_pool: pages for the prompts of a batch, in this order, as far as they go."""

    requests: tuple[Request, ...]


class ReservedRequest(msgspec.Struct, frozen=True):
    """A request with its pages."""

    request: Request
    pages: tuple[int, ...]
    """Enough for all its tokens and one more."""
    reused_tokens: int
    """Tokens at the front whose KV is in the pages already: a multiple of the page size."""


class StartPrefill(Message, frozen=True):
    """kv_pool -> prefill: a batch with pages; never empty."""

    requests: tuple[ReservedRequest, ...]


class PagesReserved(Message, frozen=True):
    """kv_pool -> admission: who got pages and who has to wait for PagesFreed."""

    reserved: tuple[int, ...]
    denied: tuple[int, ...]
    new_tokens: tuple[int, ...]
    """For each of `reserved`, what prefill has to compute."""


class PagesFreed(Message, frozen=True):
    """kv_pool -> admission: pages came back after a denial."""


class FindHead(Message, frozen=True):
    """admission -> admission: the head of the queue was aborted, look for the next one."""


class LookForOverdue(Message, frozen=True):
    """admission -> admission, by timer: a request has waited for the `max_wait` of its class."""


class PagesFilled(Message, frozen=True):
    """prefill -> kv_pool: the KV of these prompts is written; full pages may be shared from now on."""

    request_ids: tuple[int, ...]


class JoinDecode(Message, frozen=True):
    """prefill -> decode: prompts whose first token was sampled."""

    requests: tuple[ReservedRequest, ...]
    tokens: bytes
    """int32[requests]."""
    decode_running: bool
    """A decode step was in flight when their prefill ended."""
    logprobs: tuple[RowLogprobs, ...] = ()
    """Of the first tokens; `row` is the place in `requests`."""
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    step: DecodeStepDone | None = None
    """The decode step that ran in the same fused item."""


class GrowPages(Message, frozen=True):
    """decode -> kv_pool: one more page for each of these, ahead of need."""

    request_ids: tuple[int, ...]
    soon: tuple[int, ...] = ()
    """They will ask some steps later, and get theirs now where there are plenty."""


class PagesGrown(Message, frozen=True):
    """kv_pool -> decode: the new pages, and who got none."""

    request_ids: tuple[int, ...]
    pages: tuple[int, ...]
    """One for each of `request_ids`."""
    denied: tuple[int, ...]
    later: tuple[int, ...] = ()
    """Of those that asked early: there are not plenty."""


class EmittedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request in one step."""

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: str | None
    """`stop`, `length`, or None while it goes on."""
    reused_tokens: int
    """Prompt tokens that came from the prefix index."""
    stop_token: int | None = None
    """The member of `stop_token_ids` that ended it, if one did."""
    logprobs: tuple[RowLogprobs, ...] = ()
    """One for each of `tokens` when they were asked for."""
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    """With the first token, once a request: of prompt tokens 1 and up."""
    as_ids: bool = False
    """As its request has it."""


class TokensEmitted(Message, frozen=True):
    """decode -> tokenizer: what one step brought, one message a step."""

    rows: tuple[EmittedRow, ...]
    group: int = 0


class EarlierIds(msgspec.Struct, frozen=True, gc=False):
    """What steps brought that ended one after the other and that are told of together."""

    requests: tuple[int, ...]
    """All `as_ids`, and all go on."""
    tokens: bytes
    """int32[steps, requests]."""
    known_ns: tuple[int, ...]
    """When the arbiter knew of the end of each."""


class IdsEmitted(Message, frozen=True):
    """decode -> gateway: what one step brought to requests that go `as_ids`, one message a step."""

    rows: tuple[EmittedRow, ...]
    """Of which there is more to say than one new token."""
    requests: tuple[int, ...]
    """Others, which go on; what `rows` has of them came before."""
    tokens: bytes
    """int32: one for each of `requests`."""
    earlier: EarlierIds | None = None
    """Of steps before it."""


class RequestFailed(Message, frozen=True):
    """prefill, decode -> tokenizer -> gateway: the request ends with an error."""

    request_id: int
    code: str
    reason: str


class StopRequest(Message, frozen=True):
    """tokenizer -> decode: a stop string was seen; the client has its terminal event already."""

    request_id: int
    group: int = 0
    """Of the decode that its last token came from."""


class PromptText(msgspec.Struct, frozen=True, array_like=True):
    """The prompt, for a client that asked for it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Of the tokens from the second on, or none."""


class TextRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New text of one choice in one step."""

    request_id: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    reused_tokens: int
    stop_reason: str | int | None
    """The stop string, or the stop token, that ended it, if one did."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: PromptText | None = None
    """With the first row of choice 0."""


class TextEmitted(Message, frozen=True):
    """tokenizer -> gateway: one message a step."""

    rows: tuple[TextRow, ...]


class ReleasePages(Message, frozen=True):
    """prefill, decode -> kv_pool: no item in flight touches its pages any more; idempotent."""

    request_id: int
    tokens: bytes
    """int32: tokens whose KV is written, for the prefix index; empty to keep nothing."""
    recompute: Request | None
    """A request to be computed again; it goes on to admission once its pages are back."""


class RecomputeRequest(Message, frozen=True):
    """kv_pool -> admission: its pages went to others; compute prompt and generated tokens again."""

    request: Request


class AbortRequest(Message, frozen=True):
    """gateway -> tokenizer -> admission -> kv_pool -> prefill -> decode: to whoever owns it.

    It follows the request on the same FIFO channels, so it can not overtake it. A request that is being
    recomputed went from decode through kv_pool to admission: decode sends the abort after it, a few times.
    """

    request_id: int
    lap: int
    """How often it came to decode before."""
    returning: bool
    """On its way from decode through kv_pool to admission."""
    group: int = 0
    """Of the decode that sent it back."""


class RequestAborted(Message, frozen=True):
    """owner -> gateway: the abort is done and its pages are released or about to be."""

    request_id: int


class EstimatorReady(Message, frozen=True):
    """estimator -> gateway: the first tables are out; requests are served from now on.

    With several devices they go through placement, which waits for all.
    """


class KeepAlive(Message, frozen=True):
    """gateway -> gateway, by timer: send an empty frame to peers with live requests, to find dead ones."""
