"""Models for tests, and a driver that gives runners the work items that executors would."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from muxk.kernel.work import (
    DecodeWork,
    PrefillWork,
    RowExtras,
    SamplingColumns,
    StepOutput,
    int32_array,
    int32_bytes,
)
from muxk.models.config import ModelConfig
from muxk.models.cpu_ops import CpuOperators
from muxk.models.llama import load_decoder, tensor_names
from muxk.models.runner import ModelRunner
from muxk.models.weights import Weights
from numpy.typing import NDArray

PAGE = 16


def columns(
    rows: int, extras: tuple[RowExtras, ...] = (), **values: Sequence[float] | NDArray[np.generic]
) -> SamplingColumns:
    """Sampling columns; greedy unless a temperature is given."""
    plain = {"temperature": [0.0] * rows, "top_p": [1.0] * rows, "top_k": [0] * rows}
    plain |= {"seed": [0] * rows, "choice": [0] * rows} | values
    return SamplingColumns(
        temperature=np.asarray(plain["temperature"], dtype="<f4").tobytes(),
        top_p=np.asarray(plain["top_p"], dtype="<f4").tobytes(),
        top_k=np.asarray(plain["top_k"], dtype="<i4").tobytes(),
        seed=np.asarray(plain["seed"], dtype="<u8").tobytes(),
        choice=np.asarray(plain["choice"], dtype="<u4").tobytes(),
        greedy="temperature" not in values and not extras,
        min_p=np.asarray(plain.get("min_p", ()), dtype="<f4").tobytes(),
        extras=extras,
    )


@dataclass
class Generation:
    """One request: its prompt, its output so far and its pages."""

    prompt: list[int]
    pages: list[int]
    output: list[int] = field(default_factory=list)


class Driver:
    """Runs requests on a runner as executors do: page tables, positions, batches."""

    def __init__(self, runner: ModelRunner, scattered: bool = True) -> None:
        self.runner = runner
        pages = np.arange(1, runner.pages)
        order = np.random.default_rng(7).permutation(pages) if scattered else pages
        self._free = [int(page) for page in order]
        self._ids = 0

    def request(self, prompt: list[int], output: int) -> Generation:
        return Generation(prompt, [self._free.pop() for _ in range(-(-(len(prompt) + output) // PAGE))])

    def prefill_work(
        self,
        requests: list[Generation],
        reused: Sequence[int] | None = None,
        sampling: SamplingColumns | None = None,
        prompt_logprobs: tuple[tuple[int, int], ...] = (),
    ) -> PrefillWork:
        """The work of a batch of prompts."""
        counts = tuple(reused or [0] * len(requests))
        new = [request.prompt[count:] for request, count in zip(requests, counts, strict=True)]
        self._ids += 1
        return PrefillWork(
            batch_id=self._ids,
            requests=tuple(range(len(requests))),
            tokens=int32_bytes([token for tokens in new for token in tokens]),
            new_tokens=tuple(map(len, new)),
            reused_tokens=counts,
            sampling=sampling or columns(len(requests)),
            prompt_logprobs=prompt_logprobs,
            **_table(requests),
        )

    def prefill(
        self,
        requests: list[Generation],
        reused: Sequence[int] | None = None,
        cuts: Sequence[int] = (),
        sampling: SamplingColumns | None = None,
        chunk: int | None = None,
    ) -> None:
        """Prefill a batch and take the first token of each request.

        The layers of each chunk of `chunk` tokens, or of all, are cut at `cuts`.
        """
        work = self.prefill_work(requests, reused, sampling)
        outputs = run_chunks(self.runner, work, chunk, cuts)
        take(requests, b"".join(output.tokens for output in outputs))

    def decode_work(
        self, requests: list[Generation], sampling: SamplingColumns | None = None, ahead: int = 0
    ) -> DecodeWork:
        """A step for a batch; `ahead`: how many tokens of each the host does not know yet, all carried."""
        positions = [len(r.prompt) + len(r.output) - 1 + ahead for r in requests]
        rows = int32_bytes(range(len(requests))) if ahead else b""
        self._ids += 1
        return DecodeWork(
            step_id=self._ids,
            version=0,
            requests=tuple(range(len(requests))),
            tokens=int32_bytes([0 if ahead else r.output[-1] for r in requests]),
            positions=int32_bytes(positions),
            context_tokens=sum(positions) + len(positions),
            sampling=sampling or columns(len(requests)),
            after_step=self._ids - 1 if ahead else 0,
            carried_rows=rows,
            carried_from=rows,
            **_table(requests),
        )

    def decode(self, requests: list[Generation], sampling: SamplingColumns | None = None) -> None:
        """One step for a batch."""
        take(requests, self.runner.decode(self.decode_work(requests, sampling)).tokens)

    def generate(
        self, prompts: list[list[int]], steps: int, cuts: Sequence[int] = (), chunk: int | None = None
    ) -> list[list[int]]:
        """Greedy outputs of `steps` tokens of a batch."""
        requests = [self.request(prompt, steps) for prompt in prompts]
        self.prefill(requests, cuts=cuts, chunk=chunk)
        for _ in range(steps - 1):
            self.decode(requests)
        return [request.output for request in requests]


def _table(requests: list[Generation]) -> dict[str, Any]:
    width = max(len(request.pages) for request in requests)
    rows = [request.pages + [0] * (width - len(request.pages)) for request in requests]
    return {"page_table": int32_bytes(np.array(rows)), "pages_per_row": width}


def run_chunks(
    runner: ModelRunner, work: PrefillWork, chunk: int | None = None, cuts: Sequence[int] = ()
) -> list[StepOutput]:
    """Run a prefill in chunks of a number of tokens, or whole, and give the output of each."""
    total = sum(work.new_tokens)
    outputs = []
    for start in range(0, total, chunk or total):
        tokens = range(start, min(start + (chunk or total), total))
        for first, last in itertools.pairwise([0, *cuts, runner.layers]):
            output = runner.prefill(work, tokens, range(first, last))
            assert last == runner.layers or output == StepOutput()
        outputs.append(output)
    return outputs


def take(requests: Sequence[Generation], tokens: bytes) -> None:
    """Append one token to the output of each request."""
    for request, token in zip(requests, int32_array(tokens), strict=True):
        request.output.append(int(token))


class RandomWeights:
    """Random tensors of a configuration, as a checkpoint."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.path = Path("random")
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn(_shape(name, config), generator=generator) * 0.2 + ("norm" in name)
            for name in tensor_names(config)
        }

    def stored_bytes(self, name: str) -> int:
        return self.tensors[name].numel() * 4

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def _shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    wide = {
        "q_proj": (config.query_width, config.hidden),
        "k_proj": (config.kv_width, config.hidden),
        "v_proj": (config.kv_width, config.hidden),
        "o_proj": (config.hidden, config.query_width),
        "gate_proj": (config.intermediate, config.hidden),
        "up_proj": (config.intermediate, config.hidden),
        "down_proj": (config.hidden, config.intermediate),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "embed_tokens": (config.vocabulary, config.hidden),
        "lm_head": (config.vocabulary, config.hidden),
    }
    shape = wide.get(name.split(".")[-2], (config.hidden,))
    return shape[:1] if name.endswith(".bias") else shape


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """A small configuration with unequal sizes everywhere, so that a mixed-up one fails."""
    fields: dict[str, Any] = {
        "architecture": architecture,
        "layers": 3,
        "hidden": 48,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate": 80,
        "vocabulary": 101,
        "rope_theta": 10000.0,
        "rms_epsilon": 1e-5,
        "tied_embeddings": False,
        "max_context_tokens": 512,
        "qkv_bias": architecture == "qwen2",
        "query_key_norm": architecture == "qwen3",
        "permuted_in_gguf": architecture in ("llama", "mistral"),
    }
    return ModelConfig(**fields | changes)


def tiny_runner(weights: Weights, pages: int = 64, operators: CpuOperators | None = None) -> ModelRunner:
    """A runner over given weights, on torch's operators in float32 unless others are given."""
    return ModelRunner(load_decoder(weights, operators or CpuOperators("float32")), pages)


def reference_state(weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors under transformers' names."""
    return {name: weights.tensor(name) for name in tensor_names(weights.config)}
