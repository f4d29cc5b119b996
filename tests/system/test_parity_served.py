"""What the server says is what transformers says: same weights, greedy, float32, under real scheduling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from muxk.client.client import Client, Stream
from muxk.client.server_process import ServerProcess
from muxk.models.load import open_weights
from muxk.models.tokenizer import load_tokenizer
from transformers_reference import greedy_gap, reference_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
LENGTHS = (
    1,
    2,
    3,
    5,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    64,
    65,
    100,
    128,
    200,
    257,
    400,
    512,
    777,
    1024,
    1500,
)
OUTPUT = 12
TIE = 1e-4
TEXT = Path(__file__).parents[2] / "LICENSE"


@dataclass
class Reference:
    """Prompts, and transformers' model to check outputs with, each output of a prompt once."""

    model: Any
    prompts: list[list[int]]
    ties: list[str] = field(default_factory=list)
    confirmed: set[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    def check(
        self, where: str, prompts: list[list[int]], outputs: list[list[int]], length: int = OUTPUT
    ) -> None:
        """Equal to transformers', or each token within TIE of the best given the tokens before it."""
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output) == length, f"{where}: {len(output)} tokens for a prompt of {len(prompt)}"
            pair = (tuple(prompt), tuple(output))
            if pair not in self.confirmed and self._gap(where, prompt, output) == 0:
                self.confirmed.add(pair)

    def _gap(self, where: str, prompt: list[int], output: list[int]) -> float:
        gap = greedy_gap(self.model, prompt, output)
        assert gap < TIE, f"{where}: prompt of {len(prompt)} tokens, off by {gap:.2e}"
        if gap > 0:
            self.ties.append(f"{where}: prompt of {len(prompt)}")
        return gap

    def fresh(self, part: slice, first: int) -> list[list[int]]:
        """Prompts with another beginning, of which the pool knows nothing."""
        return [[first, *prompt[:-1]] for prompt in self.prompts[part]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    tokens = load_tokenizer(MODEL).encode(TEXT.read_text())
    prompts = [tokens[index * 13 : index * 13 + length] for index, length in enumerate(LENGTHS)]
    return Reference(reference_model(open_weights(MODEL)), prompts)


@pytest.fixture(scope="module")
def client(reference: Reference) -> Iterator[Client]:
    with serving("muxwise", kv_tokens=24_576) as client:
        yield client


@contextmanager
def serving(policy: str, kv_tokens: int) -> Iterator[Client]:
    """A client of a server of its own."""
    server = ServerProcess(policy, dtype="float32", kv_tokens=kv_tokens)
    with server, Client(server.wait_ready()) as client:
        yield client


def submit_all(client: Client, prompts: list[list[int]], output: int = OUTPUT) -> list[Stream]:
    return [
        client.submit(token_ids=prompt, max_tokens=output, temperature=0.0, ignore_eos=True)
        for prompt in prompts
    ]


def outputs_of(streams: list[Stream]) -> list[list[int]]:
    return [list(stream.result(timeout_s=180).token_ids) for stream in streams]


def count(client: Client, name: str) -> int:
    return int(client.state()["arbiter"]["counts"].get(name, 0))


def test_24_prompts_together_say_what_transformers_says(client: Client, reference: Reference) -> None:
    reference.check("muxwise", reference.prompts, outputs_of(submit_all(client, reference.prompts)))


def test_prefix_hits_change_no_token(client: Client, reference: Reference) -> None:
    streams = submit_all(client, reference.prompts)
    results = [stream.result(timeout_s=180) for stream in streams]
    outputs = [list(result.token_ids) for result in results]
    reference.check("prefix hits", reference.prompts, outputs)
    reused = [result.cached_tokens for result in results]
    # Leaving one token to compute: a prompt of 17 has one full page to reuse, one of 16 has none.
    assert all(cached >= length // 16 * 16 - 16 for cached, length in zip(reused, LENGTHS, strict=True))
    assert sum(reused) > 5000


def test_a_prompt_that_is_preempted_between_layers_says_the_same(
    client: Client, reference: Reference
) -> None:
    # Another beginning, so that nothing is reused and the prefill takes its time.
    [long] = reference.fresh(slice(LENGTHS.index(1500), None), first=300)
    before = count(client, "preemptions")
    [victim] = submit_all(client, [long])
    overtakers = []
    for index in range(3):
        _wait_until(lambda: client.state()["prefill"]["requests"] > 0)
        time.sleep(0.2)  # a newcomer in the middle of the prefill, not before it
        overtakers.append(submit_all(client, [reference.prompts[index]])[0])
    reference.check("preempted", [long], outputs_of([victim]))
    reference.check("overtaker", reference.prompts[:3], outputs_of(overtakers))
    assert count(client, "preemptions") > before


def test_a_swap_in_mid_stream_changes_no_token(client: Client, reference: Reference) -> None:
    streams = submit_all(client, reference.prompts)
    next(streams[0])
    assert client.swap("inflight").name == "inflight"
    time.sleep(1.0)
    assert client.swap("muxwise").name == "muxwise"
    reference.check("swapped", reference.prompts, outputs_of(streams))


def test_inflight_says_the_same(client: Client, reference: Reference) -> None:
    client.swap("inflight")
    reference.check("inflight", reference.prompts, outputs_of(submit_all(client, reference.prompts)))
    client.swap("muxwise")


OTHERS = ("inflight", "chunked", "temporal", "static_split")


@pytest.mark.parametrize("policy", OTHERS)
def test_the_other_policies_say_the_same(policy: str, client: Client, reference: Reference) -> None:
    """Prompts of up to 512 tokens together, none of it reused; a swap to muxwise and back in mid-stream."""
    client.swap(policy)
    prompts = reference.fresh(slice(4, 21, 2), first=400 + OTHERS.index(policy))
    streams = submit_all(client, prompts)
    next(streams[0])
    client.swap("muxwise")
    next(streams[0])
    client.swap(policy)
    results = [stream.result(timeout_s=180) for stream in streams]
    assert [result.cached_tokens for result in results] == [0] * len(prompts)
    reference.check(policy, prompts, [list(result.token_ids) for result in results])
    client.swap("muxwise")


def test_recomputed_requests_say_the_same(reference: Reference) -> None:
    # Requests that grow to 5 to 8 pages each, in a pool of 9: two can begin together, and no two can end so.
    prompts = reference.prompts[9:15]
    with serving("muxwise", kv_tokens=144) as client:
        outputs = outputs_of(submit_all(client, prompts, output=48))
        state = client.state()
    reference.check("recomputed", prompts, outputs, length=48)
    assert state["decode"]["recomputes"] > 0
    assert state["kv_pool"]["pages_used"] == 0


def test_kv_that_migrated_between_cores_says_the_same(reference: Reference) -> None:
    """Prompts on one core, answers on the other, each with its own pool; then with prefix hits on both."""
    prompts = reference.prompts[:15:2]
    with serving("splitwise", kv_tokens=8192) as client:
        first = outputs_of(submit_all(client, prompts))
        again = [stream.result(timeout_s=180) for stream in submit_all(client, prompts)]
        state = client.state()
    reference.check("migrated", prompts, first)
    reference.check("migrated again", prompts, [list(result.token_ids) for result in again])
    assert sum(result.cached_tokens for result in again) > 0
    assert state["migration"]["requests"] == 2 * len(prompts)
    assert state["decode@0"]["steps"] == 0 < state["decode@1"]["steps"]
    assert state["kv_pool@0"]["pages_used"] == state["kv_pool@1"]["pages_used"] == 0


def test_how_often_two_logits_tied(
    reference: Reference, record_property: Callable[[str, object], None]
) -> None:
    """Not a check of its own: says how often another branch than transformers' was followed."""
    record_property("ties", reference.ties)
    print(f"tied branches: {len(reference.ties)} {reference.ties}")
    assert len(reference.ties) <= 3


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.02)
