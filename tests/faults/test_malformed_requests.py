"""Whatever a client puts into a field: it is served, or refused by the field's name; nobody else notices."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from muxk.actors import protocol as wire
from muxk.actors.backends import StartupError, open_backend
from muxk.policies.engine import load_policy
from muxk.policies.problems import PolicyError
from virtual_server import MS, S, VirtualServer, expected_tokens

LIMIT = 512
NEIGHBOUR: dict[str, Any] = {
    "prompt_token_ids": [65] * 20,
    "max_tokens": 30,
    "temperature": 0.0,
    "ignore_eos": True,
}
BASE: dict[str, Any] = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
NESTED = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
"""An array in an array in an array."""
VALUES: dict[str, Any] = {
    "nothing": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "the least int64": -(2**63),
    "the largest uint64": 2**64 - 1,
    "a fraction": 1.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "the least float": 5e-324,
    "empty text": "",
    "a number as text": "100",
    "no UTF-8": msgspec.Raw(b"\xa3\xed\xa0\x80"),
    "bytes": b"x",
    "an empty list": [],
    "a list of numbers": [1, 2],
    "a list of wrong numbers": [-1, 2**40],
    "a list of texts": ["x", ""],
    "a list of a list": [[]],
    "a list of nothing": [None],
    "an empty map": {},
    "a map of texts": {"abc": "x"},
    "a map of wrong keys": {"-1": 0.5, "999999": 0.5},
    "a map of NaN": {"65": math.nan},
    "deep nesting": NESTED,
}
FIELDS = [field.name for field in msgspec.structs.fields(wire.Submit) if field.name != "request_id"]
NUMBERS = [
    field.name
    for field in msgspec.structs.fields(wire.Submit)
    if "float" in str(field.type) and field.name != "logit_bias"
]


def frame(request_id: str, fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({"type": "Submit", "request_id": request_id} | fields)


def serve(frames: dict[str, bytes]) -> VirtualServer:
    """A server to which vandals send these, each named by its key, while a neighbour's stream runs."""
    server = VirtualServer(kv_tokens=LIMIT, calibrate=False)
    server.submit(1 * S, "stream", **NEIGHBOUR)
    for index, (vandal, payload) in enumerate(frames.items()):
        server.send_raw(1 * S + (5 + 2 * index) * MS, payload, vandal.encode())
    server.run_until(6 * S)
    assert server.outcome("stream").tokens == expected_tokens([65] * 20, 30)
    server.submit(7 * S, "next", **NEIGHBOUR)
    server.run_until(8 * S)
    assert server.outcome("next").tokens == expected_tokens([65] * 20, 30)
    server.check_whole()
    assert server.describe("gateway")["failed"] == 0, "an engine failed of it"
    return server


def answers(server: VirtualServer, vandal: str) -> list[Any]:
    """All that it was told."""
    return [event for _, peer, event in server.events if peer == vandal.encode()]


def end_of(server: VirtualServer, vandal: str) -> Any:
    """The one end of its request, which is called `it`."""
    [terminal] = server.outcome("it", vandal.encode()).terminal
    return terminal


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_in_any_field_is_served_or_refused_by_the_name_of_the_field(field: str) -> None:
    frames = {what: frame("it", BASE | {field: value}) for what, value in VALUES.items()}
    server = serve(frames)
    refused = 0
    for what in VALUES:
        if what == "deep nesting":
            assert isinstance(answers(server, what)[0], wire.ProtocolError)
            continue
        end = end_of(server, what)
        if isinstance(end, wire.Finished):
            continue
        refused += 1
        assert end.code in ("invalid", "never_fits")
        named = "UTF-8" if what == "no UTF-8" and "UTF-8" in end.message else field
        assert re.search(rf"\b{named}\b", end.message), (what, end)
    assert refused >= 8


@pytest.mark.parametrize("field", NUMBERS)
def test_no_number_is_taken_that_is_none_or_lies_beyond_all_ranges(field: str) -> None:
    wrong = ("1", True, [1.0], {}, math.nan, math.inf, -math.inf, -1e300, 1e300)
    frames = {repr(value): frame("it", BASE | {field: value}) for value in wrong}
    server = serve(frames)
    for vandal in frames:
        end = end_of(server, vandal)
        assert (end.code, field in end.message) == ("invalid", True), vandal


def test_a_frame_that_is_no_command_is_answered_by_an_error_of_the_protocol() -> None:
    bodies: list[Any] = [[], None, 123, -1, 1.5, "x", True, {}, [{}], {"type": "Submit"}, {"type": 5}]
    bodies += [{"type": "Submit", "request_id": value} for value in (None, 5, [], {}, True)]
    bodies += [{"type": "Abort"}, {"type": "Abort", "request_id": 7}, {"type": "Hello", "version": "x"}]
    frames = {repr(body): msgspec.msgpack.encode(body) for body in bodies}
    server = serve(frames)
    for vandal in frames:
        [error] = answers(server, vandal)
        assert isinstance(error, wire.ProtocolError), vandal
        assert len(error.message) <= 600
    assert server.describe("gateway")["broken_frames"] == len(bodies)


