"""Kernels over rows in Triton's language: norms, activation, rotary embedding with append.

Types of arguments are Triton's: pointers are tensors, names in capitals are compiled in. Arithmetic is in
float32. With TRITON_INTERPRET=1 in the environment before the import they run on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x,
    added,
    weight,
    out,
    width,
    epsilon,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. With HAS_ADDED it is added to x first, which is rounded to its type."""
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        wide += tl.load(added + start + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(x.dtype.element_ty)
        tl.store(x + start + columns, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + columns, (wide * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """A block of one row a program: silu of the first `width` columns times the second."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_append_kernel(
    qkv,
    queries,
    keys,
    values,
    query_norm,
    key_norm,
    positions,
    slots,
    rotation,
    page_stride,
    epsilon,
    HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """BLOCK_HEADS heads of one token a program: norm and rotate queries and keys, copy values.

    Queries go to `queries`, keys and values to the token's slot; heads are interleaved pairs.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    some = pair < DIM // 2
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    start = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + 2 * pair
    inside = some & (head < HEADS + 2 * KV_HEADS)
    even = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(start + 1, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(even * even + odd * odd, axis=1)[:, None] / DIM + epsilon)
        # Each head has the weights of its kind: of the two loads one is masked out.
        column = 2 * pair + 0 * head
        for_even = tl.load(query_norm + column, mask=is_query & some, other=0.0).to(tl.float32)
        for_even += tl.load(key_norm + column, mask=is_key & some, other=0.0).to(tl.float32)
        for_odd = tl.load(query_norm + column + 1, mask=is_query & some, other=0.0).to(tl.float32)
        for_odd += tl.load(key_norm + column + 1, mask=is_key & some, other=0.0).to(tl.float32)
        even = tl.where(is_value, even, even * scale * for_even)
        odd = tl.where(is_value, odd, odd * scale * for_odd)
    angle = rotation + tl.load(positions + token).to(tl.int64) * DIM + 2 * pair
    cosine = tl.where(is_value, 1.0, tl.load(angle, mask=some, other=0.0))
    sine = tl.where(is_value, 0.0, tl.load(angle + 1, mask=some, other=0.0))
    turned_even = (even * cosine - odd * sine).to(queries.dtype.element_ty)
    turned_odd = (even * sine + odd * cosine).to(queries.dtype.element_ty)

    there = queries + (token * HEADS + head) * DIM + 2 * pair
    tl.store(there, turned_even, mask=is_query & some)
    tl.store(there + 1, turned_odd, mask=is_query & some)
    slot = tl.load(slots + token).to(tl.int64)
    place = slot // PAGE * page_stride + slot % PAGE * (KV_HEADS * DIM) + 2 * pair
    key_at = keys + place + (head - HEADS) * DIM
    tl.store(key_at, turned_even, mask=is_key & some)
    tl.store(key_at + 1, turned_odd, mask=is_key & some)
    value_at = values + place + (head - HEADS - KV_HEADS) * DIM
    tl.store(value_at, turned_even, mask=is_value & some)
    tl.store(value_at + 1, turned_odd, mask=is_value & some)
