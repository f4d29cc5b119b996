"""The CPU's operators compute what plain formulas compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cpu_attention import rotate
from muxk.models.cpu_decode import WASTED_PAGES, group_rows
from muxk.models.cpu_ops import CpuOperators, packed_fp16_works
from muxk.models.cpu_prefill import QUERY_BLOCK
from muxk.models.errors import ModelError
from muxk.models.llama import interleave_heads
from muxk.models.ops import Heads, KvLayer
from torch import Tensor

HEADS, KV_HEADS, DIM, PAGES = 6, 2, 8, 400
WINDOWS = [None, 1, 20, 300]
SHAPE = Heads(HEADS, KV_HEADS, DIM, epsilon=1e-5)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(rows: list[tuple[Tensor, Tensor]], counts: list[int]) -> tuple[KvLayer, np.ndarray]:
    """A pool with `counts` tokens of each row's keys and values in scattered pages, and its page table.

    Everything else in the pool is garbage.
    """
    operators = CpuOperators("float32")
    kv = operators.kv_layer(PAGES, KV_HEADS, DIM)
    kv.keys.copy_(random(*kv.keys.shape, seed=8) * 50)
    kv.values.copy_(random(*kv.values.shape, seed=9) * 50)
    free = np.random.default_rng(3).permutation(np.arange(1, PAGES))
    width = max(-(-len(keys) // PAGE_SIZE) for keys, _ in rows)
    table = np.zeros((len(rows), width), dtype=np.int32)
    for row, ((keys, values), count) in enumerate(zip(rows, counts, strict=True)):
        used = -(-len(keys) // PAGE_SIZE)
        table[row, :used], free = free[:used], free[used:]
        for position in range(count):
            page, offset = table[row, position // PAGE_SIZE], position % PAGE_SIZE
            kv.keys[page, :, :, offset] = keys[position]
            kv.values[page, :, offset] = values[position]
    return kv, table


def attention_of_one(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """query [heads, dim], keys and values [tokens, kv_heads, dim] -> [heads * dim], by the formula."""
    group = HEADS // KV_HEADS
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,thd->ht", query, keys) / DIM**0.5
    return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values).flatten()


def unrotated(tokens: int) -> Tensor:
    return torch.ones(tokens, 1, DIM // 2, dtype=torch.complex64)


def padded_qkv(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The product of a layer, with two rows of padding."""
    product = torch.cat([queries, keys, values], dim=1).flatten(1)
    return torch.cat([product, product.new_full((2, product.shape[1]), 7.0)])


