"""Triton kernels under the interpreter give what torch's operators give, for odd shapes and shuffled pages.

The interpreter rounds to bf16 by cutting, and multiplies matrices of bf16 as if they were integers: so rows
of it are compared to two units of its last place, and attention in it is left to a card.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_driver import Driver, RandomWeights, take, tiny_config, tiny_runner
from muxk.kernel.work import Phase
from muxk.models.cuda_batch import Batch, decode_tables, tables_of, upload
from muxk.models.cuda_kernels import (
    AttentionKind,
    AttentionShape,
    TorchAttentionKind,
    TorchKernels,
    empty_kv_layer,
)
from muxk.models.cuda_layers import CudaOperators
from muxk.models.cuda_runner import CudaModelRunner
from muxk.models.llama import load_decoder
from muxk.models.ops import HeadNorms, Heads, KvLayer
from muxk.models.triton_ops import TritonAttentionKind, TritonKernels, splits_for
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def close(found: Tensor, wanted: Tensor) -> bool:
    tolerance = TOLERANCE[found.dtype]
    return torch.allclose(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@TYPES
def test_norms_of_odd_widths_agree_and_the_sum_is_left_in_place(dtype: torch.dtype) -> None:
    x, added, weight = normal(3, 77, dtype=dtype), normal(3, 77, dtype=dtype) * 2, normal(77, dtype=dtype)
    outs, sums = [], []
    for kernels in (TorchKernels(), TritonKernels()):
        plain, after, residual = torch.empty_like(x), torch.empty_like(x), x.clone()
        kernels.rms_norm(x, weight, 1e-5, plain)
        kernels.add_rms_norm(residual, added, weight, 1e-5, after)
        outs.append(torch.cat([plain, after]))
        sums.append(residual)
    assert close(*outs)
    assert close(*sums)
    assert dtype is torch.bfloat16 or torch.equal(*sums)


@TYPES
def test_silu_and_product_agree_past_one_block(dtype: torch.dtype) -> None:
    gate_up = normal(2, 2 * 1030, dtype=dtype)
    outs = [torch.empty(2, 1030, dtype=dtype) for _ in range(2)]
    for kernels, out in zip((TorchKernels(), TritonKernels()), outs, strict=True):
        kernels.silu_mul(gate_up, out)
    assert close(*outs)


def batch_of(new: list[int], reused: list[int], pages: int = 24) -> Batch:
    """Rows whose pages are shuffled; page 0 is nobody's."""
    width = max(-(-(n + r) // 16) for n, r in zip(new, reused, strict=True))
    order = np.random.default_rng(3).permutation(np.arange(1, pages))
    table = order[: len(new) * width].reshape(len(new), width).astype(np.int32)
    return upload(tables_of(np.zeros(sum(new), dtype=np.int32), new, reused, table), CPU)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (3, 3, 20)])
