"""Block-quantised matrices hold exactly the weights that the gguf package dequantises."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from checkpoint_files import HALVES, random_blocks
from muxk.models.gguf_blocks import QuantisedMatrix, concat, quantised_matrix

Kind = gguf.GGMLQuantizationType
ROWS, COLUMNS = 7, 768


def matrix(name: str, seed: int = 0) -> QuantisedMatrix:
    found = quantised_matrix(random_blocks(Kind[name], ROWS, COLUMNS, seed), ROWS, Kind[name])
    assert found is not None
    return found


@pytest.mark.parametrize("name", HALVES)
def test_the_weights_are_bit_for_bit_those_of_the_gguf_package(name: str) -> None:
    raw, found = random_blocks(Kind[name], ROWS, COLUMNS), matrix(name)
    wanted = gguf.quants.dequantize(raw, Kind[name])
    assert found.shape == (ROWS, COLUMNS)
    assert found.scales.shape == (ROWS, COLUMNS // found.block)
    assert np.array_equal(found.dequantised().view(np.uint32), wanted.view(np.uint32))


def test_types_without_such_blocks_have_no_quantised_form() -> None:
    assert quantised_matrix(np.zeros((ROWS, 64), dtype=np.uint8), ROWS, Kind.F16) is None
    assert quantised_matrix(np.zeros((ROWS, 128), dtype=np.uint8), ROWS, Kind.F32) is None


@pytest.mark.parametrize(("first", "second"), [("Q4_K", "Q6_K"), ("Q8_0", "Q4_1"), ("Q4_0", "Q8_0")])
def test_rows_of_matrices_of_different_types_go_one_after_the_other(first: str, second: str) -> None:
    parts = [matrix(first, 1), matrix(second, 2)]
    wanted = np.concatenate([part.dequantised() for part in parts])
    assert np.array_equal(concat(parts).dequantised(), wanted)


def test_rows_can_be_chosen_and_reordered() -> None:
    whole = matrix("Q4_K")
    order = np.array([6, 0, 3])
    assert np.array_equal(whole.rows(order).dequantised(), whole.dequantised()[order])
    assert np.array_equal(whole.rows(slice(2, 4)).dequantised(), whole.dequantised()[2:4])
