"""Attention over paged keys and values in Triton's language: any number of new tokens a row.

FlashAttention-2 (arXiv 2307.08691), algorithm 1, with the query heads that share a KV head in one tile, and
Flash-Decoding's split over keys: a tile's keys may be shared out to several programs, whose parts are merged.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_kernel(
    queries, keys, values, out, parts, statistics, tile_rows, tile_firsts,
    query_starts, page_starts, contexts, pages, page_stride, scale_log2, window,
    HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS, splits). Tile t is TILE // GROUP new tokens of tile_rows[t] from tile_firsts[t].

    With SPLIT, unnormalised sums go to `parts` and (maximum, sum) to `statistics`, else results to `out`.
    `scale_log2` is the softmax scale times log2(e).
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    start, context = tl.load(query_starts + row), tl.load(contexts + row)
    new = tl.load(query_starts + row + 1) - start
    before = context - new
    lane = tl.arange(0, TILE)
    query = first + lane // GROUP
    asked = (query < new) & (lane < TILE // GROUP * GROUP)
    dims = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + lane % GROUP
    place = ((start + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
    seen = asked[:, None] & (dims < DIM)[None, :]
    tokens = tl.load(queries + place[:, None] + dims[None, :], mask=seen, other=0.0)

    last = tl.minimum(context, before + first + TILE // GROUP)
    lowest = last * 0
    if HAS_WINDOW:
        lowest = tl.maximum(before + first - window + 1, 0) // KEYS * KEYS
    # Blocks of keys are shared out whole.
    shares = tl.num_programs(2)
    share = ((last - lowest + KEYS - 1) // KEYS + shares - 1) // shares * KEYS
    begin = lowest + split * share
    end = tl.minimum(begin + share, last)
    highest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    mixed = tl.full([TILE, BLOCK_DIM], 0.0, tl.float32)
    page_table = pages + tl.load(page_starts + row)
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        inside = key < end
        page = tl.load(page_table + key // PAGE, mask=inside, other=0).to(tl.int64)
        token = page * page_stride + (key % PAGE) * (KV_HEADS * DIM) + kv_head * DIM
        known = inside[:, None] & (dims < DIM)[None, :]
        block = tl.load(keys + token[:, None] + dims[None, :], mask=known, other=0.0)
        scores = tl.dot(tokens, tl.trans(block), input_precision="ieee") * scale_log2
        distance = (before + query)[:, None] - key[None, :]
        open_to = (distance >= 0) & inside[None, :]
        if HAS_WINDOW:
            open_to = open_to & (distance < window)
        scores = tl.where(open_to, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps its maximum of -inf, which must not meet itself.
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        weights, kept = tl.exp2(scores - anchor[:, None]), tl.exp2(highest - anchor)
        total = total * kept + tl.sum(weights, axis=1)
        block = tl.load(values + token[:, None] + dims[None, :], mask=known, other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
        highest = higher

    if SPLIT:
        program = (tile * KV_HEADS + kv_head).to(tl.int64) * tl.num_programs(2) + split
        rows = program * TILE + lane
        tl.store(parts + rows[:, None] * BLOCK_DIM + dims[None, :], mixed)
        tl.store(statistics + rows * 2, highest)
        tl.store(statistics + rows * 2 + 1, total)
    else:
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=seen)


@triton.jit
def merge_kernel(
    out,
    parts,
    statistics,
    tile_rows,
    tile_firsts,
    query_starts,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (tiles, KV_HEADS): put the parts of each tile together and normalise."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    start = tl.load(query_starts + row)
    new = tl.load(query_starts + row + 1) - start
    lane, dims = tl.arange(0, TILE), tl.arange(0, BLOCK_DIM)
    program = (tile * KV_HEADS + kv_head).to(tl.int64) * splits
    highest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    mixed = tl.full([TILE, BLOCK_DIM], 0.0, tl.float32)
    for split in range(splits):
        rows = (program + split) * TILE + lane
        theirs = tl.load(statistics + rows * 2)
        higher = tl.maximum(highest, theirs)
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        kept, taken = tl.exp2(highest - anchor), tl.exp2(theirs - anchor)
        total = total * kept + tl.load(statistics + rows * 2 + 1) * taken
        part = tl.load(parts + rows[:, None] * BLOCK_DIM + dims[None, :])
        mixed = mixed * kept[:, None] + part * taken[:, None]
        highest = higher
    query = first + lane // GROUP
    asked = (query < new) & (lane < TILE // GROUP * GROUP)
    head = kv_head * GROUP + lane % GROUP
    place = ((start + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
    result = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] + dims[None, :], result, mask=asked[:, None] & (dims < DIM)[None, :])
