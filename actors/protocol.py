"""The wire protocol between a client and the gateway: msgspec MessagePack over ZeroMQ DEALER/ROUTER.

A client connects one DEALER socket and sends one frame a command. The server answers with frames that hold
a list of events. A request is named by the client; names are private to the connection. Every accepted or
refused request gets exactly one terminal event, `Finished` or `Failed`, however many choices it has.
Nothing is ever pickled.

The readable description, with an example exchange, is in `client/protocol.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from muxk.policies.explanation import Explanation

PROTOCOL_VERSION = 1


class Command(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what a client sends."""


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of what the server sends."""


class Hello(Command, frozen=True):
    """First command of a connection; answered by `Welcome` or `ProtocolError`."""

    version: int = PROTOCOL_VERSION


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class Submit(Command, frozen=True):
    """Generate. Exactly one of `prompt`, `prompt_token_ids` and `messages`. Fields as vLLM names them.

    The allowed ranges are in `validation.py`; a value outside fails the request with its field's name.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    max_tokens: int | None = None
    """None: the room left in the context. 0 only with `echo` or `prompt_logprobs`: nothing is generated."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    seed: int | None = None
    """None: one is drawn."""
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    priority: int = 0
    """Lower is sooner, where the policy looks at it."""
    n: int = 1
    """Choices to generate. With temperature 0 they are all the same."""
    min_p: float = 0.0
    """Drop tokens that are less likely than this share of the likeliest one's probability; 0: off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int | str, float] | None = None
    """Token id (a string of digits counts as well) -> what is added to its logit."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output, as the model's own end does."""
    include_stop_str_in_output: bool = False
    """Let the stop string, or the text of the stop token, end the text."""
    min_tokens: int = 0
    """No end of the sequence, stop token or stop string before so many tokens."""
    logprobs: int | None = None
    """Report each token's log-probability, and this many of the likeliest; None: no report."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. With `echo` and `logprobs` it is `logprobs` unless given."""
    echo: bool = False
    """Send the prompt's text and tokens first, as an event `Prompt`."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of the prompt."""
    skip_special_tokens: bool = True
    """Leave the text of special tokens out of the output's text."""
    detokenize: bool = True
    """False: token ids and no text, which costs the server less. Not with `stop`, which is found in text."""
    deadline: float | None = None
    """Seconds from the request's arrival until its first token is due, in place of the policy's SLO."""
    request_class: str = ""
    """What policies map to SLOs, such as `interactive`."""


class Abort(Command, frozen=True):
    """End a request; a request that is not live is ignored."""

    request_id: str


class GetState(Command, frozen=True):
    """Ask for `State`."""

    ticket: int = 0


class SwapPolicy(Command, frozen=True):
    """Admin: replace the running policy; answered by `PolicySwapped`."""

    source: str
    """The YAML text."""
    filename: str = "<client>"
    """For error places."""
    settings: dict[str, str] = {}
    """Values of the policy's params, as `--set` gives them."""
    ticket: int = 0
    plugin: str = ""
    """Name of a policy that is installed where the server runs, in place of `source`, which is empty then."""


class SetShadow(Command, frozen=True):
    """Admin: ask another policy too, which never acts; answered by `ShadowSet`."""

    source: str | None
    """The YAML text; None ends the shadow."""
    filename: str = "<client>"
    settings: dict[str, str] = {}
    ticket: int = 0
    plugin: str = ""
    """As for `SwapPolicy`."""


class Explain(Command, frozen=True):
    """Ask why requests wait and what the policy decided; answered by `Explained`.

    On the clients' socket only `requests` and `request`, and only about requests of this connection, for
    decisions show what others asked for. The admin socket knows of all.
    """

    about: Literal["requests", "request", "moment", "latest", "differences"] = "requests"
    """All live requests; one request and the decisions that touched it; decisions around a moment; the last
    ones; the last ones in which the shadow policy differed."""
    request_id: str = ""
    """For `request`: as its client named it."""
    at: float = 0.0
    """For `moment`: seconds since the server started."""
    count: int = 20
    """Decisions that are told at most."""
    ticket: int = 0


class AbortAny(Command, frozen=True):
    """Admin: end requests of every client, by the names their clients gave them; answered by `AbortedAny`."""

    request_ids: list[str] | None = None
    """None: all live requests."""
    ticket: int = 0


class Drain(Command, frozen=True):
    """Admin: finish what is accepted, refuse new requests, then stop the server."""


class Welcome(Event, frozen=True):
    """The connection is open."""

    version: int
    model: str
    device: str
    policy: str
    max_context_tokens: int
    vocabulary_size: int


