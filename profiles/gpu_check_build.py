"""Compiles what the stages of gpu_check compile at first use: attention for heads of 128 in bfloat16."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from muxk.models.cuda_choice import attention_of, tried
from muxk.models.cuda_kernels import AttentionShape
from muxk.models.ops import Heads

UNITS = 8
"""Of a lane; what is compiled does not depend on it."""


def build(device: torch.device, dtype: torch.dtype) -> str:
    """Attend for a few tokens; the name of the kind of attention."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return tried(attention_of(AttentionShape(Heads(8, 2, 128, 1e-5), (None,), dtype, device, UNITS))).name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, default=0)
    index = parser.parse_args(argv).index
    print(build(torch.device("cuda", index), torch.bfloat16))
    return 0


if __name__ == "__main__":
    sys.exit(main())
