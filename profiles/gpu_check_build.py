"""Compiles what the stages of gpu_check compile at first use: attention for heads of 128 in bfloat16."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch
from muxk.models.cuda_batch import tables_of, upload
from muxk.models.cuda_choice import attention_of
from muxk.models.cuda_kernels import AttentionShape, empty_kv_layer
from muxk.models.ops import Heads

UNITS = 8
"""Of a lane; what is compiled does not depend on it."""


def build(device: torch.device, dtype: torch.dtype) -> str:
    """Plan and run attention of a few tokens; the name of its kind."""
    heads = Heads(8, 2, 128, 1e-5)
    kind = attention_of(AttentionShape(heads, (None,), dtype, device, UNITS))
    table = np.ones((1, 1), dtype=np.int32)
    batch = upload(tables_of(np.zeros(4, dtype=np.int32), (4,), (0,), table), device)
    queries = torch.zeros(4, heads.queries, heads.dim, dtype=dtype, device=device)
    kv = empty_kv_layer(2, heads.kv, heads.dim, dtype, device)
    kind.planner(UNITS).plan(batch)(queries, kv, None, torch.zeros_like(queries))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return kind.name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, default=0)
    index = parser.parse_args(argv).index
    print(build(torch.device("cuda", index), torch.bfloat16))
    return 0


if __name__ == "__main__":
    sys.exit(main())
