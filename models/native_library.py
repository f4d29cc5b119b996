"""The built `native_operators.c`: where it lies, and its functions and structs as ctypes sees them.

Built by an install where there is a C compiler, or by `python -m muxk.models.native_build`. It links the
OpenMP library by the name under which torch has loaded its own, so torch must be imported first.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch as torch

VERSION = 4
"""Of functions and structs; a library built from another version is not used."""
SOURCE = Path(__file__).with_name("native_operators.c")
BUILT = Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
MAX_HEAD_DIM = 256
TILE_ROWS = 24
"""Query rows of one tile, as in the C source."""
HEAD_DIM_MULTIPLE = 8
PANEL = 32
"""Outputs of a matrix whose weights lie together."""
BYTES, NIBBLES, SIGNED_NIBBLES = range(3)
"""How the values of a `Matrix` are held."""
SMALL_WORK = 500_000
"""Multiply-adds (about 50 us) up to which a call keeps the interpreter."""


class Batch(Structure):
    """`Batch` of the C source: one call's tokens, read by every layer."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "padded_tokens", "tiles", "pages_per_row")),
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "work", "window")),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("owners", "positions", "pages", "tiles_of", "rotation")),
    ]


class Layer(Structure):
    """`Layer` of the C source: what one layer adds to a batch."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "query_norm", "key_norm", "keys", "values", "out")),
        ("threads", c_int64),
    ]


class Matrix(Structure):
    """`Matrix` of the C source: a weight in blocks."""

    _fields_ = [
        *((name, c_int64) for name in ("outputs", "inputs", "block", "format", "half", "offsets")),
        *((name, c_int64) for name in ("block_bytes", "panel_bytes")),
        *((name, c_void_p) for name in ("panels", "bias")),
    ]


class LayerWeights(Structure):
    """`LayerWeights` of the C source: addresses of norms and of matrices."""

    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, POINTER(Matrix)) for name in ("qkv", "output", "gate_up", "down")),
    ]


class Stack(Structure):
    """`Stack` of the C source: one call of several layers."""

    _fields_ = [
        *((name, c_int64) for name in ("layers", "parts", "rows", "width", "threads")),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("weights", "keys", "values", "batches", "hidden", "normed", "added")),
        *((name, c_void_p) for name in ("qkv", "attended", "gate_up", "inner", "taken")),
    ]


@dataclass(frozen=True)
class Functions:
    """The functions of the library under one calling convention."""

    rms_norm: Callable[..., None]
    """x, added or None, weight, out, rows, width, threads, epsilon."""
    silu_mul: Callable[..., None]
    """gate_up, out, rows, width, threads."""
    attend: Callable[..., None]
    """Batch, Layer by reference."""
    product: Callable[..., None]
    """Matrix by reference, x, out, rows, threads."""
    layers: Callable[..., None]
    """Stack by reference."""


@dataclass(frozen=True)
class NativeLibrary:
    """The same functions twice: other threads run Python during `released`, not during `held`.

    Handing the interpreter over and waiting to get it back costs more than a small operator.
    """

    held: Functions
    released: Functions

    def for_work(self, multiply_adds: int) -> Functions:
        """The functions under the convention that costs less for so much work."""
        return self.held if multiply_adds < SMALL_WORK else self.released


def load_native(path: Path = BUILT) -> NativeLibrary | None:
    """The library, or None where it was not built, does not load or is of another version."""
    if not path.is_file():
        return None
    try:
        held, released = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        version = released.muxk_version
    except (OSError, AttributeError):
        return None
    version.restype = c_int64
    return NativeLibrary(_functions(held), _functions(released)) if version() == VERSION else None


def address(tensor: torch.Tensor) -> int:
    """Of a contiguous float32 tensor, which must outlive the use."""
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.dtype == torch.float32, tensor.dtype
    return tensor.data_ptr()


def _functions(library: ctypes.CDLL) -> Functions:
    sizes = (c_int64, c_int64, c_int64)
    return Functions(
        rms_norm=_typed(library.muxk_rms_norm, c_void_p, c_void_p, c_void_p, c_void_p, *sizes, c_float),
        silu_mul=_typed(library.muxk_silu_mul, c_void_p, c_void_p, *sizes),
        attend=_typed(library.muxk_attend, POINTER(Batch), POINTER(Layer)),
        product=_typed(library.muxk_product, POINTER(Matrix), c_void_p, c_void_p, c_int64, c_int64),
        layers=_typed(library.muxk_layers, POINTER(Stack)),
    )


def _typed(function: Any, *arguments: Any) -> Callable[..., None]:
    function.argtypes, function.restype = arguments, None
    return function  # type: ignore[no-any-return]
