"""Which attention a card gets, by what is installed beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda import is_installed
from muxk.kernel.devices.cuda_facts import find_nvcc

pytestmark = pytest.mark.skipif(
    not (is_installed("torch") and is_installed("flashinfer")), reason="needs torch and flashinfer"
)

HOPPER = (9, 0)


def why_not(capability: tuple[int, int] = HOPPER, dim: int = 128) -> str | None:
    import torch
    from muxk.models.cuda_choice import why_not_flashinfer
    from muxk.models.cuda_kernels import AttentionShape
    from muxk.models.ops import Heads

    heads = Heads(queries=8, kv=2, dim=dim, epsilon=1e-6)
    return why_not_flashinfer(
        AttentionShape(heads, (None,), torch.bfloat16, torch.device("cpu"), 132), capability
    )


def test_flashinfer_attends_where_there_is_a_compiler_and_triton_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "nvcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == str(compiler)
    assert why_not() is None
    monkeypatch.setattr("muxk.models.cuda_choice.find_nvcc", lambda: None)
    assert why_not() == "FlashInfer compiles its kernels with nvcc, and none is here: install a CUDA toolkit"
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert why_not() is None


def test_a_model_or_a_card_that_flashinfer_has_no_kernels_for_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muxk.models.cuda_choice.find_nvcc", lambda: "nvcc")
    assert why_not(dim=80) == "the model's heads are of 80, FlashInfer's kernels of 64, 128, 256"
    assert why_not((7, 5)) == "the card's capability is 7.5, FlashInfer's fa2 needs 8.0"
