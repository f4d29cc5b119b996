"""A kernel that tells which SM each of its programs runs on. Only a card can run it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer, smid

SPIN_NS = 200_000
PROGRAMS_A_UNIT = 24


@triton.jit  # type: ignore[untyped-decorator]
def sm_ids_kernel(out, spin_ns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program stays for `spin_ns`, so that all SMs are taken, and writes the number of its SM."""
    began = globaltimer()
    now = began
    while now - began < spin_ns:
        now = globaltimer()
    tl.store(out + tl.program_id(0), smid())


def write_sm_ids(out: Tensor) -> None:
    """Enqueue one program for each of int32[programs] on the current stream."""
    sm_ids_kernel[out.numel(),](out, spin_ns=SPIN_NS)
