"""Matrices as block-quantised files hold them: small integers, with a scale and an offset for each block.

A weight is `value * scale + offset`. Computed in float32 that is bit for bit what the `gguf` package's
dequantise gives, because the parts are the ones it multiplies and adds. Layouts: ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Kind = gguf.GGMLQuantizationType
Block = Literal[16, 32]

IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
"""What the 16 codes of IQ4_NL stand for (`kvalues_iq4nl` in ggml)."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A weight of a linear layer: `values * scales + offsets`, scales and offsets repeated over a block."""

    values: NDArray[np.int8]
    """int8[rows, columns]."""
    scales: Float32
    """float32[rows, columns / block]."""
    offsets: Float32 | None
    """float32[rows, columns / block], None where all are 0."""
    block: Block

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    def rows(self, index: slice | NDArray[np.integer]) -> QuantisedMatrix:
        """Some of the rows, or all in another order."""
        return QuantisedMatrix(
            values=np.ascontiguousarray(self.values[index]),
            scales=np.ascontiguousarray(self.scales[index]),
            offsets=None if self.offsets is None else np.ascontiguousarray(self.offsets[index]),
            block=self.block,
        )

    def dequantised(self) -> Float32:
        """float32[rows, columns]."""
        blocks = self.values.reshape(*self.scales.shape, self.block).astype(np.float32)
        blocks *= self.scales[..., None]
        if self.offsets is not None:
            blocks += self.offsets[..., None]
        return blocks.reshape(self.shape)


def concat(matrices: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """The rows of one after those of the other. Different blocks become the smaller one, which is exact."""
    if len(matrices) == 1:
        return matrices[0]
    block = min(matrix.block for matrix in matrices)
    parts = [_in_blocks(matrix, block) for matrix in matrices]
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = np.concatenate([_offsets(part) for part in parts])
    return QuantisedMatrix(
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        offsets=offsets,
        block=block,
    )


def quantised_matrix(raw: Bytes, rows: int, kind: Kind) -> QuantisedMatrix | None:
    """The matrix in a tensor's bytes; None for a type that is not made of such blocks (F32, F16, BF16)."""
    unpack = _UNPACK.get(kind)
    if unpack is None:
        return None
    values, scales, offsets = unpack(raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]))
    columns = values.size // rows
    return QuantisedMatrix(
        values=np.ascontiguousarray(values.reshape(rows, columns)),
        scales=np.ascontiguousarray(scales.reshape(rows, -1)),
        offsets=None if offsets is None else np.ascontiguousarray(offsets.reshape(rows, -1)),
        block=16 if values.size == 16 * scales.size else 32,
    )


def _in_blocks(matrix: QuantisedMatrix, block: Block) -> QuantisedMatrix:
    if matrix.block == block:
        return matrix
    times = matrix.block // block
    offsets = None if matrix.offsets is None else matrix.offsets.repeat(times, axis=1)
    return replace(matrix, scales=matrix.scales.repeat(times, axis=1), offsets=offsets, block=block)


def _offsets(matrix: QuantisedMatrix) -> Float32:
    return np.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets


Parts = tuple[NDArray[np.int8], Float32, Float32 | None]
"""Values, scales and offsets of all blocks; shapes only agree in the product of their sizes."""


def _fields(packed: Bytes, width: int, bits: int) -> Bytes:
    """Numbers of `bits` bits, of which the first `width` bytes hold the first `width`, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    groups = packed.reshape(len(packed), -1, 1, width)
    fields = (groups >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _half(raw: Bytes) -> Float32:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _less(values: Bytes, zero: int) -> NDArray[np.int8]:
    return values.view(np.int8) - np.int8(zero)


def _q4_0(raw: Bytes) -> Parts:
    return _less(_fields(raw[:, 2:], 16, 4), 8), _half(raw[:, :2]), None


def _q4_1(raw: Bytes) -> Parts:
    return _fields(raw[:, 4:], 16, 4).view(np.int8), _half(raw[:, :2]), _half(raw[:, 2:4])


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    return _fields(low, 16, 4) | (_fields(high, 1, 1) << np.uint8(4))


def _q5_0(raw: Bytes) -> Parts:
    return _less(_five_bits(raw[:, 2:6], raw[:, 6:]), 16), _half(raw[:, :2]), None


def _q5_1(raw: Bytes) -> Parts:
    return _five_bits(raw[:, 4:8], raw[:, 8:]).view(np.int8), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> Parts:
    return np.ascontiguousarray(raw[:, 2:]).view(np.int8), _half(raw[:, :2]), None


def _iq4_nl(raw: Bytes) -> Parts:
    return IQ4_NL_VALUES[_fields(raw[:, 2:], 16, 4)], _half(raw[:, :2]), None


def _q2_k(raw: Bytes) -> Parts:
    packed, values = raw[:, :16], _fields(raw[:, 16:80], 32, 2)
    scales = _half(raw[:, 80:82]) * (packed & np.uint8(15)).astype(np.float32)
    offsets = -_half(raw[:, 82:84]) * (packed >> np.uint8(4)).astype(np.float32)
    return values.view(np.int8), scales, offsets


def _q3_k(raw: Bytes) -> Parts:
    """A set high bit means that 4 is not taken away."""
    values = _fields(raw[:, 32:96], 32, 2) | (_fields(raw[:, :32], 32, 1) << np.uint8(2))
    packed = _fields(raw[:, 96:104], 8, 4) | (_fields(raw[:, 104:108], 4, 2) << np.uint8(4))
    return _less(values, 4), _half(raw[:, 108:110]) * _less(packed, 32).astype(np.float32), None


def _scales_of_q4_k(raw: Bytes) -> tuple[Float32, Float32]:
    """Six-bit scales and minima: four low ones of each, then nibbles whose high bits lie above those."""
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    nibbles, high = _fields(third, 4, 4), np.uint8(0x30)
    scales = np.concatenate([first & np.uint8(63), nibbles[:, :4] | ((first >> 2) & high)], axis=1)
    minima = np.concatenate([second & np.uint8(63), nibbles[:, 4:] | ((second >> 2) & high)], axis=1)
    return _half(raw[:, :2]) * scales.astype(np.float32), -_half(raw[:, 2:4]) * minima.astype(np.float32)


def _q4_k(raw: Bytes) -> Parts:
    return _fields(raw[:, 16:], 32, 4).view(np.int8), *_scales_of_q4_k(raw)


def _q5_k(raw: Bytes) -> Parts:
    values = _fields(raw[:, 48:], 32, 4) | (_fields(raw[:, 16:48], 32, 1) << np.uint8(4))
    return values.view(np.int8), *_scales_of_q4_k(raw)


def _q6_k(raw: Bytes) -> Parts:
    values = _fields(raw[:, :128], 64, 4) | (_fields(raw[:, 128:192], 32, 2) << np.uint8(4))
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return _less(values, 32), _half(raw[:, 208:210]) * scales.astype(np.float32), None


_UNPACK: Mapping[Kind, Callable[[Bytes], Parts]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.IQ4_NL: _iq4_nl,
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
