"""Which kernels and which attention a device runs: FlashInfer and Triton where they can, torch elsewhere."""

from __future__ import annotations

import importlib.util
import os
import warnings

import numpy as np
import torch
from muxk.kernel.devices.cuda_facts import find_nvcc
from muxk.models.cuda_batch import tables_of, upload
from muxk.models.cuda_kernels import (
    AttentionKind,
    AttentionShape,
    Kernels,
    TorchAttentionKind,
    TorchKernels,
    empty_kv_layer,
)
from muxk.models.errors import ModelError

FLASHINFER_DIMS = (64, 128, 256)
"""Head sizes that its fa2 kernels are made for."""
FLASHINFER_CAPABILITY = (8, 0)


def kernels_for(device: torch.device) -> Kernels:
    """Triton's kernels on a card that has Triton. ModelError where they would run on the CPU all the same."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return TorchKernels()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise ModelError("TRITON_INTERPRET is set, with which Triton's kernels run on the CPU: unset it")
    from muxk.models.triton_ops import TritonKernels

    return TritonKernels()


def attention_of(shape: AttentionShape) -> AttentionKind:
    """The fastest attention that a model can have on its device.

    FlashInfer is tried out, which compiles it where that has not been done: minutes. Where it fails, Triton's
    serves, with a warning that says why.
    """
    if shape.device.type != "cuda":
        return TorchAttentionKind(shape)
    if why_not_flashinfer(shape, torch.cuda.get_device_capability(shape.device)) is None:
        try:
            return tried(_flashinfer(shape))
        except Exception as error:  # of a compiler, a linker, a loader: anything
            warnings.warn(f"FlashInfer can not be used here, Triton attends: {error}", stacklevel=2)
    if importlib.util.find_spec("triton") is None:
        return TorchAttentionKind(shape)
    from muxk.models.triton_ops import TritonAttentionKind

    return TritonAttentionKind(shape)


def _flashinfer(shape: AttentionShape) -> AttentionKind:
    from muxk.models.flashinfer_ops import FlashInferKind

    return FlashInferKind(shape)


def tried(kind: AttentionKind) -> AttentionKind:
    """The kind, after it has attended for a few tokens in each window: a prompt's and a step's."""
    shape, heads = kind.shape, kind.shape.heads
    planner = kind.planner(shape.device_units)
    kv = empty_kv_layer(2, heads.kv, heads.dim, shape.dtype, shape.device)
    for tokens, reused in ((4, 0), (1, 4)):
        table = np.ones((1, 1), dtype=np.int32)
        batch = upload(tables_of(np.zeros(tokens, dtype=np.int32), (tokens,), (reused,), table), shape.device)
        queries = torch.zeros(tokens, heads.queries, heads.dim, dtype=shape.dtype, device=shape.device)
        attend = planner.plan(batch)
        for window in shape.windows:
            attend(queries, kv, window, torch.zeros_like(queries))
    if shape.device.type == "cuda":
        torch.cuda.synchronize(shape.device)
    return kind


def why_not_flashinfer(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """What keeps FlashInfer from attending for a model on a card, None where nothing does.

    MUXK_FLASHINFER=0 in the environment does.
    """
    if os.environ.get("MUXK_FLASHINFER") == "0":
        return "MUXK_FLASHINFER=0 is set"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'muxk[cuda]'"
    if shape.heads.dim not in FLASHINFER_DIMS:
        supported = ", ".join(map(str, FLASHINFER_DIMS))
        return f"the model's heads are of {shape.heads.dim}, FlashInfer's kernels of {supported}"
    if capability < FLASHINFER_CAPABILITY:
        return f"the card's capability is {capability[0]}.{capability[1]}, FlashInfer's fa2 needs 8.0"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"{shape.dtype} is not a type of FlashInfer's fa2"
    if find_nvcc() is None and "FLASHINFER_DISABLE_JIT" not in os.environ:  # which says: they are compiled
        return "FlashInfer compiles its kernels with nvcc, and none is here: install a CUDA toolkit"
    return None
