"""Validation of what a client asks, in one place for every front.

Each check is written as `lowest <= value <= highest`, so that NaN fails it, and names the field.
"""

from __future__ import annotations

import msgspec
from muxk.actors.messages import SamplingParams
from muxk.actors.protocol import Submit

REQUEST_ID_CHARS_MAX = 256
STOPS_MAX = 16
STOP_CHARS_MAX = 256
MAX_TOKENS_MAX = 1 << 24
TOP_K_MAX = 1 << 24
PRIORITY_MAX = 1 << 31
CHARS_PER_CONTEXT_TOKEN = 32
"""A prompt longer than this for each token of the context can not fit and is not even tokenised."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them overflows."""
INT64_MAX = (1 << 63) - 1


class ModelLimits(msgspec.Struct, frozen=True):
    """What validation has to know of the model."""

    vocabulary_size: int
    max_context_tokens: int


class Invalid(ValueError):
    """The request can not be served; the message names the field and the allowed values."""


def validate(submit: Submit, limits: ModelLimits, drawn_seed: int) -> SamplingParams:
    """The sampling parameters of a request whose prompt and fields are sound.

    Raises:
        Invalid: with a message for the client.
    """
    _check_request_id(submit.request_id)
    _check_prompt(submit, limits)
    temperature = _number("temperature", submit.temperature, 0.0, 2.0)
    top_p = _number("top_p", submit.top_p, 0.0, 1.0)
    if top_p == 0.0:
        raise Invalid("top_p must be above 0 and at most 1, not 0")
    top_k = _integer("top_k", submit.top_k, -1, TOP_K_MAX)
    max_tokens = submit.max_tokens
    if max_tokens is not None:
        _integer("max_tokens", max_tokens, 1, MAX_TOKENS_MAX)
    seed = drawn_seed
    if submit.seed is not None:
        seed = _integer("seed", submit.seed, -INT64_MAX - 1, INT64_MAX)
    _integer("priority", submit.priority, -PRIORITY_MAX, PRIORITY_MAX)
    return SamplingParams(
        max_tokens=1 if max_tokens is None else max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        seed=seed % (1 << 64),
        choice=0,
        stop=_stops(submit.stop),
        ignore_eos=submit.ignore_eos,
    )


def _check_request_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= REQUEST_ID_CHARS_MAX:
        raise Invalid(f"request_id must have 1 to {REQUEST_ID_CHARS_MAX} characters, not {len(request_id)}")


def _check_prompt(submit: Submit, limits: ModelLimits) -> None:
    given = [submit.prompt, submit.prompt_token_ids, submit.messages]
    if sum(prompt is not None for prompt in given) != 1:
        raise Invalid("give exactly one of prompt, prompt_token_ids and messages")
    if submit.prompt is not None:
        _check_text("prompt", submit.prompt, limits)
    elif submit.prompt_token_ids is not None:
        _check_token_ids(submit.prompt_token_ids, limits)
    elif submit.messages is not None:
        if not submit.messages:
            raise Invalid("messages is empty")
        for message in submit.messages:
            _check_text("messages[].role", message.role, limits)
        _check_text("messages", "".join(message.content for message in submit.messages), limits)


def _check_text(field: str, text: str, limits: ModelLimits) -> None:
    if not text:
        raise Invalid(f"{field} is empty")
    chars_max = limits.max_context_tokens * CHARS_PER_CONTEXT_TOKEN
    if len(text) > chars_max:
        raise Invalid(f"{field} has {len(text)} characters; more than {chars_max} never fit this model")


def _check_token_ids(token_ids: list[int], limits: ModelLimits) -> None:
    if not token_ids:
        raise Invalid("prompt_token_ids is empty")
    if len(token_ids) >= limits.max_context_tokens:
        raise Invalid(
            f"prompt_token_ids has {len(token_ids)} tokens; with one more it exceeds the limit of "
            f"{limits.max_context_tokens}"
        )
    lowest, highest = min(token_ids), max(token_ids)
    if not (lowest >= 0 and highest < limits.vocabulary_size):
        wrong = lowest if lowest < 0 else highest
        raise Invalid(
            f"prompt_token_ids holds {wrong}, outside the vocabulary of 0 to {limits.vocabulary_size - 1}"
        )


def _number(field: str, value: float, lowest: float, highest: float) -> float:
    if not lowest <= value <= highest:
        raise Invalid(f"{field} must be a number from {lowest:g} to {highest:g}, not {value}")
    return value


def _integer(field: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise Invalid(f"{field} must be an integer from {lowest} to {highest}, not {value}")
    return value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > STOPS_MAX:
        raise Invalid(f"stop has {len(stops)} strings; at most {STOPS_MAX} are allowed")
    for text in stops:
        if not 1 <= len(text) <= STOP_CHARS_MAX:
            raise Invalid(f"stop strings must have 1 to {STOP_CHARS_MAX} characters, one has {len(text)}")
    return stops
