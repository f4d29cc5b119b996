"""A request with `detokenize` false gets the same token ids, ends and counts as with text, and no text."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import cluster_server, gpu_tokens, prompt_of
from muxk.actors import protocol as wire
from muxk.actors.messages import IdsEmitted
from muxk.kernel.actor import Ref
from muxk.kernel.messages import PrefillDone
from muxk.kernel.work import int32_bytes
from virtual_server import MS, S, VirtualServer, expected_tokens

PROMPT = [65 + index for index in range(20)]
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
ANSWER = expected_tokens(PROMPT, 40)
SAMPLED: dict[str, Any] = {"prompt_token_ids": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": 5}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"prompt_token_ids": PROMPT, **GREEDY},
    "one token": {"prompt_token_ids": PROMPT, **GREEDY, "max_tokens": 1},
    "prompt as text": {"prompt": "Once upon a time", **GREEDY},
    "ends by itself": SAMPLED,
    "several choices": {**SAMPLED, "n": 3},
    "stop token": {"prompt_token_ids": PROMPT, **GREEDY, "stop_token_ids": [ANSWER[12], 3]},
    "min_tokens": {**SAMPLED, "min_tokens": 50, "n": 2},
    "penalty": {**SAMPLED, "frequency_penalty": 1.5, "ignore_eos": True},
}
LATENCIES = ("tokens", "finished", "ttft_ms", "tbt_ms")


def serve(name: str, detokenize: bool, **options: Any) -> VirtualServer:
    server = VirtualServer(calibrate=False, **options)
    server.submit(1 * S, name, **ASKED[name], detokenize=detokenize)
    server.run_until(4 * S)
    server.check_whole()
    return server


@pytest.mark.parametrize("name", ASKED)
def test_ids_ends_and_counts_are_those_of_the_request_with_text(name: str) -> None:
    text, ids = serve(name, detokenize=True), serve(name, detokenize=False)
    assert ids.outcome(name).choice_tokens == text.outcome(name).choice_tokens
    assert ids.outcome(name).terminal == text.outcome(name).terminal
    assert ids.outcome(name).choice_ends == text.outcome(name).choice_ends
    assert not "".join(ids.outcome(name).choice_texts.values())
    seen = [{key: server.describe("gateway").get(key) for key in LATENCIES} for server in (text, ids)]
    assert seen[0] == seen[1]


def test_a_step_is_one_event_for_each_client_whatever_its_batch() -> None:
    server = VirtualServer(calibrate=False)
    for index in range(6):
        asked = {"prompt_token_ids": [65 + index] * 20, **GREEDY, "max_tokens": 30 + index}
        server.submit(1 * S, f"r{index}", b"one" if index % 2 else b"two", **asked, detokenize=index < 4)
    server.run_until(4 * S)
    for index in range(6):
        outcome = server.outcome(f"r{index}", b"one" if index % 2 else b"two")
        assert outcome.tokens == expected_tokens([65 + index] * 20, 30 + index)
        assert bool(outcome.text) == (index < 4)
    told = [(at_ns, peer) for at_ns, peer, event in server.events if isinstance(event, wire.TokenIds)]
    assert len(told) == len(dict.fromkeys(told))
    server.check_whole()


def test_the_tokenizer_keeps_nothing_for_it() -> None:
    server = VirtualServer(calibrate=False)
    for index in range(3):
        asked = {"prompt_token_ids": PROMPT, **GREEDY, "max_tokens": 400}
        server.submit(1 * S, f"r{index}", **asked, detokenize=index == 0)
    server.run_until(1 * S + 300 * MS)
    assert (server.describe("decode")["rows"], server.describe("tokenizer")["live"]) == (3, 1)


@pytest.mark.parametrize("seed", range(3))
def test_an_abort_in_mid_stream_ends_it_with_what_it_got(seed: int) -> None:
    server = VirtualServer(calibrate=False, seed=seed, jitter=True)
    for index in range(4):
        asked = {"prompt_token_ids": [65 + index] * 20, **GREEDY, "max_tokens": 100}
        server.submit(1 * S, f"r{index}", **asked, detokenize=False)
    server.abort(1 * S + 350 * MS, "r1")
    server.run_until(6 * S)
    [aborted] = server.outcome("r1").terminal
    assert aborted.finish_reason == "abort"
    assert aborted.completion_tokens == len(server.outcome("r1").tokens) > 10
    for index in (0, 2, 3):
        assert server.outcome(f"r{index}").tokens == expected_tokens([65 + index] * 20, 100)
        [finished] = server.outcome(f"r{index}").terminal
        assert (finished.finish_reason, finished.completion_tokens) == ("length", 100)
    server.check_whole()


def test_stop_strings_are_refused_with_what_would_do() -> None:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "it", prompt_token_ids=PROMPT, stop=["end"], detokenize=False)
    server.run_until(2 * S)
    [failed] = server.outcome("it").terminal
    assert (failed.code, failed.message) == (
        "invalid",
        "stop needs the text that detokenize false leaves out: "
        "give stop_token_ids in place of stop, or leave detokenize true",
    )


@pytest.mark.parametrize("detokenize", [False, True])
def test_an_evicted_request_goes_on_where_it_was(detokenize: bool) -> None:
    server = VirtualServer(calibrate=False, kv_tokens=192)
    for index in range(3):
        asked = {"prompt_token_ids": [65 + index] * 40, **GREEDY, "max_tokens": 70}
        server.submit(1 * S, f"r{index}", **asked, detokenize=detokenize)
    server.run_until(20 * S)
    assert server.describe("decode")["recomputes"] > 0
    for index in range(3):
        assert server.outcome(f"r{index}").tokens == expected_tokens([65 + index] * 40, 70)
    server.check_whole()


def test_a_crash_in_mid_stream_fails_it_and_the_next_one_is_served() -> None:
    server = VirtualServer()
    asked = {"prompt_token_ids": PROMPT, **GREEDY, "max_tokens": 400, "detokenize": False}
    server.submit(2 * S, "lost", **asked)
    server.submit(2 * S, "lost too", **asked)
    server.runtime.inject(Ref("prefill"), PrefillDone(999, b"", 0, False), 2 * S + 300 * MS)
    server.submit(6 * S, "next", **{**asked, "max_tokens": 40})
    server.run_until(10 * S)
    for name in ("lost", "lost too"):
        assert server.outcome(name).tokens
        assert [failed.code for failed in server.outcome(name).terminal] == ["engine_failed"]
    assert server.outcome("next").tokens == ANSWER
    server.check_whole()


def test_it_goes_on_where_its_kv_goes() -> None:
    server = cluster_server("splitwise", devices=2)
    prompts = [prompt_of(40 + 10 * index, index) for index in range(8)]
    for index, prompt in enumerate(prompts):
        server.submit(S, f"r{index}", prompt_token_ids=prompt, **GREEDY, detokenize=False)
    server.run_until(20 * S)
    assert server.describe("migration")["requests"] == len(prompts)
    for index, prompt in enumerate(prompts):
        assert server.outcome(f"r{index}").tokens == gpu_tokens(prompt, 40)
    server.check_whole()


@pytest.mark.parametrize("asks", [{"prompt_token_ids": PROMPT}, {"prompt": "Once upon", "echo": True}])
def test_log_probabilities_and_prompts_come_as_ids_too(asks: dict[str, Any]) -> None:
    asked = {**GREEDY, "max_tokens": 5, "logprobs": 2, **asks}
    server = cluster_server("splitwise")
    server.submit(1 * S, "text", **asked)
    server.submit(2 * S, "ids", **asked, detokenize=False)
    server.run_until(4 * S)
    text, ids = server.outcome("text"), server.outcome("ids")
    assert ids.tokens == text.tokens
    assert not ids.text
    assert len(ids.logprobs) == 5
    assert [(entry.token_id, entry.logprob, entry.top_ids) for entry in ids.logprobs] == [
        (entry.token_id, entry.logprob, entry.top_ids) for entry in text.logprobs
    ]
    assert not any(entry.token or any(entry.top_tokens) for entry in ids.logprobs)
    if text.prompt is not None and ids.prompt is not None:
        assert (ids.prompt.text, ids.prompt.token_ids) == ("", text.prompt.token_ids)
    assert (ids.prompt is None) == (text.prompt is None)
    server.check_whole()


@pytest.mark.parametrize("detokenize", [False, True])
def test_every_row_of_a_large_batch_has_its_own_pages(detokenize: bool) -> None:
    server = VirtualServer(calibrate=False)
    prompts = [[65 + index] * (10 + 5 * index) for index in range(30)]
    for index, prompt in enumerate(prompts):
        asked = {"prompt_token_ids": prompt, **GREEDY, "max_tokens": 50 + index}
        server.submit(1 * S, f"r{index}", **asked, detokenize=detokenize)
    server.run_until(6 * S)
    for index, prompt in enumerate(prompts):
        assert server.outcome(f"r{index}").tokens == expected_tokens(prompt, 50 + index)
    server.check_whole()


def test_a_step_that_is_on_its_way_when_a_client_aborts_tells_it_nothing() -> None:
    server = VirtualServer(calibrate=False)
    for name in ("aborted", "other"):
        server.submit(1 * S, name, prompt_token_ids=PROMPT, **GREEDY, detokenize=False)
    server.run_until(1 * S + 100 * MS)
    heard = {name: len(server.outcome(name).tokens) for name in ("aborted", "other")}
    server.abort(1 * S + 100 * MS, "aborted")
    requests = tuple(server.runtime.actor("gateway").state.live)  # type: ignore[attr-defined]
    step = IdsEmitted((), requests, int32_bytes([70, 71]))
    server.runtime.inject(Ref("gateway"), step, 1 * S + 100 * MS)
    server.run_until(1 * S + 100 * MS)
    assert len(server.outcome("aborted").tokens) == heard["aborted"] > 3
    assert server.outcome("other").tokens[heard["other"] :] == [71]
    [end] = server.outcome("aborted").terminal
    assert end.completion_tokens == heard["aborted"]
