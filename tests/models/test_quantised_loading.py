"""Matrices reach the operators as the file holds them, in the order of rows that a decoder wants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import write_gguf
from model_driver import Driver, RandomWeights, tiny_config, tiny_runner
from muxk.models.cpu_ops import CpuOperators, Float32Linear, TableEmbedding
from muxk.models.gguf_blocks import QuantisedMatrix
from muxk.models.llama import load_decoder, tensor_names
from muxk.models.load import load_runner, open_weights
from muxk.models.native_library import load_native
from muxk.models.ops import Embedding, Linear
from muxk.models.runner import ModelRunner, logits_for
from muxk.models.weights import Weights
from torch import Tensor
from transformers_reference import reference_model

TOKENS = np.random.default_rng(3).integers(0, 101, 40).tolist()


class BlockOperators(CpuOperators):
    """Computes a quantised product from the weights that it was given, in float32."""

    def __init__(self, dtype: str, taken: bool) -> None:
        super().__init__("float32")
        self.dtype = dtype
        self.shapes: list[tuple[int, int]] = []
        self.tables = 0
        self._taken = taken

    def quantised_linear(self, matrix: QuantisedMatrix, bias: Tensor | None) -> Linear | None:
        self.shapes.append(matrix.shape)
        return Float32Linear(torch.from_numpy(matrix.dequantised()), bias) if self._taken else None

    def quantised_embedding(self, matrix: QuantisedMatrix) -> Embedding | None:
        self.tables += 1
        return TableEmbedding(torch.from_numpy(matrix.dequantised())) if self._taken else None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Float32Linear(weight, bias)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """All matrices but `down`, whose rows are too short, in Q4_K."""
    tied = request.param == "llama"
    config = tiny_config(request.param, hidden=256, head_dim=64, heads=4, layers=2, tied_embeddings=tied)
    path = tmp_path_factory.mktemp("quantised") / "tiny.gguf"
    return open_weights(str(write_gguf(path, RandomWeights(config), "Q4_K")))


def run(weights: Weights, operators: BlockOperators) -> Tensor:
    return logits_for(ModelRunner(load_decoder(weights, operators), 10), TOKENS)


def test_products_of_blocks_are_those_of_the_dequantised_weights(weights: Weights) -> None:
    operators = BlockOperators("blocks", taken=True)
    found = run(weights, operators)
    assert torch.equal(found, run(weights, BlockOperators("blocks", taken=False)))
    config = weights.config
    qkv = (config.query_width + 2 * config.kv_width, config.hidden)
    wanted = [qkv, (config.hidden, config.query_width), (2 * config.intermediate, config.hidden)] * 2
    assert operators.tables == 1
    assert sorted(operators.shapes) == sorted([*wanted, (config.vocabulary, config.hidden)])


@pytest.mark.parametrize("dtype", ["float32", "fp16"])
def test_another_type_that_was_asked_for_is_not_computed_from_blocks(weights: Weights, dtype: str) -> None:
    operators = BlockOperators(dtype, taken=True)
    run(weights, operators)
    assert operators.shapes == []
    assert operators.tables == 0


def test_progress_reaches_the_end_once_whatever_is_read_as_blocks(weights: Weights) -> None:
    steps: list[tuple[int, int, str]] = []
    load_decoder(weights, BlockOperators("blocks", taken=True), lambda *step: steps.append(step))
    total = sum(weights.stored_bytes(name) for name in tensor_names(weights.config))
    assert steps[-1][:2] == (total, total)
    assert max(done for done, _, _ in steps) == total


def test_models_that_are_not_in_blocks_load_as_before() -> None:
    weights = RandomWeights(tiny_config())
    operators = BlockOperators("blocks", taken=True)
    outputs = Driver(ModelRunner(load_decoder(weights, operators), 10)).generate([TOKENS], 4)
    assert outputs == Driver(tiny_runner(weights)).generate([TOKENS], 4)
    assert operators.shapes == []


@pytest.mark.skipif(load_native() is None, reason="native operators are not built")
@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_1"), ("qwen2", "Q5_0"), ("qwen3", "Q8_0")])
def test_a_quantised_file_says_what_transformers_says_of_its_dequantised_weights(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    config = tiny_config(architecture, hidden=64, head_dim=16, heads=4, intermediate=96, tied_embeddings=True)
    path = str(write_gguf(tmp_path / "tiny.gguf", RandomWeights(config), kind))
    runner = load_runner(path, 10)
    assert (runner.operators_name, runner.decoder.operators.dtype) == ("native", "blocks")
    with torch.inference_mode():
        wanted = reference_model(open_weights(path))(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_for(runner, TOKENS), wanted, rtol=2e-4, atol=2e-4)
