"""Packages that CI must have: without them the proofs of the CUDA device that need no card are skipped."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tomllib
from pathlib import Path

import pytest
from fake_cuda import is_installed

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "cuda.bindings.driver": "cuda-bindings",
    "flashinfer": "flashinfer-python",
    "triton": "triton",
    "tvm_ffi": "apache-tvm-ffi",
    "pynvml": "nvidia-ml-py",
}


MISSING = sorted(package for module, package in NEEDED.items() if not is_installed(module))


def test_ci_has_what_the_tests_of_the_cuda_device_need() -> None:
    if MISSING and not os.environ.get("CI"):
        pytest.skip(f"without {', '.join(MISSING)}: make install brings them")
    assert not MISSING


def pinned_in(text: str) -> set[str]:
    """Versions of FlashInfer that a file pins."""
    return set(re.findall(r"flashinfer-python==([0-9.]+)", text))


def test_the_flashinfer_that_is_tested_is_the_one_that_the_cuda_extra_installs() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"][
        "cuda"
    ]
    pinned = pinned_in(" ".join(extra))
    assert len(pinned) == 1
    assert pinned_in((ROOT / "Makefile").read_text("utf-8")) == pinned
    if is_installed("flashinfer"):
        assert {importlib.metadata.version("flashinfer-python")} == pinned
