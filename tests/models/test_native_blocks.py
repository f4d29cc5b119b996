"""Products with weights in blocks are exact, and each row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muxk.models.cpu_ops import CpuOperators
from muxk.models.errors import ModelError
from muxk.models.gguf_blocks import Block, QuantisedMatrix
from muxk.models.load import cpu_operators
from muxk.models.native_library import BYTES, NIBBLES, SIGNED_NIBBLES, load_native
from muxk.models.native_ops import NativeOperators
from torch import Tensor

LIBRARY = load_native()
needs_native = pytest.mark.skipif(LIBRARY is None, reason="native operators are not built")
RANGES = {BYTES: (-128, 128), NIBBLES: (0, 16), SIGNED_NIBBLES: (-8, 8)}
SHAPES = [(1, 1), (31, 5), (70, 3), (96, 20)]
"""Outputs, and blocks of inputs: parts of panels, and more inputs than are unpacked at once."""


def random_matrix(
    outputs: int, blocks: int, block: Block, format: int, offsets: bool, half: bool
) -> QuantisedMatrix:
    generator = np.random.default_rng(outputs + blocks)
    values = generator.integers(*RANGES[format], (outputs, blocks * block)).astype(np.int8)
    values[0, :2] = RANGES[format][0], RANGES[format][1] - 1
    kind = np.float16 if half else np.float32
    factors = generator.standard_normal((2, outputs, blocks)).astype(kind).astype(np.float32)
    return QuantisedMatrix(values, factors[0], factors[1] if offsets else None, block)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def native() -> NativeOperators:
    assert LIBRARY is not None
    return NativeOperators(LIBRARY)


@needs_native
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("format", RANGES)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_product_of_blocks_equals_that_in_float64_and_a_row_has_its_bits_in_any_batch(
    native: NativeOperators, block: Block, format: int, offsets: bool, half: bool
) -> None:
    for outputs, blocks in SHAPES:
        matrix = random_matrix(outputs, blocks, block, format, offsets, half)
        bias = random(outputs, seed=3) if offsets else None
        x = random(40, blocks * block)
        product = native.quantised_linear(matrix, bias)
        assert product is not None
        weight = torch.from_numpy(matrix.dequantised()).double()
        found, wanted = product(x), x.double() @ weight.T
        if bias is not None:
            wanted += bias
        size = (x.abs().double() @ weight.abs().T).max()
        assert (found - wanted).abs().max() < 1e-6 * size
        for rows in range(1, 40):
            assert torch.equal(product(x[:rows].contiguous()), found[:rows]), rows
        assert torch.equal(product(x[37:38]), found[37:38])


@needs_native
def test_two_threads_give_the_bits_of_one_and_many_rows_those_of_few(native: NativeOperators) -> None:
    product = native.quantised_linear(random_matrix(1000, 18, 32, NIBBLES, True, True), None)
    assert product is not None
    x = random(250, 576)
    alone = product(x)
    torch.set_num_threads(2)
    assert torch.equal(product(x), alone)
    assert torch.equal(product(x[200:205].contiguous()), alone[200:205])


@needs_native
def test_weights_are_held_in_as_few_bytes_as_are_exact(native: NativeOperators) -> None:
    for format, half, wanted in ((NIBBLES, True, 20), (SIGNED_NIBBLES, False, 24), (BYTES, True, 36)):
        product = native.quantised_linear(random_matrix(32, 2, 32, format, True, half), None)
        assert product.matrix.block_bytes == 32 * wanted  # type: ignore[union-attr]


@needs_native
@pytest.mark.parametrize("offsets", [False, True])
def test_a_table_of_blocks_gives_the_rows_of_the_file(native: NativeOperators, offsets: bool) -> None:
    matrix = random_matrix(50, 4, 32, BYTES, offsets, half=True)
    embedding = native.quantised_embedding(matrix)
    assert embedding is not None
    tokens = torch.tensor([3, 49, 0, 3])
    assert torch.equal(embedding(tokens), torch.from_numpy(matrix.dequantised())[tokens])


@needs_native
def test_blocks_need_no_padding_unless_some_product_is_not_of_blocks(native: NativeOperators) -> None:
    assert native.quantised_linear(random_matrix(32, 2, 32, BYTES, False, True), None) is not None
    assert native.padding(1) == 0
    native.linear(random(32, 64), None)
    assert native.padding(1) == CpuOperators("auto").padding(1)


@needs_native
def test_blocks_are_left_alone_where_another_type_was_asked_for() -> None:
    matrix = random_matrix(32, 2, 32, NIBBLES, True, True)
    for dtype in ("float32", "fp16"):
        operators = cpu_operators(dtype, head_dim=64, native=True)
        assert operators.dtype == dtype
        assert operators.quantised_linear(matrix, None) is None
        assert operators.quantised_embedding(matrix) is None
    assert cpu_operators("blocks", head_dim=64, native=True).dtype == "blocks"


def test_torch_takes_no_blocks_and_says_so_when_they_are_asked_for() -> None:
    matrix = random_matrix(32, 2, 32, NIBBLES, True, True)
    assert cpu_operators("auto", head_dim=64, native=False).quantised_linear(matrix, None) is None
    with pytest.raises(ModelError, match="needs the native operators"):
        cpu_operators("blocks", head_dim=64, native=False)
