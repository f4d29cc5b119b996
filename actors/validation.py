"""Validation of what a client asks, in one place for every front.

Each check is written as `lowest <= value <= highest`, so that NaN fails it, and names the field. All fields
are looked at before a request is refused, so that a client hears of every mistake at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from muxk.actors.messages import SamplingParams
from muxk.actors.protocol import Submit
from muxk.kernel.work import int32_array, int32_bytes

REQUEST_ID_CHARS_MAX = 256
STOPS_MAX = 16
STOP_CHARS_MAX = 256
STOP_TOKENS_MAX = 64
MAX_TOKENS_MAX = 1 << 24
TOP_K_MAX = 1 << 24
PRIORITY_MAX = 1 << 31
CHOICES_MAX = 16
LOGPROBS_MAX = 20
BIASES_MAX = 1024
BIAS_MAX = 100.0
PENALTY_MAX = 2.0
REPETITION_MIN = 0.01
"""Logits are divided by it in float32: much smaller ones would overflow."""
REPETITION_MAX = 10.0
DEADLINE_MIN_S = 0.001
DEADLINE_MAX_S = 86_400.0
CLASS_CHARS_MAX = 64
TURNS_MAX = 4096
CHARS_PER_CONTEXT_TOKEN = 32
"""A prompt longer than this for each token of the context can not fit and is not even tokenised."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them overflows."""
INT64_MAX = (1 << 63) - 1
PROBLEMS_MAX = 20
IDS_AS_ARRAY = 64
"""Mistakes that one refusal lists."""
PROBLEM_CHARS_MAX = 240
"""Of one mistake, when there are others."""
REFUSAL_CHARS_MAX = 500


class ModelLimits(msgspec.Struct, frozen=True):
    """What validation has to know of the model."""

    vocabulary_size: int
    max_context_tokens: int


class Invalid(ValueError):
    """The request can not be served; the message names the fields and the allowed values."""


def validate(submit: Submit, limits: ModelLimits, drawn_seed: int) -> SamplingParams:
    """The sampling parameters of choice 0 of a request whose prompt and fields are sound.

    Raises:
        Invalid: with a message for the client, of at most REFUSAL_CHARS_MAX characters.
    """
    problems = _Problems()
    _check_request_id(submit.request_id, problems)
    _check_prompt(submit, limits, problems)
    _check_lengths(submit, limits, problems)
    _check_sampling(submit, problems)
    _check_lists(submit, limits, problems)
    _check_scheduling(submit, problems)
    problems.raise_any()
    return _params(submit, drawn_seed)


def _params(submit: Submit, drawn_seed: int) -> SamplingParams:
    """Fields as the actors want them; every one of them is sound."""
    echoed = submit.logprobs if submit.echo else None
    return SamplingParams(
        max_tokens=max(1, submit.max_tokens or 1),
        temperature=0.0 if submit.temperature < GREEDY_BELOW else submit.temperature,
        top_p=submit.top_p,
        top_k=max(0, submit.top_k),
        seed=(drawn_seed if submit.seed is None else submit.seed) % (1 << 64),
        choice=0,
        stop=_stops(submit.stop),
        ignore_eos=submit.ignore_eos,
        min_p=submit.min_p,
        presence_penalty=submit.presence_penalty,
        frequency_penalty=submit.frequency_penalty,
        repetition_penalty=submit.repetition_penalty,
        logit_bias=tuple(sorted((int(token), bias) for token, bias in (submit.logit_bias or {}).items())),
        stop_token_ids=tuple(sorted(set(submit.stop_token_ids or ()))),
        include_stop_str_in_output=submit.include_stop_str_in_output,
        min_tokens=submit.min_tokens,
        logprobs=submit.logprobs,
        prompt_logprobs=echoed if submit.prompt_logprobs is None else submit.prompt_logprobs,
        skip_special_tokens=submit.skip_special_tokens,
        detokenize=submit.detokenize,
    )


