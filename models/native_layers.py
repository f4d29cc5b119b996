"""Several layers of a decoder in one call of the C code, where all their products are of blocks.

Takes the interpreter out of a step, and keeps a team of threads together through all of it: a decode step's
operators are too small for waking a team for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int64, c_void_p, pointer

import torch
from muxk.models.native_attention import NativeAttention
from muxk.models.native_blocks import BlockLinear
from muxk.models.native_library import Batch, LayerWeights, NativeLibrary, Stack, address
from muxk.models.ops import Attention, DecoderLayer, KvLayer
from torch import Tensor

MLP_ROWS = 480
"""Rows whose gate and up values exist at once, as in the C source."""
TEAM_WORK = 1_500_000
"""Multiply-adds of a call that are worth waking other threads for."""


class NativeLayers:
    """Layers of one model; several threads may call at once."""

    def __init__(self, library: NativeLibrary, layers: Sequence[DecoderLayer], epsilon: float) -> None:
        assert all_of_blocks(layers)
        self._library = library
        self._layers = tuple(layers)
        self._epsilon = epsilon
        self._weights = (LayerWeights * len(layers))(*(_weights(layer) for layer in layers))
        first = _Sizes(layers[0])
        self._scratch_of_row = 2 * first.width + first.qkv + first.attended
        self._scratch_of_mlp = 3 * first.inner
        self._first = first

    def __call__(
        self, layers: range, hidden: Tensor, attentions: Sequence[Attention], kv: Sequence[KvLayer]
    ) -> Tensor | None:
        """Run some layers over float32[rows, width], in place. None where it cannot: nothing was done then.

        `attentions` and `kv` are those of these layers only.
        """
        batches = _batches(attentions, hidden.shape[0])
        if batches is None or not layers:
            return None
        count, parts, rows = len(layers), len(batches) // len(layers), hidden.shape[0]
        assert len(kv) == count == len(attentions), (len(kv), count, len(attentions))
        work = rows * count * self._first.multiply_adds
        call = Stack(
            layers=count,
            parts=parts,
            rows=rows,
            width=hidden.shape[1],
            threads=torch.get_num_threads() if work >= TEAM_WORK else 1,
            epsilon=self._epsilon,
            weights=ctypes.addressof(self._weights[layers.start]),
            hidden=address(hidden),
        )
        # The struct holds addresses only; these are what they point to.
        kept = (*_pointers(call, batches, kv), self._use_scratch(call, rows))
        self._library.for_work(work).layers(byref(call))
        del kept
        return hidden

    def _use_scratch(self, call: Stack, rows: int) -> Tensor:
        first, mlp_rows = self._first, min(rows, MLP_ROWS)
        scratch = torch.empty(rows * self._scratch_of_row + mlp_rows * self._scratch_of_mlp)
        sizes = {
            "normed": rows * first.width,
            "added": rows * first.width,
            "qkv": rows * first.qkv,
            "attended": rows * first.attended,
            "gate_up": mlp_rows * 2 * first.inner,
            "inner": mlp_rows * first.inner,
        }
        place = scratch.data_ptr()
        for name, size in sizes.items():
            setattr(call, name, place)
            place += 4 * size
        return scratch


def all_of_blocks(layers: Sequence[DecoderLayer]) -> bool:
    """Whether `NativeLayers` can run such layers."""
    products = [
        product for layer in layers for product in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    return bool(products) and all(isinstance(product, BlockLinear) for product in products)


class _Sizes:
    """The sizes of a layer, all layers' being the same."""

    def __init__(self, layer: DecoderLayer) -> None:
        products = (layer.qkv, layer.output, layer.gate_up, layer.down)
        qkv, output, gate_up, down = (product.matrix for product in products)  # type: ignore[attr-defined]
        self.width = int(qkv.inputs)
        self.qkv = int(qkv.outputs)
        self.attended = int(output.inputs)
        self.inner = int(down.inputs)
        assert gate_up.outputs == 2 * self.inner, (gate_up.outputs, self.inner)
        assert output.outputs == down.outputs == gate_up.inputs == self.width
        self.multiply_adds = sum(int(m.inputs * m.outputs) for m in (qkv, output, gate_up, down))


def _weights(layer: DecoderLayer) -> LayerWeights:
    norms = layer.head_norms
    return LayerWeights(
        input_norm=address(layer.input_norm),
        query_norm=None if norms is None else address(norms.queries),
        key_norm=None if norms is None else address(norms.keys),
        mlp_norm=address(layer.mlp_norm),
        qkv=pointer(layer.qkv.matrix),  # type: ignore[attr-defined]
        output=pointer(layer.output.matrix),  # type: ignore[attr-defined]
        gate_up=pointer(layer.gate_up.matrix),  # type: ignore[attr-defined]
        down=pointer(layer.down.matrix),  # type: ignore[attr-defined]
    )


def _batches(attentions: Sequence[Attention], rows: int) -> list[Batch] | None:
    """The batches of all parts of all attentions; None if one is not native or rows are padded."""
    found: list[Batch] = []
    for attention in attentions:
        parts: tuple[Attention, ...] = getattr(attention, "parts", (attention,))
        batches = [part.batch for part in parts if isinstance(part, NativeAttention)]
        if len(batches) < len(parts) or sum(batch.tokens for batch in batches) != rows:
            return None
        found += batches
    return found if found and len(found) % len(attentions) == 0 else None


def _pointers(call: Stack, batches: Sequence[Batch], kv: Sequence[KvLayer]) -> tuple[ctypes.Array, ...]:  # type: ignore[type-arg]
    count = len(kv)
    keys = (c_void_p * count)(*(layer.keys.data_ptr() for layer in kv))
    values = (c_void_p * count)(*(layer.values.data_ptr() for layer in kv))
    lists = (POINTER(Batch) * len(batches))(*(pointer(batch) for batch in batches))
    taken = (c_int64 * count)()
    for name, array in (("keys", keys), ("values", values), ("batches", lists), ("taken", taken)):
        setattr(call, name, ctypes.addressof(array))
    return keys, values, lists, taken
