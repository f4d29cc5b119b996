"""Products with weights in blocks of small integers, as a GGUF file holds them, in C.

Weights lie in panels of PANEL outputs, so that a vector holds one input's weights of several outputs and
activations stay in float32. Integers of 4 bits stay 4 bits; scales stay float16 where that is exact. A decode
step reads every weight once and is bound by memory: SmolLM2's Q4_1 file becomes 96 MB, as fp16 it is 270.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np
import torch
from muxk.models.gguf_blocks import QuantisedMatrix
from muxk.models.native_library import BYTES, NIBBLES, PANEL, SIGNED_NIBBLES, Matrix, NativeLibrary
from numpy.typing import NDArray
from torch import Tensor

NIBBLES_OF_WORD = 8
FORMATS = ((NIBBLES, 0, 15), (SIGNED_NIBBLES, -8, 7), (BYTES, -128, 127))
"""How the values of a matrix may be held, with the lowest and the highest; the first that fits is taken."""


class BlockLinear:
    """`x @ weight.T + bias`; a row's result does not depend on the rows it is computed with."""

    def __init__(self, library: NativeLibrary, matrix: QuantisedMatrix, bias: Tensor | None) -> None:
        self._library = library
        self._outputs, self._inputs = matrix.shape
        self._panels = pack_panels(matrix)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        assert self._bias is None or self._bias.shape == (self._outputs,), self._bias.shape
        self.matrix = _described(matrix, self._panels, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        assert x.shape == (rows, self._inputs), (x.shape, self._inputs)
        assert x.dtype == torch.float32, x.dtype
        x, out = x.contiguous(), torch.empty(rows, self._outputs)
        functions = self._library.for_work(rows * self._inputs * self._outputs)
        functions.product(byref(self.matrix), x.data_ptr(), out.data_ptr(), rows, torch.get_num_threads())
        return out


class BlockEmbedding:
    """Rows of a table, dequantised when they are read."""

    def __init__(self, matrix: QuantisedMatrix) -> None:
        self._values = torch.from_numpy(matrix.values)
        self._scales = torch.from_numpy(matrix.scales)
        self._offsets = None if matrix.offsets is None else torch.from_numpy(matrix.offsets)

    def __call__(self, tokens: Tensor) -> Tensor:
        scales = self._scales.index_select(0, tokens)
        rows = self._values.index_select(0, tokens).float().view(*scales.shape, -1)
        rows.mul_(scales.unsqueeze(-1))
        if self._offsets is not None:
            rows.add_(self._offsets.index_select(0, tokens).unsqueeze(-1))
        return rows.view(len(tokens), -1)


def takes(matrix: QuantisedMatrix) -> bool:
    """Whether the C code can work on blocks of this size."""
    return matrix.block in (16, 32) and matrix.shape[1] % matrix.block == 0


def pack_panels(matrix: QuantisedMatrix) -> NDArray[np.uint8]:
    """uint8[panels, blocks, bytes]: for each block of a panel its scales, offsets and values."""
    factors = _factors(matrix)
    values = _padded(matrix.values).reshape(-1, PANEL, matrix.scales.shape[1], matrix.block)
    if _format(matrix.values) == BYTES:
        packed = values.transpose(0, 2, 3, 1)
    else:
        packed = _words(values).transpose(0, 2, 3, 1)
    parts = [_padded(part).reshape(-1, PANEL, part.shape[1]).transpose(0, 2, 1) for part in factors]
    return np.concatenate([_flat_bytes(part) for part in (*parts, packed)], axis=2)


def _factors(matrix: QuantisedMatrix) -> Sequence[NDArray[np.floating]]:
    """Scales and offsets, in float16 if none of them changes by it."""
    parts = [matrix.scales] if matrix.offsets is None else [matrix.scales, matrix.offsets]
    with np.errstate(over="ignore"):
        halves = [part.astype(np.float16) for part in parts]
    exact = all(np.array_equal(half, part) for half, part in zip(halves, parts, strict=True))
    return halves if exact else parts


def _format(values: NDArray[np.int8]) -> int:
    lowest, highest = int(values.min()), int(values.max())
    return next(name for name, least, most in FORMATS if least <= lowest and highest <= most)


def _padded(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    """With rows of zeros, up to whole panels."""
    added = -len(rows) % PANEL
    return np.pad(rows, ((0, added), (0, 0))) if added else rows


def _words(values: NDArray[np.generic]) -> NDArray[np.uint32]:
    """Eight values in a word, the first one lowest: uint32[panels, PANEL, blocks, block / 8]."""
    nibbles = values.view(np.uint8) & np.uint8(15)
    pairs = nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(pairs).view("<u4")


def _flat_bytes(part: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes of each [panel, block]."""
    whole = np.ascontiguousarray(part)
    return whole.reshape(*whole.shape[:2], -1).view(np.uint8)


def _described(matrix: QuantisedMatrix, panels: NDArray[np.uint8], bias: Tensor | None) -> Matrix:
    return Matrix(
        outputs=matrix.shape[0],
        inputs=matrix.shape[1],
        block=matrix.block,
        format=_format(matrix.values),
        half=_factors(matrix)[0].dtype == np.float16,
        offsets=matrix.offsets is not None,
        block_bytes=panels.shape[2],
        panel_bytes=panels.shape[1] * panels.shape[2],
        panels=panels.ctypes.data,
        bias=None if bias is None else bias.data_ptr(),
    )