def test_rotation_and_append_agree(normed: bool, heads: int, kv_heads: int, dim: int) -> None:
    shape = Heads(heads, kv_heads, dim, 1e-6)
    batch = batch_of([3, 1], [14, 30])
    qkv = normal(4, (heads + 2 * kv_heads) * dim)
    rotation = normal(40, dim // 2, 2)
    norms = HeadNorms(normal(dim), normal(dim) + 1) if normed else None
    found = []
    for kernels in (TorchKernels(), TritonKernels()):
        kv = empty_kv_layer(24, kv_heads, dim, torch.float32, CPU)
        queries = torch.empty(4, heads * dim)
        kernels.rotate_append(qkv.clone(), shape, norms, batch, rotation, kv, queries)
        found.append((queries, kv.keys, kv.values))
    for torchs, tritons in zip(*found, strict=True):
        assert close(tritons, torchs)
    assert int((found[1][2] != 0).any(-1).any(-1).sum()) == 4, "four slots are written and no other"


def attended(
    kind: AttentionKind, batch: Batch, queries: Tensor, kv: KvLayer, window: int | None, units: int
) -> Tensor:
    out = torch.full_like(queries, torch.nan)
    kind.planner(units).plan(batch)(queries, kv, window, out)
    return out


def pool(heads: Heads, dtype: torch.dtype) -> KvLayer:
    kv = empty_kv_layer(24, heads.kv, heads.dim, dtype, CPU)
    kv.keys.copy_(normal(24, 16, heads.kv, heads.dim))
    kv.values.copy_(normal(24, 16, heads.kv, heads.dim) * 0.5)
    return kv


@pytest.mark.parametrize(
    ("heads", "dtype", "new", "reused", "window", "units"),
    [
        (Heads(4, 2, 64, 0), torch.float32, [7, 1, 33], [0, 20, 70], None, 1),
        (Heads(3, 1, 20, 0), torch.float32, [30, 40], [80, 3], None, 9),
        (Heads(2, 2, 128, 0), torch.float16, [19], [45], None, 4),
        (Heads(4, 2, 64, 0), torch.float16, [40, 3], [5, 90], 17, 6),
        (Heads(4, 1, 64, 0), torch.float32, [1, 1, 1], [0, 15, 110], None, 8),
        (Heads(4, 1, 64, 0), torch.float32, [1, 1], [127, 16], 30, 3),
    ],
    ids=["mixed", "split-odd", "wide", "window", "step-split", "step-window"],
)
def test_paged_attention_agrees(
    heads: Heads, dtype: torch.dtype, new: list[int], reused: list[int], window: int | None, units: int
) -> None:
    batch, kv = batch_of(new, reused), pool(heads, dtype)
    queries = normal(sum(new), heads.queries, heads.dim, dtype=dtype)
    shape = AttentionShape(heads, (window,), dtype, CPU, device_units=16)
    wanted = attended(TorchAttentionKind(shape), batch, queries, kv, window, units)
    assert close(attended(TritonAttentionKind(shape), batch, queries, kv, window, units), wanted)


def test_a_step_of_fixed_shape_serves_later_tables_in_its_own_buffers() -> None:
    """As in a graph: what attends was made once, and reads the tables of each step from the same place."""
    heads = Heads(4, 2, 64, 0)
    shape, kv = AttentionShape(heads, (None,), torch.float32, CPU, 16), pool(heads, torch.float32)
    packed = torch.zeros(500, dtype=torch.int32)
    planner = TritonAttentionKind(shape).planner(units=6).step_planner(rows=3, pages=40)
    table = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
    attend = None
    for positions in ([3, 40], [77, 0]):
        tables = decode_tables(np.zeros(2, np.int32), np.array(positions, np.int32), table, rows=3)
        batch = upload(tables, CPU, into=packed)
        attend = attend or planner.plan(batch)
        queries, out = normal(3, 4, 64), torch.full((3, 4, 64), torch.nan)
        attend(queries, kv, None, out)
        assert close(out, attended(TorchAttentionKind(shape), batch, queries, kv, None, 6))


def test_contexts_are_split_by_the_units_of_the_partition_and_within_its_workspace() -> None:
    assert splits_for(units=132, programs=8) == 33
    assert splits_for(units=16, programs=8) == 4
    assert splits_for(units=16, programs=64) == 1
    assert splits_for(units=132, programs=8, blocks=3) == 3
    for units in (1, 8, 132):
        for programs in range(1, 600, 7):
            splits = splits_for(units, programs)
            assert splits == 1 or splits * programs < 4 * units


def test_a_model_on_these_kernels_gives_the_tokens_of_the_cpu() -> None:
    """Prefill in layers and chunks, fused, and captured steps, with heads of 16 in two windows."""
    config = tiny_config("qwen3", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, windows=(None, 5))
    weights, prompts = RandomWeights(config), [[3, 4, 5, 6, 7] * 2, [8, 9]]
    wanted = Driver(tiny_runner(weights, 16)).generate(prompts, 3)
    decoder = load_decoder(weights, CudaOperators(TritonKernels(), torch.float32, CPU))
    shape = AttentionShape(decoder.heads, (None, 9), torch.float32, CPU, device_units=4)
    runner = CudaModelRunner(decoder, TritonAttentionKind(shape), pages=16, chunk_tokens_max=6, rows_max=2)
    lane = runner.open_lane(Phase.PREFILL, 3)
    runner.capture(lane, 2)
    driver = Driver(runner)
    first, second = (driver.request(prompt, 4) for prompt in prompts)
    work = driver.prefill_work([first])
    for tokens in (range(6), range(6, 10)):
        for layers in (range(1), range(1, 2)):
            output = runner.prefill(lane, work, tokens, layers, item_id=1)
    take([first], output.read().tokens)
    fused = driver.prefill_work([second])
    for pending, request in zip(
        runner.fused(lane, driver.decode_work([first]), fused, range(2), item_id=1),
        (first, second),
        strict=True,
    ):
        take([request], pending.read().tokens)
    output = runner.decode(lane, driver.decode_work([second, first]), item_id=1)
    take([second, first], output.read().tokens)
    assert [first.output, second.output] == [wanted[0], wanted[1][:2]]
