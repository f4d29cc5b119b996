"""Every field of a request does what it says, through the whole server in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from muxk.actors.admission import Admission
from muxk.actors.protocol import Finished, Submit
from muxk.actors.validation import ModelLimits, validate
from virtual_server import S, VirtualServer, expected_tokens

PROMPT = [65 + index for index in range(20)]
GREEDY: dict[str, Any] = {
    "prompt_token_ids": PROMPT,
    "max_tokens": 40,
    "temperature": 0.0,
    "ignore_eos": True,
}
ANSWER = expected_tokens(PROMPT, 40)
TEXT = bytes(ANSWER).decode()


def serve(**fields: Any) -> VirtualServer:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "it", **(GREEDY | fields))
    server.run_until(4 * S)
    server.check_whole()
    return server


def end_of(server: VirtualServer) -> Finished:
    [finished] = server.outcome("it").terminal
    assert isinstance(finished, Finished), finished
    return finished


def test_a_temperature_near_zero_is_greedy_and_gives_the_same_text() -> None:
    for temperature in (0.0, 1e-12, 1e-6):
        assert serve(temperature=temperature).outcome("it").tokens == ANSWER


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_ends_the_text_and_is_in_it_only_when_asked(included: bool) -> None:
    stop = TEXT[10:13]
    ends = TEXT.index(stop) + (3 if included else 0)
    server = serve(stop=[stop, "never"], include_stop_str_in_output=included)
    assert server.outcome("it").text == TEXT[:ends]
    assert (end_of(server).finish_reason, end_of(server).stop_reason) == ("stop", stop)


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_ends_the_text_and_its_id_is_the_reason(included: bool) -> None:
    stop_token = ANSWER[12]
    at = ANSWER.index(stop_token)
    server = serve(stop_token_ids=[3, stop_token], include_stop_str_in_output=included)
    assert server.outcome("it").tokens == ANSWER[: at + 1]
    assert server.outcome("it").text == TEXT[: at + included]
    assert (end_of(server).finish_reason, end_of(server).stop_reason) == ("stop", stop_token)


def test_no_stop_string_ends_before_min_tokens_and_one_that_ends_after_does() -> None:
    stop = TEXT[4:7]
    again = TEXT.find(stop, 5)
    server = serve(stop=stop, min_tokens=7)
    assert server.outcome("it").text == (TEXT if again < 0 else TEXT[:again])
    across = serve(stop=stop, min_tokens=6)
    assert across.outcome("it").text == TEXT[:4]
    assert end_of(across).stop_reason == stop


def test_no_stop_token_ends_before_min_tokens() -> None:
    server = serve(stop_token_ids=sorted(set(ANSWER)), min_tokens=9)
    assert end_of(server).completion_tokens >= 9


def test_echo_gives_the_prompt_first_as_the_client_wrote_it() -> None:
    server = serve(prompt_token_ids=None, prompt="Once upon é", echo=True, max_tokens=5)
    prompt = server.outcome("it").prompt
    assert prompt is not None
    assert prompt.text == "Once upon é"
    assert prompt.token_ids == tuple("Once upon é".encode())
    assert len(server.outcome("it").tokens) == 5


def test_a_truncated_prompt_keeps_its_last_tokens_and_echo_says_which() -> None:
    server = serve(truncate_prompt_tokens=7, echo=True)
    prompt = server.outcome("it").prompt
    assert prompt is not None
    assert prompt.token_ids == tuple(PROMPT[-7:])
    assert prompt.text == bytes(PROMPT[-7:]).decode()
    assert server.outcome("it").tokens == expected_tokens(PROMPT[-7:], 40)
    assert end_of(server).prompt_tokens == 7


def test_a_prompt_over_the_context_fits_when_it_is_truncated() -> None:
    fields = {"prompt_token_ids": [65] * 5000, "max_tokens": 5}
    server = serve(**fields, truncate_prompt_tokens=100)
    assert server.outcome("it").tokens == expected_tokens([65] * 100, 5)


@pytest.mark.parametrize("asked", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}])
def test_max_tokens_zero_reads_the_prompt_and_generates_nothing(asked: dict[str, Any]) -> None:
    server = serve(max_tokens=0, n=2, **asked)
    outcome = server.outcome("it")
    assert outcome.prompt is not None
    assert outcome.prompt.token_ids == tuple(PROMPT)
    assert outcome.tokens == []
    end = end_of(server)
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", len(PROMPT), 0)


def test_each_token_comes_with_its_log_probability_when_asked() -> None:
    reported = serve(logprobs=3, max_tokens=6).outcome("it").logprobs
    assert [entry.token_id for entry in reported] == ANSWER[:6]
    assert b"".join(entry.token for entry in reported).decode() == TEXT[:6]
    assert all(len(entry.top_ids) == len(entry.top_tokens) == len(entry.top_logprobs) for entry in reported)
    assert serve(max_tokens=6).outcome("it").logprobs == []


def test_special_tokens_are_spelled_out_only_when_asked() -> None:
    fields = {"prompt_token_ids": [65, 256, 66], "echo": True, "max_tokens": 1}
    for skip, text in ((True, "AB"), (False, "A<end>B")):
        prompt = serve(**fields, skip_special_tokens=skip).outcome("it").prompt
        assert prompt is not None
        assert prompt.text == text


def test_deadline_and_class_reach_the_queue_and_what_has_no_effect_is_noted() -> None:
    server = VirtualServer(calibrate=False, kv_tokens=512)
    for name in ("running", "waiting"):
        fields = GREEDY | {"prompt_token_ids": [65] * 300, "max_tokens": 100}
        server.submit(1 * S, name, **fields, deadline=0.25, request_class="gold", priority=-3)
    server.run_until(1 * S + S // 2)
    admission = server.runtime.actor("admission")
    assert isinstance(admission, Admission)
    [request] = admission.state.waiting
    assert (request.deadline_ns - request.arrival_ns, request.request_class) == (S // 4, "gold")
    assert request.priority == -3
    notes = server.outcome("waiting").notes
    assert notes == request.notes
    assert any("'gold'" in note for note in notes)
    server.run_until(9 * S)
    assert server.outcome("waiting").accepted == 1


def test_the_report_on_a_long_prompt_is_bounded_and_the_refusal_says_how_much_fits() -> None:
    server = VirtualServer(calibrate=False, kv_tokens=16_384)
    server.submit(1 * S, "it", prompt_token_ids=[65] * 10_000, prompt_logprobs=20, max_tokens=1)
    server.run_until(2 * S)
    [failed] = server.outcome("it").terminal
    assert failed.code == "invalid"
    assert "prompt_logprobs is 20; for a prompt of 10000 tokens it may be 2 at most" in failed.message
    server.check_whole()


def test_the_defaults_ask_nothing_of_the_sampler() -> None:
    params = validate(Submit("x", prompt="y", temperature=0.0), ModelLimits(257, 100), 5)
    assert not params.penalises
    assert (params.logprobs, params.prompt_logprobs, params.logit_bias, params.stop) == (None, None, (), ())
