"""Which kernels and which attention a device runs: FlashInfer and Triton where they can, torch elsewhere."""

from __future__ import annotations

import importlib.util
import os

import torch
from muxk.kernel.devices.cuda_facts import find_nvcc
from muxk.models.cuda_kernels import (
    AttentionKind,
    AttentionShape,
    Kernels,
    TorchAttentionKind,
    TorchKernels,
)

FLASHINFER_DIMS = (64, 128, 256)
"""Head sizes that its fa2 kernels are made for."""
FLASHINFER_CAPABILITY = (8, 0)


def kernels_for(device: torch.device) -> Kernels:
    """Triton's kernels on a card that has Triton."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return TorchKernels()
    from muxk.models.triton_ops import TritonKernels

    return TritonKernels()


def attention_of(shape: AttentionShape) -> AttentionKind:
    """The fastest attention that a model can have on its device."""
    if shape.device.type != "cuda":
        return TorchAttentionKind(shape)
    if why_not_flashinfer(shape, torch.cuda.get_device_capability(shape.device)) is None:
        from muxk.models.flashinfer_ops import FlashInferKind

        return FlashInferKind(shape)
    if importlib.util.find_spec("triton") is None:
        return TorchAttentionKind(shape)
    from muxk.models.triton_ops import TritonAttentionKind

    return TritonAttentionKind(shape)


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
