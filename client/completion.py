"""What a client gets to read: pieces of output, and the finished request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from muxk.client import protocol


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token_id: int
    token: str
    """Its text; a part of a character is shown as a replacement character."""
    bytes: tuple[int, ...]
    logprob: float


class Logprob(msgspec.Struct, frozen=True):
    """The natural log-probability of one token, of the model's own logits."""

    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[TopLogprob, ...]
    """The likeliest tokens, as many as were asked for; the token itself may be missing."""


class Prompt(msgspec.Struct, frozen=True):
    """The prompt as the model read it."""

    text: str
    """Empty unless `echo` was asked for."""
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    """Of the tokens from the second on; empty unless asked for."""


class Delta(msgspec.Struct, frozen=True):
    """New output of a choice. `text` may lag behind `token_ids`: it never splits a character."""

    text: str
    token_ids: tuple[int, ...]
    arrived_ns: int
    """`time.perf_counter_ns` when the frame was read from the socket."""
    choice: int = 0
    logprobs: tuple[Logprob, ...] = ()
    """One for each of `token_ids` when they were asked for."""


class Choice(msgspec.Struct, frozen=True):
    """One of the `n` outputs of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop`, `length` or `abort`."""
    stop_reason: str | int | None
    """The stop string, or the id of the stop token, that ended it, if one did."""
    logprobs: tuple[Logprob, ...]


class Completion(msgspec.Struct, frozen=True):
    """A finished request; `text` to `stop_reason` are those of choice 0."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop`, `length` or `abort`."""
    stop_reason: str | int | None
    """The stop string, or the id of the stop token, that ended it, if one did."""
    prompt_tokens: int
    completion_tokens: int
    """Of all choices together."""
    cached_tokens: int
    """Prompt tokens whose KV was in the prefix index."""
    choices: tuple[Choice, ...] = ()
    """All `n`, in the order of their indices."""
    prompt: Prompt | None = None
    """With `echo` or `prompt_logprobs`."""
    notes: tuple[str, ...] = ()
    """What the server had to say: fields that have no effect there."""


def read_logprobs(entries: Sequence[protocol.TokenLogprob]) -> tuple[Logprob, ...]:
    """Log-probabilities as they came, with the tokens as text."""
    return tuple(
        Logprob(
            token_id=entry.token_id,
            token=entry.token.decode("utf-8", "replace"),
            bytes=tuple(entry.token),
            logprob=entry.logprob,
            rank=entry.rank,
            top=tuple(
                TopLogprob(token_id, token.decode("utf-8", "replace"), tuple(token), logprob)
                for token_id, token, logprob in zip(
                    entry.top_ids, entry.top_tokens, entry.top_logprobs, strict=True
                )
            ),
        )
        for entry in entries
    )


def read_prompt(event: protocol.Prompt) -> Prompt:
    """The event of the same name."""
    return Prompt(event.text, event.token_ids, read_logprobs(event.logprobs))
