"""Whatever numbers a client sends: a short refusal, or parameters that the sampler can work with."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from muxk.actors.messages import SamplingParams
from muxk.actors.protocol import Submit
from muxk.actors.validation import REFUSAL_CHARS_MAX, Invalid, ModelLimits, validate

LIMITS = ModelLimits(vocabulary_size=257, max_context_tokens=512)
FLOATS = st.floats(width=64) | st.floats(-3, 3)
INTEGERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 40)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": FLOATS,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "presence_penalty": FLOATS,
    "frequency_penalty": FLOATS,
    "repetition_penalty": FLOATS,
    "deadline": st.none() | FLOATS,
    "max_tokens": st.none() | INTEGERS,
    "min_tokens": INTEGERS,
    "top_k": INTEGERS,
    "seed": st.none() | INTEGERS,
    "n": INTEGERS,
    "logprobs": st.none() | INTEGERS,
    "prompt_logprobs": st.none() | INTEGERS,
    "truncate_prompt_tokens": st.none() | INTEGERS,
    "priority": INTEGERS,
    "echo": st.booleans(),
    "logit_bias": st.none() | st.dictionaries(INTEGERS | st.text(max_size=5), FLOATS, max_size=4),
    "stop_token_ids": st.none() | st.lists(INTEGERS, max_size=4),
    "stop": st.none() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=20),
    "request_class": st.text(max_size=70),
}


def outcome(submit: Submit) -> SamplingParams | str:
    """The parameters, or the text of the refusal."""
    try:
        return validate(submit, LIMITS, drawn_seed=7)
    except Invalid as error:
        return str(error)


@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_fields_are_refused_by_name_or_fit_the_sampler(fields: dict[str, Any]) -> None:
    submit = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit("r", prompt="x", **fields)), type=Submit)
    params = outcome(submit)
    if isinstance(params, str):
        assert len(params) <= REFUSAL_CHARS_MAX
        assert any(field in params for field in fields)
        return
    numbers = (params.temperature, params.top_p, params.min_p, *(bias for _, bias in params.logit_bias))
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert all(map(math.isfinite, (*numbers, *penalties)))
    assert params.temperature == 0.0 or params.temperature >= 1e-5
    assert 0 <= params.seed < 2**64
    assert params.max_tokens >= 1
    assert all(0 <= token < 257 for token in (*params.stop_token_ids, *(id for id, _ in params.logit_bias)))


def test_the_sixteenth_stop_string_is_still_welcome() -> None:
    stops = [f"stop {number}" for number in range(16)]
    assert validate(Submit("r", prompt="x", stop=stops), LIMITS, 0).stop == tuple(stops)


def test_no_stop_strings_are_none() -> None:
    assert validate(Submit("r", prompt="x", stop=[]), LIMITS, 0).stop == ()


def test_biases_come_out_as_numbers_in_the_order_of_their_tokens() -> None:
    params = validate(Submit("r", prompt="x", logit_bias={"9": 1.0, 3: -2.0, "0": 0.5}), LIMITS, 0)
    assert params.logit_bias == ((0, 0.5), (3, -2.0), (9, 1.0))


@pytest.mark.parametrize(("given", "reported"), [(None, 3), (1, 1)])
def test_an_echo_with_log_probabilities_reports_on_the_prompt_too(given: int | None, reported: int) -> None:
    submit = Submit("r", prompt="x", echo=True, logprobs=3, prompt_logprobs=given)
    assert validate(submit, LIMITS, 0).prompt_logprobs == reported


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    twice = b"\x83\xaarequest_id\xa1r\xaamax_tokens\x05\xaamax_tokens\x07"
    assert msgspec.msgpack.decode(twice, type=Submit).max_tokens == 7
