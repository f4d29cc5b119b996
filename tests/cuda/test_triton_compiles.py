"""Triton makes machine code of every kernel, for a card that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SHARED_BYTES_MAX = 227 * 1024
"""Of a thread block on compute capability 9.0: CUDA C++ Programming Guide, technical specifications."""


def test_every_kernel_compiles_for_hopper_and_fits_its_shared_memory(tmp_path: Path) -> None:
    """In a process of its own, since here triton was imported for its interpreter."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    kernels = {"rms_norm", "silu_mul", "rotate_append", "attend", "merge", "sm_ids"}
    assert {name for name, _, _ in found} == {f"{kernel}_kernel" for kernel in kernels}
    for name, shared, code in found:
        assert int(shared) <= SHARED_BYTES_MAX, name
        assert int(code) > 0, name
