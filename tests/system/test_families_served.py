"""Four families, served by real processes under all five policies: the tokens of transformers, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_driver import RandomWeights, tiny_config
from muxk.client.client import Client
from muxk.client.commands import Sampling
from muxk.client.server_process import ServerProcess
from muxk.models.config import ModelConfig
from muxk.models.rope_scaling import Llama3Scaling
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers_reference import greedy_gap, reference_model, reference_output

pytestmark = [pytest.mark.model, pytest.mark.slow]

FAMILIES: dict[str, ModelConfig] = {
    "llama": tiny_config(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 40)),
    "mistral": tiny_config("mistral", windows=(24,) * 3, head_dim=16),
    "qwen2": tiny_config("qwen2", tied_embeddings=True),
    "qwen3": tiny_config("qwen3", kv_heads=6),
}
POLICIES = ("muxwise", "inflight", "chunked", "temporal", "static_split")
BATCH = 32
OUTPUT = 24
TIE = 1e-4
GREEDY: Sampling = {"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True}


class Family:
    """A checkpoint folder with random weights, its server, and transformers' model of the same weights."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        self.vocabulary = config.vocabulary
        self.model = reference_model(RandomWeights(config))
        self.model.save_pretrained(folder, max_shard_size="40KB")
        words = {f"w{index}": index for index in range(config.vocabulary)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
        # Pages for about a third of what a batch grows to: requests are evicted and recomputed.
        self.server = ServerProcess("muxwise", model=str(folder), dtype="float32", kv_tokens=1200)

    def prompts(self, seed: str) -> list[list[int]]:
        draw = random.Random(seed)
        lengths = [draw.choice((1, 15, 16, 17, 40, 100)) for _ in range(BATCH)]
        return [[draw.randrange(self.vocabulary) for _ in range(length)] for length in lengths]

    def check(self, where: str, prompt: list[int], found: list[int]) -> None:
        """Equal to transformers', or each token within TIE of the best given the tokens before it."""
        assert len(found) == OUTPUT, where
        gap = greedy_gap(self.model, prompt, found)
        expected = found if gap < TIE else reference_output(self.model, prompt, OUTPUT)
        assert gap < TIE, f"{where}: {found} != {expected}"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Family, Client]]:
    family = Family(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))
    with family.server, Client(family.server.wait_ready()) as client:
        yield family, client


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_of_32_says_what_transformers_says(family: tuple[Family, Client], policy: str) -> None:
    served, client = family
    client.swap(policy, {"budget": "16"} if policy == "chunked" else None)
    prompts = served.prompts(policy)
    streams = [
        client.submit(token_ids=prompt, **GREEDY, detokenize=place % 2 == 0)
        for place, prompt in enumerate(prompts)
    ]
    for prompt, stream in zip(prompts, streams, strict=True):
        served.check(policy, prompt, list(stream.result(timeout_s=60).token_ids))


def test_evicted_requests_prefix_hits_and_swaps_in_mid_stream_change_nothing(
    family: tuple[Family, Client],
) -> None:
    served, client = family
    prompts = served.prompts("swaps") + served.prompts("muxwise")[:8]
    streams = [
        client.submit(token_ids=prompt, **GREEDY, detokenize=place % 2 == 0)
        for place, prompt in enumerate(prompts)
    ]
    for policy in POLICIES * 2:
        next(streams[0], None)
        client.swap(policy)
    for prompt, stream in zip(prompts, streams, strict=True):
        served.check("swaps", prompt, list(stream.result(timeout_s=60).token_ids))
    state = client.state()
    assert state["decode"]["recomputes"] > 0
    assert state["kv_pool"]["pages_used"] == 0
    assert state["arbiter"]["counts"]["policy swaps"] > len(POLICIES)
