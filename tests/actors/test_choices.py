"""A request with several choices is one request: one acceptance, one end, and all of it aborted together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import virtual_server
from muxk.actors import gateway
from muxk.actors import protocol as wire
from muxk.actors.gateway import LIVE_PER_PEER_MAX
from muxk.kernel.device import ItemFailed, Lane
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.work import DecodeWork, Item
from virtual_server import MS, S, VirtualServer, expected_tokens

PROMPT = [65] * 40
RANDOM: dict[str, Any] = {
    "prompt_token_ids": PROMPT,
    "max_tokens": 30,
    "temperature": 1.0,
    "seed": 11,
    "ignore_eos": True,
}
CHOICES_AT_MOST = 16


def serve(policy: str = "muxwise", **fields: Any) -> VirtualServer:
    server = VirtualServer(policy, calibrate=False)
    server.submit(1 * S, "it", **(RANDOM | fields))
    server.run_until(6 * S)
    server.check_whole()
    return server


def test_choices_differ_and_are_the_same_again_with_the_same_seed_under_any_policy() -> None:
    first, second = serve(n=4).outcome("it"), serve("inflight", n=4).outcome("it")
    assert first.choice_tokens == second.choice_tokens
    assert len({tuple(tokens) for tokens in first.choice_tokens.values()}) == 4
    assert first.choice_tokens[0] == serve().outcome("it").tokens


def test_greedy_choices_are_all_the_same() -> None:
    outcome = serve(n=3, temperature=0.0).outcome("it")
    assert outcome.choice_tokens == {index: expected_tokens(PROMPT, 30) for index in range(3)}


def test_a_request_with_choices_is_accepted_once_and_ends_once_after_each_of_them() -> None:
    outcome = serve(n=3, logprobs=0, echo=True, stop=["a"]).outcome("it")
    assert outcome.accepted == 1
    assert outcome.prompt is not None
    [finished] = outcome.terminal
    assert sorted(outcome.choice_ends) == [0, 1, 2]
    lengths = {index: len(tokens) for index, tokens in outcome.choice_tokens.items()}
    assert {index: end.completion_tokens for index, end in outcome.choice_ends.items()} == lengths
    assert finished.completion_tokens == sum(lengths.values())
    assert finished.prompt_tokens == len(PROMPT)
    assert (finished.finish_reason, finished.stop_reason) == (
        outcome.choice_ends[0].finish_reason,
        outcome.choice_ends[0].stop_reason,
    )
    assert all("a" not in text for text in outcome.choice_texts.values())


def test_one_choice_looks_as_it_always_did() -> None:
    outcome = serve(n=1).outcome("it")
    assert outcome.choice_ends == {}
    assert list(outcome.choice_tokens) == [0]


@pytest.mark.parametrize("after_ms", [0, 1, 3, 6, 10, 20, 40, 80, 150, 250])
@pytest.mark.parametrize("prompt", ["text", "tokens"])
def test_an_abort_ends_all_choices_in_every_state(prompt: str, after_ms: int) -> None:
    server = VirtualServer(calibrate=False)
    given = {"prompt": "x" * 900, "prompt_token_ids": None} if prompt == "text" else {}
    for number in range(3):  # text is encoded one after the other: the last one waits
        server.submit(1 * S, f"r{number}", **(RANDOM | given | {"n": 4}))
        server.abort(1 * S + after_ms * MS, f"r{number}")
    server.submit(1 * S, "other", **(RANDOM | {"temperature": 0.0}))
    server.run_until(5 * S)
    for number in range(3):
        [terminal] = server.outcome(f"r{number}").terminal
        assert terminal.finish_reason in ("abort", "length")
    assert server.outcome("other").tokens == expected_tokens(PROMPT, 30)
    server.check_whole()


def test_a_client_that_leaves_takes_all_choices_with_it() -> None:
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "it", b"leaver", **(RANDOM | {"n": 8, "max_tokens": 1000}))
    server.leave(1 * S + 300 * MS, b"leaver")
    server.run_until(2 * S)
    server.check_whole()


def test_choices_count_one_by_one_in_the_bound_of_a_client() -> None:
    server = VirtualServer(calibrate=False, kv_tokens=512)
    fields = RANDOM | {"n": CHOICES_AT_MOST, "prompt_token_ids": None, "prompt": "x" * 400}
    count = LIVE_PER_PEER_MAX // CHOICES_AT_MOST
    for number in range(count + 1):
        server.submit(1 * S, f"r{number}", b"greedy", **fields)
    server.run_until(1 * S)
    [failed] = server.outcome(f"r{count}", b"greedy").terminal
    assert failed.code == "overloaded"
    assert not any(server.outcome(f"r{number}", b"greedy").terminal for number in range(count))


def test_a_refusal_of_one_choice_fails_the_request_once_and_ends_the_others() -> None:
    server = VirtualServer(calibrate=False, kv_tokens=512)
    for number in range(70):  # more choices than the queue takes
        server.submit(1 * S, f"r{number}", **(RANDOM | {"n": CHOICES_AT_MOST, "max_tokens": 4}))
    server.run_until(200 * S)
    ends = [server.outcome(f"r{number}").terminal for number in range(70)]
    assert {len(end) for end in ends} == {1}
    codes = {getattr(end[0], "code", "finished") for end in ends}
    assert codes == {"finished", "overloaded"}
    for number, [end] in enumerate(ends):
        assert server.outcome(f"r{number}").accepted == isinstance(end, wire.Finished)
    server.check_whole()


class FailingStep(SimDevice):
    """Its first decode step fails."""

    failed = False

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        if not isinstance(item.work, DecodeWork) or self.failed:
            super().launch(lane, item, after)
            return
        self.failed = True
        assert self._port is not None
        self._port.post_after(MS, ItemFailed(item.item_id, "OutOfMemory: no room"))


def test_a_failure_on_the_device_fails_the_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_server, "SimDevice", FailingStep)
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "it", **(RANDOM | {"n": 5}))
    server.submit(3 * S, "next", **(RANDOM | {"n": 5}))
    server.run_until(6 * S)
    [failed] = server.outcome("it").terminal
    assert failed.code == "engine_failed"
    assert [type(end) for end in server.outcome("next").terminal] == [wire.Finished]
    server.check_whole()


def test_a_text_that_can_not_be_encoded_fails_its_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, text: str) -> list[int]:
        raise ValueError("not today")

    monkeypatch.setattr(virtual_server.ByteTokenizer, "encode", refuse)
    server = VirtualServer(calibrate=False)
    server.submit(1 * S, "it", prompt="x", n=3)
    server.run_until(2 * S)
    [failed] = server.outcome("it").terminal
    assert "not today" in failed.message
    server.check_whole()


def test_texts_that_wait_to_be_read_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "UNREAD_CHARS_MAX", 2500)
    server = VirtualServer(calibrate=False)
    for number in range(4):
        server.submit(1 * S, f"r{number}", prompt="x" * 1000, max_tokens=2)
    server.abort(1 * S, "r1")
    server.submit(1 * S, "again", prompt="x" * 1000, max_tokens=2)
    server.submit(3 * S, "later", prompt="x" * 1000, max_tokens=2)
    server.run_until(5 * S)
    codes = {name: server.outcome(name).terminal[0] for name in ("r0", "r2", "r3", "again", "later")}
    refused = {name for name, end in codes.items() if getattr(end, "code", "") == "overloaded"}
    assert refused == {"r2", "r3"}
    server.check_whole()
