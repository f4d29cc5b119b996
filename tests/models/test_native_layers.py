"""Layers in one native call compute what their single operators do, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_driver import Driver, RandomWeights, tiny_config, tiny_runner
from muxk.models.fused_attention import FusedAttention
from muxk.models.gguf_blocks import QuantisedMatrix
from muxk.models.native_layers import NativeLayers
from muxk.models.native_library import NativeLibrary, load_native
from muxk.models.native_ops import NativeOperators
from muxk.models.ops import DecoderLayer, LayerStack, Linear
from muxk.models.runner import ModelRunner
from torch import Tensor

LIBRARY = load_native()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="native operators are not built")


class Quantising(NativeOperators):
    """Makes blocks of every weight, and knows whether layers ran in one call."""

    def __init__(self, library: NativeLibrary, stacked: bool) -> None:
        super().__init__(library)
        self._stacked = stacked
        self.calls: list[range] = []

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        blocks = weight.numpy().reshape(len(weight), -1, 16)
        scales = (np.abs(blocks).max(axis=2) / 127).astype(np.float32)
        values = np.rint(blocks / scales[..., None]).astype(np.int8).reshape(weight.shape)
        linear = self.quantised_linear(QuantisedMatrix(values, scales, None, 16), bias)
        assert linear is not None
        return linear

    def layer_stack(self, layers: tuple[DecoderLayer, ...], epsilon: float) -> LayerStack | None:  # type: ignore[override]
        stack = super().layer_stack(layers, epsilon)
        assert isinstance(stack, NativeLayers)

        def counted(run: range, *arguments: object) -> Tensor | None:
            self.calls.append(run)
            done = stack(run, *arguments)  # type: ignore[arg-type]
            assert done is not None
            return done

        return counted if self._stacked else None


@pytest.fixture(params=["llama", "qwen2", "qwen3", "mistral"])
def runners(request: pytest.FixtureRequest) -> tuple[ModelRunner, ModelRunner]:
    """The same model with layers in one call, and operator by operator."""
    assert LIBRARY is not None
    window = {"windows": (None, 20, 20)} if request.param == "mistral" else {}
    config = tiny_config(request.param, hidden=64, layers=3, heads=4, head_dim=16, **window)
    weights = RandomWeights(config)
    one, many = (tiny_runner(weights, operators=Quantising(LIBRARY, stacked)) for stacked in (True, False))
    return one, many


@pytest.mark.parametrize("threads", [1, 2])
def test_prefill_and_decode_give_the_same_tokens_and_pools(
    runners: tuple[ModelRunner, ModelRunner], threads: int
) -> None:
    torch.set_num_threads(threads)
    prompts = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (1, 70, 500)]
    one, many = (Driver(runner).generate(prompts, steps=6, cuts=[1, 2]) for runner in runners)
    assert one == many
    for fast, slow in zip(runners[0].kv, runners[1].kv, strict=True):
        assert torch.equal(fast.keys, slow.keys)
        assert torch.equal(fast.values, slow.values)
    operators = runners[0].decoder.operators
    assert isinstance(operators, Quantising)
    assert operators.calls[:3] == [range(1), range(1, 2), range(2, 3)]
    assert operators.calls[3:] == [range(3)] * 5


def test_a_fused_step_gives_the_bits_of_its_parts(runners: tuple[ModelRunner, ModelRunner]) -> None:
    outputs = []
    for runner in runners:
        decoder, hidden = runner.decoder, torch.randn(13, 64, generator=torch.Generator().manual_seed(0))
        table, positions = np.array([[1, 2], [3, 4]], dtype=np.int32), np.array([3, 30], dtype=np.int32)
        decode = decoder.operators.decode_attention(
            table, positions, decoder.heads, decoder.rotation(torch.from_numpy(positions).long())
        )
        prefill = decoder.operators.prefill_attention(
            np.array([[5]], dtype=np.int32), (11,), (2,), decoder.heads, decoder.rotation(torch.arange(2, 13))
        )
        fused = FusedAttention(2, decode, prefill)
        outputs.append(decoder.layers(range(3), hidden, (fused,) * 3, runner.kv))
    assert torch.equal(*outputs)
