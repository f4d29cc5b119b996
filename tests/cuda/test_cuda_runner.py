"""The runner of cards, run on torch's CPU device: the tokens of the CPU's runner, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_driver import Driver, RandomWeights, tiny_config, tiny_runner
from muxk.kernel.cuda_runner import CudaRunner
from muxk.kernel.work import DecodeWork, Phase, PrefillWork, StepOutput
from muxk.models.cuda_kernels import AttentionShape, TorchAttentionKind, TorchKernels, distinct_windows
from muxk.models.cuda_layers import CudaOperators
from muxk.models.cuda_runner import CudaModelRunner
from muxk.models.llama import load_decoder
from muxk.models.weights import Weights

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (5, 16, 40, 90)]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def cuda_runner(weights: Weights, pages: int = 200, chunk: int = 256) -> CudaModelRunner:
    device = torch.device("cpu")
    decoder = load_decoder(weights, CudaOperators(TorchKernels(), torch.float32, device))
    windows = distinct_windows([decoder.window(index) for index in range(decoder.config.layers)])
    shape = AttentionShape(decoder.heads, windows, torch.float32, device, device_units=8)
    return CudaModelRunner(decoder, TorchAttentionKind(shape), pages, chunk, rows_max=8)


class OneLane:
    """A `Runner` as drivers want it, over two lanes of a card's runner."""

    def __init__(self, runner: CudaModelRunner) -> None:
        self.cuda: CudaRunner = runner
        self.decode_lane = self.cuda.open_lane(Phase.DECODE, 2)
        self.prefill_lane = self.cuda.open_lane(Phase.PREFILL, 6)
        self.layers, self.pages = runner.layers, runner.pages

    def prefill(self, work: PrefillWork, tokens: range, layers: range) -> StepOutput:
        return self.cuda.prefill(self.prefill_lane, work, tokens, layers, item_id=1).read()

    def decode(self, work: DecodeWork) -> StepOutput:
        return self.cuda.decode(self.decode_lane, work, item_id=1).read()

    def fused(self, decode: DecodeWork, work: PrefillWork, tokens: range) -> tuple[StepOutput, StepOutput]:
        decoded, prefilled = self.cuda.fused(self.prefill_lane, decode, work, tokens, item_id=1)
        return decoded.read(), prefilled.read()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 37])
def test_every_family_gives_the_tokens_of_the_cpu(family: str, chunk: int | None) -> None:
    window = {"windows": (None, 24, None)} if family in ("mistral", "qwen2") else {}
    weights = RandomWeights(tiny_config(family, **window))
    wanted = Driver(tiny_runner(weights, 200)).generate(PROMPTS, 6)
    runner = OneLane(cuda_runner(weights))
    assert Driver(runner).generate(PROMPTS, 6, cuts=[1, 2], chunk=chunk) == wanted