def test_a_field_that_does_not_exist_is_refused_and_never_ignored() -> None:
    unknown = ["best_of", "cache_salt", "guided_regex", "guided_json", "response_format", "tools", "suffix"]
    server = serve({field: frame("it", BASE | {field: "(["}) for field in unknown})
    for field in unknown:
        end = end_of(server, field)
        assert (end.code, field in end.message) == ("invalid", True), field


def test_a_prompt_without_a_token_is_refused_with_the_field_it_is_in() -> None:
    prompts: dict[str, Any] = {
        "empty text": {"prompt": ""},
        "a list of empty text": {"prompt": [""]},
        "no tokens": {"prompt_token_ids": []},
        "a list of no tokens": {"prompt_token_ids": [[]]},
        "no turns": {"messages": []},
        "a turn of nothing": {"messages": [{"role": "user", "content": ""}]},
        "a turn that is a number": {"messages": [5]},
        "all three": {"prompt": "x", "prompt_token_ids": [65], "messages": [{"role": "u", "content": "x"}]},
        "none": {},
    }
    server = serve({what: frame("it", {"max_tokens": 2} | prompt) for what, prompt in prompts.items()})
    for what, prompt in prompts.items():
        end = end_of(server, what)
        assert end.code == "invalid", what
        assert next(iter(prompt), "prompt") in end.message


def test_a_prompt_over_the_context_is_refused_with_its_length_and_the_limit() -> None:
    prompts = {"text": {"prompt": "x" * 3000}, "tokens": {"prompt_token_ids": [65] * 3000}}
    server = serve({what: frame("it", prompt) for what, prompt in prompts.items()})
    for what in prompts:
        end = end_of(server, what)
        assert "3000 tokens" in end.message
        assert f"limit of {LIMIT}" in end.message
        assert "-" not in end.message


def test_a_huge_text_is_read_beside_a_stream_and_delays_no_token_of_it() -> None:
    worst_ms = {}
    for prompt in ("short", "x" * 60_000):  # about as long as a text may be here: 6 ms of encoding
        server = VirtualServer(kv_tokens=2048, calibrate=False)
        server.submit(1 * S, "stream", **NEIGHBOUR)
        server.submit(1 * S + 50 * MS, "it", b"vandal", prompt=prompt, max_tokens=1)
        server.run_until(4 * S)
        assert len(server.outcome("it", b"vandal").terminal) == 1
        worst_ms[len(prompt)] = max(server.outcome("stream").gaps_ms)
    assert worst_ms[60_000] <= worst_ms[5]


def test_what_lies_on_the_edge_of_a_range_is_served() -> None:
    edges: list[dict[str, Any]] = [{"seed": 2**63 - 1}, {"seed": -(2**63)}, {"temperature": 2}]
    edges += [{"temperature": 1e-5, "top_p": 1e-300}, {"top_k": -1}, {"top_k": 1 << 24}, {"min_p": 1.0}]
    edges += [{"min_tokens": 5}, {"stop": []}, {"stop": ["0"] * 16}, {"priority": -(2**31)}]
    edges += [{"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01}]
    frames = {str(fields): frame("it", BASE | {"max_tokens": 5} | fields) for fields in edges}
    server = serve(frames)
    for vandal in frames:
        end = end_of(server, vandal)
        assert isinstance(end, wire.Finished), (vandal, end)
        assert (end.finish_reason, end.completion_tokens) == ("length", 5)


LIMITS_OF_NOTHING = {
    "limits: {backlog: 0}": "backlog",
    "limits: {queue: 0}": "queue",
    "limits: {decode_floor: 0s}": "decode_floor",
    "limits: {decode_ahead: -1}": "decode_ahead",
    "slo: {tbt: 0ms}": "tbt",
    "params: {budget: {type: number, default: 0, min: 1}}": "budget",
}


@pytest.mark.parametrize("line", LIMITS_OF_NOTHING)
def test_a_policy_whose_limit_lets_nothing_run_is_refused_at_its_line(line: str, tmp_path: Any) -> None:
    path = tmp_path / "nothing.yaml"
    head = "apiVersion: muxk/v1alpha1\nkind: SchedulingPolicy\nmetadata: {name: nothing}\nspec:\n"
    path.write_text(f"{head}  extends: muxwise\n  {line}\n")
    with pytest.raises(PolicyError, match=r"nothing\.yaml:6:\d+") as refused:
        load_policy(str(path), {})
    assert LIMITS_OF_NOTHING[line] in str(refused.value)


@pytest.mark.parametrize(
    ("device", "kv_tokens", "said"),
    [
        ("sim", 0, "--kv-tokens 0 is less than one page of 16 tokens"),
        ("sim", -16, "--kv-tokens -16 is less"),
        ("sim", 15, "--kv-tokens 15 is less"),
        ("sim:0", None, "'0' is not a number of units"),
        ("sim:-1", None, "'-1' is not a number of units"),
        ("cpu:0", 512, "'0' is not a number of units"),
    ],
)
def test_a_device_of_nothing_is_refused_at_start_and_never_taken_for_the_default(
    device: str, kv_tokens: int | None, said: str
) -> None:
    with pytest.raises(StartupError) as refused:
        open_backend(device, "none", "auto", kv_tokens, lambda what, share: None)
    assert said in str(refused.value)