@pytest.mark.parametrize(
    "contexts", [[1], [16], [17], [1, 2, 15, 16, 17, 33], [3, 40, 1500], [100] * 5 + [900] * 3, [64] * 8]
)
@pytest.mark.parametrize("window", WINDOWS)
def test_decode_attention_of_ragged_rows_equals_the_formula(
    float32_operators: CpuOperators, contexts: list[int], window: int | None
) -> None:
    rows = [
        (random(size, KV_HEADS, DIM, seed=size + index), random(size, KV_HEADS, DIM, seed=size - index))
        for index, size in enumerate(contexts)
    ]
    kv, table = paged(rows, [size - 1 for size in contexts])
    queries = random(len(rows), HEADS, DIM)
    positions = np.array(contexts, dtype=np.int32) - 1
    attention = float32_operators.decode_attention(table, positions, SHAPE, unrotated(len(rows)), window)
    keys, values = (torch.stack([row[part][-1] for row in rows]) for part in (0, 1))
    found = attention(padded_qkv(queries, keys, values), None, kv)
    wanted = torch.stack([attention_of_one(q, k, v, window) for q, (k, v) in zip(queries, rows, strict=True)])
    assert not found[len(rows) :].any()
    torch.testing.assert_close(found[: len(rows)], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "counts",
    [
        [(1, 0)],
        [(40, 0), (1, 16), (5, 20), (17, 31)],
        [(QUERY_BLOCK + 3, 5), (2, 0)],
        [(2 * QUERY_BLOCK, 48)],
        [(QUERY_BLOCK, 1)],
    ],
)
@pytest.mark.parametrize("window", WINDOWS)
def test_prefill_attention_after_reused_tokens_equals_the_formula(
    float32_operators: CpuOperators, counts: list[tuple[int, int]], window: int | None
) -> None:
    sizes = [new + reused for new, reused in counts]
    rows = [
        (random(size, KV_HEADS, DIM, seed=size), random(size, KV_HEADS, DIM, seed=size + 1)) for size in sizes
    ]
    kv, table = paged(rows, [reused for _, reused in counts])
    new_tokens, reused_tokens = zip(*counts, strict=True)
    queries = random(sum(new_tokens), HEADS, DIM)
    attention = float32_operators.prefill_attention(
        table, new_tokens, reused_tokens, SHAPE, unrotated(len(queries)), window
    )
    keys, values = (
        torch.cat([row[part][reused:] for row, reused in zip(rows, reused_tokens, strict=True)])
        for part in (0, 1)
    )
    found = attention(padded_qkv(queries, keys, values), None, kv)
    seen = [
        (row[0][: reused + index + 1], row[1][: reused + index + 1])
        for row, (new, reused) in zip(rows, counts, strict=True)
        for index in range(new)
    ]
    wanted = torch.stack([attention_of_one(q, k, v, window) for q, (k, v) in zip(queries, seen, strict=True)])
    assert not found[len(queries) :].any()
    torch.testing.assert_close(found[: len(queries)], wanted, rtol=1e-4, atol=1e-5)


@given(pages=st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_groups_of_decode_rows_cover_all_rows_and_bound_the_padding(pages: list[int]) -> None:
    ordered = np.sort(np.array(pages, dtype=np.int32))
    ranges = group_rows(ordered)
    assert [row for first, last in ranges for row in range(first, last)] == list(range(len(pages)))
    for first, last in ranges:
        group = ordered[first:last]
        assert (group[-1] - group).sum() <= WASTED_PAGES


def test_rotary_embedding_of_interleaved_heads_equals_the_rotation_of_halves() -> None:
    heads = random(5, HEADS, DIM)
    angles = random(5, DIM // 2)
    cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, dim=-1)
    halves = heads * cos + torch.cat([-second, first], dim=-1) * sin

    def interleaved(values: Tensor) -> Tensor:
        return interleave_heads(values.reshape(5, -1).T, DIM).T.reshape(5, HEADS, DIM).contiguous()

    table = torch.polar(torch.ones_like(angles), angles)[:, None]
    found = rotate(interleaved(heads), table)
    torch.testing.assert_close(found, interleaved(halves))


@pytest.mark.skipif(not packed_fp16_works(), reason="FBGEMM's fp16 product needs x86 with AVX2")
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_is_near_float32_and_a_row_does_not_depend_on_its_batch(biased: bool) -> None:
    weight, bias, x = random(96, 64), random(96) if biased else None, random(500, 64, seed=1)
    packed = CpuOperators("fp16").linear(weight, bias)
    wanted = torch.nn.functional.linear(x, weight, bias)
    whole = packed(x)
    torch.testing.assert_close(whole, wanted, rtol=5e-3, atol=2e-2)
    for size in (*range(1, 60), 119, 120, 121, 122, 241, 499):
        assert torch.equal(packed(x[:size].contiguous()), whole[:size])


def test_a_machine_without_the_packed_product_falls_back_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxk.models.cpu_ops.packed_fp16_works", lambda: False)
    assert CpuOperators("auto").dtype == "float32"
    with pytest.raises(ModelError, match="use dtype float32"):
        CpuOperators("fp16")


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'int3' is not known; known: auto, blocks, fp16, float32"):
        CpuOperators("int3")
