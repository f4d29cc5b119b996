"""What a client sends wrong gets a clear error and disturbs nobody else."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.actors import protocol as wire
from muxk.kernel.messages import PeerSlow
from virtual_server import GATEWAY, MS, S, VirtualServer, expected_tokens

GOOD: dict[str, Any] = {
    "prompt_token_ids": [65] * 20,
    "max_tokens": 30,
    "temperature": 0.0,
    "ignore_eos": True,
}

EMPTY_FRAME = msgspec.msgpack.encode(wire.Frame(()))

BAD = {
    "NaN temperature": ({"temperature": math.nan}, "temperature must be a number from 0 to 2, not nan"),
    "infinite temperature": ({"temperature": math.inf}, "temperature"),
    "temperature too high": ({"temperature": 3.0}, "temperature must be a number from 0 to 2"),
    "NaN top_p": ({"top_p": math.nan}, "top_p"),
    "top_p of zero": ({"top_p": 0.0}, "top_p must be above 0"),
    "top_k below -1": ({"top_k": -2}, "top_k"),
    "no token wanted": ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
    "negative max_tokens": ({"max_tokens": -5}, "max_tokens"),
    "seed beyond int64": ({"seed": 2**63}, "seed"),
    "id outside the vocabulary": ({"prompt_token_ids": [65, 257]}, "257, outside the vocabulary of 0 to 256"),
    "negative id": ({"prompt_token_ids": [-1]}, "-1, outside the vocabulary"),
    "no tokens": ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
    "no prompt": ({"prompt_token_ids": None}, "exactly one of prompt"),
    "two prompts": ({"prompt": "x"}, "exactly one of prompt"),
    "empty text": ({"prompt_token_ids": None, "prompt": ""}, "prompt is empty"),
    "empty conversation": ({"prompt_token_ids": None, "messages": []}, "messages is empty"),
    "empty stop string": ({"stop": ["x", ""]}, "stop strings must have 1 to"),
    "too many stop strings": ({"stop": ["x"] * 17}, "at most 16"),
    "NaN min_p": ({"min_p": math.nan}, "min_p must be a number from 0 to 1, not nan"),
    "min_p above 1": ({"min_p": 1.5}, "min_p"),
    "presence penalty": ({"presence_penalty": -2.1}, "presence_penalty must be a number from -2 to 2"),
    "frequency penalty": ({"frequency_penalty": math.inf}, "frequency_penalty"),
    "repetition penalty of zero": ({"repetition_penalty": 0.0}, "repetition_penalty must be a number from"),
    "negative repetition penalty": ({"repetition_penalty": -1.0}, "repetition_penalty"),
    "bias of a token that is none": ({"logit_bias": {257: 1.0}}, "'257', which is no token id from 0 to 256"),
    "bias of a word": ({"logit_bias": {"abc": 1.0}}, "logit_bias names 'abc'"),
    "bias of a negative token": ({"logit_bias": {"-1": 1.0}}, "logit_bias names '-1'"),
    "bias of a long key": ({"logit_bias": {"9" * 5000: 1.0}}, "which is no token id"),
    "NaN bias": ({"logit_bias": {65: math.nan}}, "logit_bias of token 65 must be a number from -100 to 100"),
    "bias of one token twice": ({"logit_bias": {65: 1.0, "65": 2.0}}, "logit_bias names token 65 twice"),
    "too many biases": ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "at most 1024"),
    "stop token outside": ({"stop_token_ids": [1, 300]}, "stop_token_ids holds 300, outside the vocabulary"),
    "too many stop tokens": ({"stop_token_ids": list(range(65))}, "at most 64"),
    "no choice": ({"n": 0}, "n must be an integer from 1 to 16, not 0"),
    "a million choices": ({"n": 1_000_000}, "n must be an integer from 1 to 16, not 1000000"),
    "logprobs over the cap": ({"logprobs": 10**9}, "logprobs must be an integer from 0 to 20"),
    "negative logprobs": ({"logprobs": -1}, "logprobs"),
    "prompt_logprobs over the cap": ({"prompt_logprobs": 10**9}, "prompt_logprobs must be an integer"),
    "negative prompt_logprobs": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "min_tokens over max_tokens": ({"min_tokens": 31}, "min_tokens must be an integer from 0 to 30"),
    "negative min_tokens": ({"min_tokens": -1}, "min_tokens"),
    "truncated to nothing": (
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens must be an integer from 1",
    ),
    "truncated to more than fits": ({"truncate_prompt_tokens": 513}, "from 1 to 512, not 513"),
    "deadline in the past": ({"deadline": -1.0}, "deadline must be a number from 0.001 to 86400"),
    "infinite deadline": ({"deadline": math.inf}, "deadline"),
    "NaN deadline": ({"deadline": math.nan}, "deadline"),
    "long class": ({"request_class": "x" * 65}, "request_class has 65 characters; at most 64"),
    "priority beyond int32": ({"priority": 2**40}, "priority"),
    "a single empty stop": ({"stop": ""}, "stop strings must have 1 to"),
    "a turn without a role": (
        {"prompt_token_ids": None, "messages": [wire.ChatMessage("", "x")]},
        "messages[0].role is empty",
    ),
    "too many turns": (
        {"prompt_token_ids": None, "messages": [wire.ChatMessage("user", "x")] * 4097},
        "messages has 4097 turns; at most 4096",
    ),
    "a long text": ({"prompt_token_ids": None, "prompt": "x" * 20_000}, "prompt has 20000 characters"),
    "nothing to read or write": ({"max_tokens": 0}, "(0 with echo or prompt_logprobs)"),
    "prompt over the context": ({"prompt_token_ids": [65] * 600, "max_tokens": None}, "600 tokens"),
    "sum over the context": ({"max_tokens": 500}, "max_tokens may be 492 at most"),
}


@pytest.mark.parametrize(("fields", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_field_fails_its_request_by_name_and_nothing_else(fields: dict[str, Any], said: str) -> None:
    server = VirtualServer(kv_tokens=512, calibrate=False)
    server.submit(1 * S, "good", **GOOD)
    server.submit(1 * S + 5 * MS, "bad", **(GOOD | fields))
    server.run_until(3 * S)
    [failed] = server.outcome("bad").terminal
    assert isinstance(failed, wire.Failed)
    assert said in failed.message
    assert server.outcome("good").tokens == expected_tokens([65] * 20, 30)
    server.check_whole()


def test_all_mistakes_are_told_at_once_in_a_short_answer() -> None:
    server = VirtualServer(calibrate=False)
    wrong = {"temperature": 9.0, "top_p": -1.0, "n": 0, "stop": [""], "logit_bias": {"x": 1.0}}
    server.submit(1 * S, "some", prompt="x", **wrong)
    server.submit(1 * S, "many", prompt="x", logit_bias={str(1000 + key): 1.0 for key in range(1000)})
    server.run_until(2 * S)
    [some], [many] = server.outcome("some").terminal, server.outcome("many").terminal
    for field in ("temperature", "top_p", "n must be", "stop strings", "logit_bias"):
        assert field in some.message
    assert len(many.message) <= 500
    assert many.message.endswith("(1000 mistakes)")


INTEGERS = ["max_tokens", "top_k", "seed", "n", "min_tokens", "logprobs", "prompt_logprobs", "priority"]


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [True, "100", 1.5, 5.0, [], {}, 2**63])
def test_an_integer_field_takes_no_other_type_and_nothing_beyond_its_range(field: str, value: Any) -> None:
    server = VirtualServer(calibrate=False)
    command = {"type": "Submit", "request_id": "it", "prompt": "x", field: value}
    server.send_raw(1 * S, msgspec.msgpack.encode(command))
    server.run_until(2 * S)
    [failed] = server.outcome("it").terminal
    assert (failed.code, field in failed.message) == ("invalid", True)
    server.check_whole()


def test_a_wrong_type_fails_the_request_that_named_itself() -> None:
    server = VirtualServer(calibrate=False)
    payload = msgspec.msgpack.encode({"type": "Submit", "request_id": "typed", "temperature": "hot"})
    server.send_raw(1 * S, payload)
    server.run_until(2 * S)
    [failed] = server.outcome("typed").terminal
    assert failed.code == "invalid"
    assert "$.temperature" in failed.message


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * 200_000,
        b"\x81\xa4type\xa3Nay",
        b"\xff" * 4096,
        b"\x80",
    ],
    ids=["empty", "reserved byte", "http", "deep nesting", "unknown type", "noise", "empty map"],
)
def test_garbage_is_answered_and_ignored(payload: bytes) -> None:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "good", **GOOD)
    server.send_raw(1 * S + 5 * MS, payload, peer=b"vandal")
    server.run_until(3 * S)
    answers = [event for _, peer, event in server.events if peer == b"vandal"]
    assert [type(answer) for answer in answers] == [wire.ProtocolError]
    assert server.outcome("good").tokens == expected_tokens([65] * 20, 30)
    server.check_whole()


@settings(max_examples=150)
@given(st.binary(max_size=300))
def test_no_frame_stops_the_gateway(payload: bytes) -> None:
    server = VirtualServer(calibrate=False)
    server.send_raw(1 * S, payload)
    server.send_raw(1 * S, msgspec.msgpack.encode(wire.Submit(request_id="x", prompt="y")) + payload)
    server.submit(
        1 * S + MS, "good", prompt_token_ids=[65] * 3, max_tokens=2, temperature=0.0, ignore_eos=True
    )
    server.run_until(2 * S)
    assert server.outcome("good").tokens == expected_tokens([65] * 3, 2)


def test_the_same_name_from_two_clients_names_two_requests() -> None:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "same", b"one", **GOOD)
    server.submit(1 * S, "same", b"two", **(GOOD | {"prompt_token_ids": [70] * 9}))
    server.run_until(3 * S)
    assert server.outcome("same", b"one").tokens == expected_tokens([65] * 20, 30)
    assert server.outcome("same", b"two").tokens == expected_tokens([70] * 9, 30)


def test_a_name_that_is_live_is_not_taken_twice_and_free_again_at_the_end() -> None:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "twice", **GOOD)
    server.submit(1 * S + 20 * MS, "twice", **GOOD)
    server.run_until(2 * S)
    duplicates = [event for _, _, event in server.events if isinstance(event, wire.DuplicateRequest)]
    assert [event.request_id for event in duplicates] == ["twice"]
    assert len(server.outcome("twice").terminal) == 1
    server.outcomes.clear()
    server.submit(3 * S, "twice", **GOOD)
    server.run_until(5 * S)
    assert server.outcome("twice").tokens == expected_tokens([65] * 20, 30)


def test_the_queue_is_bounded_and_the_refusal_names_the_bound() -> None:
    server = VirtualServer(calibrate=False, settings={}, kv_tokens=512)
    for index in range(2000):
        server.submit(1 * S, f"r{index}", prompt_token_ids=[65] * 400, max_tokens=100, ignore_eos=True)
    server.run_until(1 * S + MS)
    refused = [event for _, _, event in server.events if isinstance(event, wire.Failed)]
    assert refused
    assert {event.code for event in refused} == {"overloaded"}
    assert server.describe("admission")["waiting"] <= 1024


@pytest.mark.parametrize("after_ms", [0, 1, 5, 9, 12, 15, 20, 30, 50, 80, 120, 200])
@pytest.mark.parametrize("policy", ["muxwise", "inflight"])
def test_an_abort_is_legal_in_every_state(policy: str, after_ms: int) -> None:
    server = VirtualServer(policy, calibrate=False)
    server.submit(1 * S, "other", **GOOD)
    server.submit(1 * S, "it", prompt_token_ids=[66] * 900, max_tokens=20, temperature=0.0, ignore_eos=True)
    server.abort(1 * S + after_ms * MS, "it")
    server.abort(1 * S + (after_ms + 1) * MS, "it")
    server.run_until(5 * S)
    [terminal] = server.outcome("it").terminal
    assert terminal.finish_reason in ("abort", "length")
    assert server.outcome("other").tokens == expected_tokens([65] * 20, 30)
    server.check_whole()


def test_the_pages_of_a_client_that_vanished_are_back_within_a_step() -> None:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "it", b"doomed", **(GOOD | {"max_tokens": 1000}))
    server.run_until(1 * S + 100 * MS)
    assert server.describe("kv_pool")["pages_used"] > 0
    server.leave(1 * S + 100 * MS, b"doomed")
    server.run_until(1 * S + 110 * MS)
    assert server.describe("kv_pool")["pages_used"] == 0
    server.check_whole()


def test_an_abort_of_a_request_that_is_not_live_is_ignored() -> None:
    server = VirtualServer(calibrate=False)
    server.abort(1 * S, "never heard of")
    server.submit(1 * S, "good", **GOOD)
    server.abort(3 * S, "good")
    server.run_until(4 * S)
    assert [type(event) for event in server.outcome("good").terminal] == [wire.Finished]
    assert server.outcome("good").terminal[0].finish_reason == "length"


def test_a_client_that_does_not_read_is_told_how_its_requests_ended_and_disturbs_nobody() -> None:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "unread", b"sleeper", **(GOOD | {"max_tokens": 500}))
    server.submit(1 * S, "read", b"reader", **GOOD)
    server.runtime.inject(GATEWAY, PeerSlow(b"sleeper", EMPTY_FRAME), 1 * S + 60 * MS)
    server.run_until(6 * S)
    [failed] = server.outcome("unread", b"sleeper").terminal
    assert failed.code == "slow_reader"
    assert server.outcome("read", b"reader").tokens == expected_tokens([65] * 20, 30)
    server.check_whole()
