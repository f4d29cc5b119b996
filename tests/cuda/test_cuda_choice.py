"""A device gets the attention that it can run, and is told what keeps it from the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from muxk.models.cuda_choice import attention_of, kernels_for, why_not_flashinfer
from muxk.models.cuda_kernels import AttentionShape, TorchAttentionKind
from muxk.models.errors import ModelError
from muxk.models.ops import Heads

CARD = torch.device("cuda")
SHAPE = AttentionShape(Heads(32, 8, 128, 1e-5), (None,), torch.bfloat16, CARD, device_units=132)


def test_a_card_with_flashinfer_runs_it() -> None:
    pytest.importorskip("flashinfer")
    assert why_not_flashinfer(SHAPE, (9, 0)) is None


@pytest.mark.parametrize(
    ("shape", "capability", "reason"),
    [
        (replace(SHAPE, heads=Heads(32, 8, 80, 1e-5)), (9, 0), "heads are of 80"),
        (SHAPE, (7, 5), "needs 8.0"),
        (replace(SHAPE, dtype=torch.float32), (9, 0), "float32"),
    ],
)
def test_what_flashinfer_cannot_run_is_named(
    shape: AttentionShape, capability: tuple[int, int], reason: str
) -> None:
    pytest.importorskip("flashinfer")
    assert reason in str(why_not_flashinfer(shape, capability))


def test_without_a_card_torch_computes_everything() -> None:
    host = torch.device("cpu")
    assert attention_of(replace(SHAPE, device=host)).name == "torch"
    assert kernels_for(host).name == "torch"


def test_torchs_attention_is_never_captured_since_it_reads_its_tables_on_the_host() -> None:
    with pytest.raises(ModelError, match="captured"):
        TorchAttentionKind(SHAPE).planner(132).step_planner(rows=8, pages=64)


def test_where_flashinfer_fails_triton_attends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from muxk.models import cuda_choice

    def broken(shape: AttentionShape) -> None:
        raise RuntimeError("ninja: build stopped: cublasLt.h not found")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_choice, "why_not_flashinfer", lambda shape, capability: None)
    monkeypatch.setattr(cuda_choice, "_flashinfer", broken)
    with pytest.warns(UserWarning, match=r"Triton attends: ninja: build stopped: cublasLt\.h not found"):
        assert attention_of(SHAPE).name == "triton"


def test_tritons_interpreter_is_not_for_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ModelError, match="TRITON_INTERPRET is set"):
        kernels_for(CARD)