class _Problems:
    """What is wrong with a request, so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    def number(self, field: str, value: float, lowest: float, highest: float) -> None:
        if not lowest <= value <= highest:
            self.add(f"{field} must be a number from {lowest:g} to {highest:g}, not {value:g}")

    def integer(self, field: str, value: int, lowest: int, highest: int, hint: str = "") -> None:
        if not lowest <= value <= highest:
            self.add(f"{field} must be an integer from {lowest} to {highest}{hint}, not {value}")

    def raise_any(self) -> None:
        """Raise Invalid when there are any; the first ones in full, the others as far as there is room."""
        texts = self._texts
        if not texts:
            return
        if len(texts) > 1:
            texts = [text[:PROBLEM_CHARS_MAX] for text in texts[:PROBLEMS_MAX]]
        told = "; ".join(texts)
        if len(told) > REFUSAL_CHARS_MAX:
            rest = f"... ({len(self._texts)} mistakes)"
            told = told[: REFUSAL_CHARS_MAX - len(rest)] + rest
        raise Invalid(told)


def _check_request_id(request_id: str, problems: _Problems) -> None:
    if not 1 <= len(request_id) <= REQUEST_ID_CHARS_MAX:
        text = f"request_id must have 1 to {REQUEST_ID_CHARS_MAX} characters, not {len(request_id)}"
        problems.add(text)


# --- the prompt ---


def _check_prompt(submit: Submit, limits: ModelLimits, problems: _Problems) -> None:
    given = [submit.prompt, submit.prompt_token_ids, submit.messages]
    if sum(prompt is not None for prompt in given) != 1:
        problems.add("give exactly one of prompt, prompt_token_ids and messages")
    elif submit.prompt is not None:
        _check_text("prompt", submit.prompt, limits, problems)
    elif submit.prompt_token_ids is not None:
        _check_token_ids(submit, submit.prompt_token_ids, limits, problems)
    elif submit.messages is not None:
        _check_messages(submit, limits, problems)


def _check_messages(submit: Submit, limits: ModelLimits, problems: _Problems) -> None:
    messages = submit.messages or []
    if not 1 <= len(messages) <= TURNS_MAX:
        what = "is empty" if not messages else f"has {len(messages)} turns; at most {TURNS_MAX} are allowed"
        problems.add(f"messages {what}")
        return
    empty_role = next((index for index, message in enumerate(messages) if not message.role), None)
    if empty_role is not None:
        problems.add(f"messages[{empty_role}].role is empty")
    roles = sum(len(message.role) for message in messages)
    _check_chars("messages[].role", roles, limits, problems)
    content = sum(len(message.content) for message in messages)
    if content == 0:
        problems.add("messages is empty: no message has content")
    _check_chars("messages", content, limits, problems)


def _check_text(field: str, text: str, limits: ModelLimits, problems: _Problems) -> None:
    if not text:
        problems.add(f"{field} is empty")
    _check_chars(field, len(text), limits, problems)


def _check_chars(field: str, chars: int, limits: ModelLimits, problems: _Problems) -> None:
    chars_max = limits.max_context_tokens * CHARS_PER_CONTEXT_TOKEN
    if chars > chars_max:
        problems.add(f"{field} has {chars} characters; more than {chars_max} never fit this model")


def _check_token_ids(submit: Submit, token_ids: list[int], limits: ModelLimits, problems: _Problems) -> None:
    if not token_ids:
        problems.add("prompt_token_ids is empty")
        return
    truncated = submit.truncate_prompt_tokens is not None
    tokens_max = limits.max_context_tokens * (CHARS_PER_CONTEXT_TOKEN if truncated else 1)
    if len(token_ids) >= tokens_max:
        tokens = f"prompt_token_ids has {len(token_ids)} tokens"
        problems.add(f"{tokens}; with one more it exceeds the limit of {tokens_max}")
        return
    _check_vocabulary("prompt_token_ids", token_ids, limits, problems)


def _check_vocabulary(field: str, ids: Sequence[int], limits: ModelLimits, problems: _Problems) -> None:
    """Every one of `ids`, which are not empty, is a token."""
    (lowest, highest), last = _extremes(ids), limits.vocabulary_size - 1
    if not 0 <= lowest <= highest <= last:
        wrong = lowest if lowest < 0 else highest
        problems.add(f"{field} holds {wrong}, outside the vocabulary of 0 to {last}")


def _extremes(ids: Sequence[int]) -> tuple[int, int]:
    """The least and the largest; of a long prompt an array knows them several times sooner."""
    if len(ids) > IDS_AS_ARRAY:
        try:
            column = int32_array(int32_bytes(ids))
        except (struct.error, OverflowError):  # no token has such an id
            return min(ids), max(ids)
        return int(column.min()), int(column.max())
    return min(ids), max(ids)


# --- the other fields ---


def _check_lengths(submit: Submit, limits: ModelLimits, problems: _Problems) -> None:
    """How many tokens, choices and reports."""
    reads_only = submit.echo or submit.prompt_logprobs is not None
    highest = MAX_TOKENS_MAX
    if submit.max_tokens is not None:
        lowest = 0 if reads_only else 1
        hint = "" if reads_only else " (0 with echo or prompt_logprobs)"
        problems.integer("max_tokens", submit.max_tokens, lowest, MAX_TOKENS_MAX, hint)
        highest = max(0, submit.max_tokens)
    hint = ", which is max_tokens" if submit.max_tokens is not None else ""
    problems.integer("min_tokens", submit.min_tokens, 0, highest, hint)
    problems.integer("n", submit.n, 1, CHOICES_MAX)
    if submit.logprobs is not None:
        problems.integer("logprobs", submit.logprobs, 0, LOGPROBS_MAX)
    if submit.prompt_logprobs is not None:
        problems.integer("prompt_logprobs", submit.prompt_logprobs, 0, LOGPROBS_MAX)
    if submit.truncate_prompt_tokens is not None:
        kept = submit.truncate_prompt_tokens
        problems.integer("truncate_prompt_tokens", kept, 1, limits.max_context_tokens)


def _check_sampling(submit: Submit, problems: _Problems) -> None:
    problems.number("temperature", submit.temperature, 0.0, 2.0)
    problems.number("top_p", submit.top_p, 0.0, 1.0)
    if submit.top_p == 0.0:
        problems.add("top_p must be above 0 and at most 1, not 0")
    problems.integer("top_k", submit.top_k, -1, TOP_K_MAX)
    problems.number("min_p", submit.min_p, 0.0, 1.0)
    problems.number("presence_penalty", submit.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
    problems.number("frequency_penalty", submit.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
    problems.number("repetition_penalty", submit.repetition_penalty, REPETITION_MIN, REPETITION_MAX)
    if submit.seed is not None:
        problems.integer("seed", submit.seed, -INT64_MAX - 1, INT64_MAX)


def _check_lists(submit: Submit, limits: ModelLimits, problems: _Problems) -> None:
    """Each list's length before what is in it: a long list is not looked through."""
    _check_stops(submit, problems)
    stop_tokens = submit.stop_token_ids or []
    if len(stop_tokens) > STOP_TOKENS_MAX:
        problems.add(f"stop_token_ids has {len(stop_tokens)} tokens; at most {STOP_TOKENS_MAX} are allowed")
    elif stop_tokens:
        _check_vocabulary("stop_token_ids", stop_tokens, limits, problems)
    biases = submit.logit_bias or {}
    if len(biases) > BIASES_MAX:
        problems.add(f"logit_bias has {len(biases)} tokens; at most {BIASES_MAX} are allowed")
    elif biases:
        _check_biases(biases, limits, problems)


