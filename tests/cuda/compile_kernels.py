"""Compile every Triton kernel for a card that is not there, down to its machine code; run as a script.

Prints a line for each: its name, the shared memory that it takes in bytes, and the size of its code.
"""

from __future__ import annotations

from typing import Any

import triton
from muxk.models.triton_attention import attend_kernel, merge_kernel
from muxk.models.triton_kernels import rms_norm_kernel, rotate_append_kernel, silu_mul_kernel
from muxk.profiles.gpu_check_kernels import SPIN_NS, sm_ids_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
HEADS = {"KV_HEADS": 8, "GROUP": 4, "DIM": 128}
NUMBERS = {"epsilon": "fp32", "scale_log2": "fp32"} | dict.fromkeys(
    ("width", "page_stride", "window", "splits"), "i32"
)
INTEGERS = (
    "positions",
    "slots",
    "tile_rows",
    "tile_firsts",
    "query_starts",
    "page_starts",
    "contexts",
    "pages",
)
FLOATS = ("rotation", "parts", "statistics")
"""All other arguments are tensors of the model's type."""
ATTENTION = {**HEADS, "PAGE": 16, "KEYS": 64, "BLOCK_DIM": 128}
CASES: tuple[tuple[Any, dict[str, int]], ...] = (
    (rms_norm_kernel, {"HAS_ADDED": True, "BLOCK": 4096}),
    (silu_mul_kernel, {"BLOCK": 1024}),
    (
        rotate_append_kernel,
        {
            "HAS_NORMS": True,
            "HEADS": 32,
            "KV_HEADS": 8,
            "DIM": 128,
            "PAGE": 16,
            "BLOCK_HEADS": 8,
            "BLOCK_PAIRS": 64,
        },
    ),
    (attend_kernel, ATTENTION | {"TILE": 64, "SPLIT": False, "HAS_WINDOW": False}),
    (attend_kernel, ATTENTION | {"TILE": 16, "SPLIT": True, "HAS_WINDOW": True}),
    (merge_kernel, {**HEADS, "TILE": 16, "BLOCK_DIM": 128}),
    (sm_ids_kernel, {"spin_ns": SPIN_NS}),
)


def signature(kernel: Any, constants: dict[str, int]) -> dict[str, str]:
    types = NUMBERS | dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(FLOATS, "*fp32")
    if kernel is sm_ids_kernel:
        types["out"] = "*i32"
    return {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}


def main() -> None:
    for kernel, constants in CASES:
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature(kernel, constants), places)
        compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4})
        print(kernel.__name__, compiled.metadata.shared, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
