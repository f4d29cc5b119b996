"""Reports on a prompt of a request that wants no text: the same ids and numbers as with text, and no text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from muxk.actors import protocol as wire
from muxk.kernel.device import DevicePort, ItemDone, Lane
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.work import Item, PrefillWork, RowLogprobs, int32_values
from virtual_server import MS, Outcome, S, VirtualServer

PROMPT = [65 + index % 26 for index in range(50)]
LETTERS = [*range(97, 123)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5}
ASKED: dict[str, dict[str, Any]] = {
    "of ids": {"prompt_token_ids": PROMPT, "prompt_logprobs": 2},
    "of a text": {"prompt": "Once upon a time", "prompt_logprobs": 2},
    "of turns": {"messages": [wire.ChatMessage("user", "hello")], "prompt_logprobs": 1},
    "of the sampled one only": {"prompt_token_ids": PROMPT, "prompt_logprobs": 0},
    "with echo": {"prompt": "Once upon a time", "prompt_logprobs": 2, "echo": True},
    "echo and logprobs": {"prompt": "Once upon a time", "logprobs": 3, "echo": True},
    "echo alone": {"prompt": "Once upon a time", "echo": True},
    "reads only": {"prompt_token_ids": PROMPT, "prompt_logprobs": 2, "max_tokens": 0},
    "reads only, echo": {"prompt": "Once upon a time", "echo": True, "max_tokens": 0},
    "one token": {"prompt_token_ids": PROMPT, "prompt_logprobs": 2, "max_tokens": 1},
    "several choices": {"prompt_token_ids": PROMPT, "prompt_logprobs": 2, "n": 3, "logprobs": 1},
    "its end only": {"prompt_token_ids": PROMPT, "prompt_logprobs": 2, "truncate_prompt_tokens": 20},
    "in chunks": {"prompt_token_ids": PROMPT * 12, "prompt_logprobs": 2},
    "of one token": {"prompt_token_ids": [65], "prompt_logprobs": 2},
    "ends by a token": {
        "prompt_token_ids": PROMPT,
        "prompt_logprobs": 1,
        "stop_token_ids": [*range(97, 123)],
    },
}

SILENT = ("echo alone", "reads only, echo")
"""They ask for no numbers."""

Numbers = list[tuple[int, float, int, tuple[int, ...], tuple[float, ...]]]


def numbers(logprobs: tuple[wire.TokenLogprob, ...] | list[wire.TokenLogprob]) -> Numbers:
    """What is said of tokens but their text."""
    return [(one.token_id, one.logprob, one.rank, one.top_ids, one.top_logprobs) for one in logprobs]


def texts(logprobs: tuple[wire.TokenLogprob, ...] | list[wire.TokenLogprob]) -> bytes:
    """All text in it."""
    return b"".join(one.token + b"".join(one.top_tokens) for one in logprobs)


class ReportingDevice(SimDevice):
    """Reports on prompt tokens as a real device does, chunk by chunk, with numbers that are made up."""

    def start(self, port: DevicePort) -> None:
        super().start(_Reporting(port, self))

    def launch(self, lane: Lane, item: Item, after: Any) -> None:
        self.reports = reports_of(item)
        super().launch(lane, item, after)


class _Reporting:
    """A port that adds the reports of the item which was launched last."""

    def __init__(self, port: DevicePort, device: ReportingDevice) -> None:
        self._port, self._device = port, device
        self.now_ns = port.now_ns

    def post_after(self, delay_ns: int, done: Any) -> Any:
        assert isinstance(done, ItemDone)
        return self._port.post_after(
            delay_ns, msgspec.structs.replace(done, prompt_logprobs=self._device.reports)
        )


def reports_of(item: Item) -> tuple[RowLogprobs, ...]:
    work = item.work
    if not isinstance(work, PrefillWork) or not item.is_last:
        return ()
    tokens, reports = int32_values(work.tokens), []
    for row, top in sorted(work.prompt_logprobs):
        begins = sum(work.new_tokens[:row])
        for place in range(begins + 1, begins + work.new_tokens[row]):
            if item.first_token <= place - 1 < item.last_token:
                position, token = work.reused_tokens[row] + place - begins, tokens[place]
                value = -position / 1024
                top_ids, top_values = tuple(range(token, token + top)), (value,) * top
                reports.append(RowLogprobs(row, position, token, value, 1, top_ids, top_values))
    return tuple(reports)


def server_with(kv_tokens: int = 4096) -> VirtualServer:
    return VirtualServer("chunked", calibrate=False, device=ReportingDevice(pages=kv_tokens // 16 + 1))


def serve(name: str, detokenize: bool) -> Outcome:
    """A request, and the same one again, whose prompt is cached then; the second."""
    server = server_with()
    for index in range(2):
        fields = {**GREEDY, **ASKED[name], "detokenize": detokenize}
        server.submit((1 + index) * S, f"{name} {index}", **fields)
    server.run_until(4 * S)
    server.check_whole()
    return server.outcome(f"{name} 1")


@pytest.mark.parametrize("name", ASKED)
def test_ids_and_numbers_are_those_of_the_request_with_text(name: str) -> None:
    text, ids = serve(name, detokenize=True), serve(name, detokenize=False)
    assert text.prompt is not None
    assert ids.prompt is not None
    assert ids.prompt.token_ids == text.prompt.token_ids
    assert numbers(ids.prompt.logprobs) == numbers(text.prompt.logprobs)
    reported = [one.token_id for one in text.prompt.logprobs]
    assert reported == ([] if name in SILENT else list(text.prompt.token_ids[1:]))
    assert (ids.prompt.text, texts(ids.prompt.logprobs)) == ("", b"")
    assert ids.choice_tokens == text.choice_tokens
    assert numbers(ids.logprobs) == numbers(text.logprobs)
    assert texts(ids.logprobs) == b""
    assert not any(ids.choice_texts.values())
    assert ids.terminal == text.terminal
    assert ids.choice_ends == text.choice_ends
    assert ids.accepted == text.accepted == 1


def test_a_report_is_told_once_also_when_its_request_is_computed_again() -> None:
    told: list[tuple[wire.Prompt, list[int]]] = []
    for detokenize in (False, True):
        server = server_with(kv_tokens=192)
        for index in range(3):
            fields = {**GREEDY, "max_tokens": 70, "detokenize": detokenize, "prompt_logprobs": 1}
            server.submit(S, f"r{index}", prompt_token_ids=[65 + index] * 40, **fields)
        server.run_until(20 * S)
        assert server.describe("decode")["recomputes"] > 0
        for index in range(3):
            outcome = server.outcome(f"r{index}")
            assert outcome.prompt is not None
            assert [end.finish_reason for end in outcome.terminal] == ["length"]
            told.append((outcome.prompt, outcome.tokens))
        server.check_whole()
    for (ids, tokens), (text, tokens_with_text) in zip(told[:3], told[3:], strict=True):
        assert (ids.token_ids, numbers(ids.logprobs)) == (text.token_ids, numbers(text.logprobs))
        assert tokens == tokens_with_text


@pytest.mark.parametrize("moment_ms", [0, 1, 3, 8, 20])
def test_an_abort_at_any_moment_leaves_one_end_and_nothing_else(moment_ms: int) -> None:
    server = server_with()
    fields = {**GREEDY, "max_tokens": 400, "prompt_logprobs": 2, "detokenize": False}
    server.submit(S, "it", prompt_token_ids=PROMPT * 8, **fields)
    server.abort(S + moment_ms * MS, "it")
    server.run_until(20 * S)
    [end] = server.outcome("it").terminal
    assert end.finish_reason == "abort"
    assert end.completion_tokens == len(server.outcome("it").tokens) < 400
    server.check_whole()
