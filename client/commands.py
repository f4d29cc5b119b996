"""Building and checking commands before they are sent, so that a mistake is told where it was made."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

import msgspec
from muxk.client import protocol
from muxk.client.errors import RequestError


class Sampling(TypedDict, total=False):
    """Keyword arguments of `submit`; see `muxk.actors.protocol.Submit` for the defaults."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: str | list[str] | None
    ignore_eos: bool
    priority: int
    n: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int | str, float] | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    truncate_prompt_tokens: int | None
    skip_special_tokens: bool
    detokenize: bool
    deadline: float | None
    request_class: str


class ExplainQuestion(TypedDict, total=False):
    """Keyword arguments of `explain`; see `muxk.actors.protocol.Explain`."""

    about: Literal["requests", "request", "moment", "latest", "differences"]
    request_id: str
    at: float
    count: int


REQUEST_ID_MAX = 256
"""Characters of a request's name."""

Message = protocol.ChatMessage | Mapping[str, str]


def make_submit(
    request_id: str,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[Message] | None,
    sampling: Sampling,
) -> protocol.Submit:
    """A `Submit` with exactly one kind of prompt. Raises RequestError with the code `invalid`."""
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise RequestError("invalid", "give exactly one of prompt, token_ids and messages")
    if not 1 <= len(request_id) <= REQUEST_ID_MAX:
        raise RequestError("invalid", f"request_id needs 1 to {REQUEST_ID_MAX} characters")
    try:
        return protocol.Submit(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=None if token_ids is None else [operator.index(token) for token in token_ids],
            messages=None if messages is None else [_message(message) for message in messages],
            **sampling,
        )
    except TypeError as error:
        raise RequestError("invalid", str(error)) from error


def _message(message: Message) -> protocol.ChatMessage:
    if isinstance(message, protocol.ChatMessage):
        return message
    try:
        return protocol.ChatMessage(role=message["role"], content=message["content"])
    except KeyError as error:
        raise RequestError("invalid", f"a message needs {error.args[0]!r}") from error


def encode(command: protocol.Command) -> bytes:
    """One frame, read back once to check its types. Raises RequestError with the code `invalid`."""
    try:
        payload = msgspec.msgpack.encode(command)
        msgspec.msgpack.decode(payload, type=protocol.AnyCommand)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise RequestError("invalid", f"{type(command).__name__}: {error}") from error
    return payload
