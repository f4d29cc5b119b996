"""What the server says is what transformers says: same weights, greedy, float32, under real scheduling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from muxk.client.client import Client, Stream
from muxk.client.server_process import ServerProcess
from muxk.models.load import open_weights
from muxk.models.tokenizer import load_tokenizer
from transformers_reference import reference_model, reference_output

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
    """transformers' output for every prompt, and its logits where ours differs."""

    model: Any
    prompts: list[list[int]]
    outputs: list[list[int]]
    ties: list[str] = field(default_factory=list)
    output: int = OUTPUT

    def check(self, where: str, outputs: list[list[int]]) -> None:
        """Equal, or each token within TIE of the best given the tokens before it."""
        for prompt, expected, found in zip(self.prompts, self.outputs, outputs, strict=True):
            assert len(found) == self.output, f"{where}: {len(found)} tokens for a prompt of {len(prompt)}"
            if found != expected:
                self._check_ties(where, prompt, found)

    def _check_ties(self, where: str, prompt: list[int], found: list[int]) -> None:
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        short_by = (logits.max(dim=1).values - chosen).max().item()
        assert short_by < TIE, f"{where}: prompt of {len(prompt)} tokens, off by {short_by:.2e}"
        self.ties.append(f"{where}: prompt of {len(prompt)}")


@pytest.fixture(scope="module")
def reference() -> Reference:
    tokens = load_tokenizer(MODEL).encode(TEXT.read_text())
    prompts = [tokens[index * 13 : index * 13 + length] for index, length in enumerate(LENGTHS)]
    model = reference_model(open_weights(MODEL))
    return Reference(model, prompts, [reference_output(model, prompt, OUTPUT) for prompt in prompts])


@pytest.fixture(scope="module")
def client(reference: Reference) -> Iterator[Client]:
    # After `reference`: transformers and the server would share two cores.
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
    reference.check("muxwise", outputs_of(submit_all(client, reference.prompts)))


def test_prefix_hits_change_no_token(client: Client, reference: Reference) -> None:
    streams = submit_all(client, reference.prompts)
    results = [stream.result(timeout_s=180) for stream in streams]
    reference.check("prefix hits", [list(result.token_ids) for result in results])
    reused = [result.cached_tokens for result in results]
    # Leaving one token to compute: a prompt of 17 has one full page to reuse, one of 16 has none.
    assert all(cached >= length // 16 * 16 - 16 for cached, length in zip(reused, LENGTHS, strict=True))
    assert sum(reused) > 5000


def test_a_prompt_that_is_preempted_between_layers_says_the_same(
    client: Client, reference: Reference
) -> None:
    # Another beginning, so that nothing is reused and the prefill takes its time.
    long = next(prompt for prompt in reference.prompts if len(prompt) == 1500)
    fresh = [long[-1], *long[:-1]]
    wanted = reference_output(reference.model, fresh, OUTPUT)
    expected = Reference(reference.model, [fresh], [wanted], reference.ties)
    before = count(client, "preemptions")
    [victim] = submit_all(client, [fresh])
    overtakers = []
    for index in range(3):
        _wait_until(lambda: client.state()["prefill"]["requests"] > 0)
        time.sleep(0.2)  # a newcomer in the middle of the prefill, not before it
        overtakers.append(submit_all(client, [reference.prompts[index]])[0])
    expected.check("preempted", outputs_of([victim]))
    short = Reference(reference.model, reference.prompts[:3], reference.outputs[:3], reference.ties)
    short.check("overtaker", outputs_of(overtakers))
    assert count(client, "preemptions") > before


def test_a_swap_in_mid_stream_changes_no_token(client: Client, reference: Reference) -> None:
    streams = submit_all(client, reference.prompts)
    next(streams[0])
    assert client.swap("inflight").name == "inflight"
    time.sleep(1.0)
    assert client.swap("muxwise").name == "muxwise"
    reference.check("swapped", outputs_of(streams))


def test_inflight_says_the_same(client: Client, reference: Reference) -> None:
    client.swap("inflight")
    # Other beginnings than before would need another reference: the tails are computed, the rest is reused.
    reference.check("inflight", outputs_of(submit_all(client, reference.prompts)))
    client.swap("muxwise")


def test_inflight_from_an_empty_pool_says_the_same(reference: Reference) -> None:
    with serving("inflight", kv_tokens=24_576) as client:
        reference.check("inflight, cold", outputs_of(submit_all(client, reference.prompts)))


@pytest.mark.parametrize("policy", ["chunked", "temporal", "static_split"])
def test_the_other_policies_say_the_same(policy: str, reference: Reference) -> None:
    """Prompts of up to 512 tokens together, from an empty pool; a swap to muxwise and back in mid-stream."""
    part = Reference(reference.model, reference.prompts[4:21:2], reference.outputs[4:21:2], reference.ties)
    with serving(policy, kv_tokens=24_576) as client:
        streams = submit_all(client, part.prompts)
        next(streams[0])
        client.swap("muxwise")
        next(streams[0])
        client.swap(policy)
        part.check(policy, outputs_of(streams))


def test_recomputed_requests_say_the_same(reference: Reference) -> None:
    # Six requests that grow to 80 to 113 tokens each, and pages for about 400 in all.
    prompts = reference.prompts[9:15]
    wanted = [reference_output(reference.model, prompt, 48) for prompt in prompts]
    part = Reference(reference.model, prompts, wanted, reference.ties, output=48)
    with serving("muxwise", kv_tokens=400) as client:
        part.check("recomputed", outputs_of(submit_all(client, prompts, output=48)))
        state = client.state()
    assert state["decode"]["recomputes"] > 0
    assert state["kv_pool"]["pages_used"] == 0


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