def _check_stops(submit: Submit, problems: _Problems) -> None:
    stops = _stops(submit.stop)
    if stops and not submit.detokenize:
        problems.add(
            "stop needs the text that detokenize false leaves out: "
            "give stop_token_ids in place of stop, or leave detokenize true"
        )
    if len(stops) > STOPS_MAX:
        problems.add(f"stop has {len(stops)} strings; at most {STOPS_MAX} are allowed")
        return
    wrong = next((len(text) for text in stops if not 1 <= len(text) <= STOP_CHARS_MAX), None)
    if wrong is not None:
        problems.add(f"stop strings must have 1 to {STOP_CHARS_MAX} characters, one has {wrong}")


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _check_biases(biases: dict[int | str, float], limits: ModelLimits, problems: _Problems) -> None:
    last = limits.vocabulary_size - 1
    tokens: dict[int, None] = {}
    for key, bias in biases.items():
        token = _token_of(key)
        if token is None or not 0 <= token <= last:
            problems.add(f"logit_bias names {str(key)[:40]!r}, which is no token id from 0 to {last}")
        elif token in tokens:
            problems.add(f"logit_bias names token {token} twice")
        else:
            tokens[token] = None
            problems.number(f"logit_bias of token {token}", bias, -BIAS_MAX, BIAS_MAX)


def _token_of(key: int | str) -> int | None:
    """The token id that a key names; JSON has strings only."""
    if isinstance(key, int):
        return key
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else None


def _check_scheduling(submit: Submit, problems: _Problems) -> None:
    problems.integer("priority", submit.priority, -PRIORITY_MAX, PRIORITY_MAX)
    if submit.deadline is not None:
        problems.number("deadline", submit.deadline, DEADLINE_MIN_S, DEADLINE_MAX_S)
    if len(submit.request_class) > CLASS_CHARS_MAX:
        chars = len(submit.request_class)
        problems.add(f"request_class has {chars} characters; at most {CLASS_CHARS_MAX} are allowed")