class Accepted(Event, frozen=True, omit_defaults=True):
    """The request waits for prefill; with `n` choices, all of them do."""

    request_id: str
    prompt_tokens: int
    notes: tuple[str, ...] = ()
    """What the client should know: fields that have no effect under the policy in force."""
    request_class: str = ""
    """The class that the policy put it in, which may not be the one that was named."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural log-probability of one token, of the model's own logits: before temperature, penalties,
    bias and filters. The likeliest tokens are columns of equal length, the likeliest first."""

    token_id: int
    token: bytes
    """What it adds to the text; may be a part of a character. Empty with `detokenize` false."""
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_ids: tuple[int, ...] = ()
    top_tokens: tuple[bytes, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Prompt(Event, frozen=True, omit_defaults=True):
    """The prompt as the model read it, once a request, before the first `Tokens` of choice 0."""

    request_id: str
    text: str
    """Empty unless `echo` was asked for, and with `detokenize` false."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens from the second on: the first has no probability. Empty unless asked for."""


class Tokens(Event, frozen=True, omit_defaults=True):
    """New output of a choice. `text` may lag behind `token_ids`: it never splits a character."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` when they were asked for."""


class TokenIds(Event, frozen=True, omit_defaults=True):
    """New tokens of requests with `detokenize` false: all that a step brought this client, in one event.

    Those that ask for log-probabilities or to see their prompt get `Tokens` with an empty text instead.
    """

    request_ids: tuple[str, ...]
    token_ids: tuple[int, ...]
    """One for each of `request_ids`."""
    choices: tuple[int, ...] = ()
    """The choice of each; empty when all are choice 0."""
    at_ns: int | None = None
    """When the step ended, by the server's clock, where that is past: a server in virtual time tells of some
    steps together."""


class ChoiceFinished(Event, frozen=True):
    """One choice ended well; only of requests with `n` above 1, and not terminal."""

    request_id: str
    choice: int
    finish_reason: str
    """`stop` or `length`."""
    stop_reason: str | int | None
    completion_tokens: int


class Finished(Event, frozen=True):
    """Terminal: the request, with all its choices, ended well."""

    request_id: str
    finish_reason: str
    """`stop`, `length` or `abort`. With several choices it is that of choice 0, or `abort`, which ends
    every choice without a `ChoiceFinished`."""
    stop_reason: str | int | None
    """The stop string, or the id of the stop token, that ended it, if one did."""
    prompt_tokens: int
    completion_tokens: int
    """Of all choices together."""
    cached_tokens: int


class Failed(Event, frozen=True):
    """Terminal: the request was refused or broke."""

    request_id: str
    code: str
    """`invalid`, `never_fits`, `overloaded`, `draining`, `engine_failed`, `slow_reader`."""
    message: str


class DuplicateRequest(Event, frozen=True):
    """Not terminal: a `Submit` named a request of this connection that is still live; it was ignored."""

    request_id: str


class State(Event, frozen=True):
    """A snapshot: one entry an actor, plus `server`."""

    ticket: int
    state: dict[str, Any]


class PolicySwapped(Event, frozen=True):
    """The outcome of `SwapPolicy`: when `accepted` is false the old policy goes on."""

    ticket: int
    accepted: bool
    name: str
    sha: str
    report: str


class ShadowSet(Event, frozen=True):
    """The outcome of `SetShadow`; `name` and `sha` are empty when there is no shadow now."""

    ticket: int
    accepted: bool
    name: str
    sha: str
    report: str


class ExplainedRequest(msgspec.Struct, frozen=True):
    """Where one choice of a request is, and why."""

    request_id: str
    choice: int
    client: str
    """Short for the connection it came by."""
    where: str
    """The actor that knows best; empty while it is on its way between two."""
    code: str
    """Of the closed set of `kernel/statuses.py`; `moving` while it is on its way, `ended` after its end."""
    detail: str
    rule: str | None
    """`point/rule` of the rule that decided it, if one did."""
    request_class: str
    waited: float
    """Seconds since it arrived."""
    tokens: int
    """That it got so far."""


class Explained(Event, frozen=True):
    """The answer to `Explain`."""

    ticket: int
    error: str = ""
    """Why there is no answer, or empty."""
    now: float = 0.0
    """Seconds since the server started."""
    live: int = 0
    """Choices of requests that are live; not all are in `requests` when there are very many."""
    requests: tuple[ExplainedRequest, ...] = ()
    decisions: tuple[Explanation, ...] = ()
    """In the order of time."""
    left_out: int = 0
    """Decisions that were asked for and do not fit into a frame."""


class AbortedAny(Event, frozen=True):
    """The outcome of `AbortAny`: how many requests it ended."""

    ticket: int
    requests: int


class ProtocolError(Event, frozen=True):
    """A frame could not be understood; it was ignored."""

    message: str


class Draining(Event, frozen=True):
    """The server takes no new requests and stops when the live ones have ended."""


class Frame(msgspec.Struct, frozen=True):
    """One frame from the server."""

    events: tuple[
        Welcome
        | Accepted
        | Prompt
        | Tokens
        | TokenIds
        | ChoiceFinished
        | Finished
        | Failed
        | DuplicateRequest
        | State
        | PolicySwapped
        | ShadowSet
        | Explained
        | AbortedAny
        | ProtocolError
        | Draining,
        ...,
    ]


AnyCommand = Hello | Submit | Abort | GetState | Explain | SwapPolicy | SetShadow | AbortAny | Drain
