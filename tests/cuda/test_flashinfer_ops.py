"""FlashInfer is called as its installed version wants, and hands on what the kernels need.

Its Python code runs here for real; only its compiled module is made up, and attends in torch's operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from muxk.models.cuda_batch import Batch, decode_tables, tables_of, upload
from muxk.models.cuda_kernels import AttentionShape, TorchAttentionKind, attend_row, empty_kv_layer
from muxk.models.cuda_workspace import attention_workspace_bytes
from muxk.models.ops import Heads, KvLayer
from torch import Tensor

flashinfer_ops = pytest.importorskip("muxk.models.flashinfer_ops", reason="flashinfer is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 64, 0.0)
SHAPE = AttentionShape(HEADS, (None, 20), torch.float16, CPU, device_units=132)
CAUSAL, NOT_CAUSAL = 1, 0


class Compiled:
    """A compiled module of FlashInfer: notes its plans, and attends as its arguments say."""

    def __init__(self, arguments_more: int = 0) -> None:
        self.plans: list[tuple[Any, ...]] = []
        self.pinned: list[int] = []
        self.more = arguments_more

    def plan(self, *arguments: Any) -> list[int]:
        self.plans.append(arguments)
        self.pinned.append(arguments[2].data_ptr())
        return [1]

    def paged_run(self, *arguments: Any) -> None:
        _, _, _, queries, keys, values, query_starts, page_starts, pages, last_page, out = arguments[:11]
        mask, window_left = arguments[12], arguments[14]
        for row in range(len(last_page)):
            used = pages[page_starts[row] : page_starts[row + 1]].long()
            context = (len(used) - 1) * 16 + int(last_page[row])
            span = slice(int(query_starts[row]), int(query_starts[row + 1]))
            assert mask == CAUSAL or span.stop - span.start == 1
            parts = [part[used].flatten(0, 1)[:context] for part in (keys, values)]
            out[span] = attend_row(queries[span], *parts, None if window_left < 0 else window_left + 1)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """FlashInfer over a made-up module, on memory that is not pinned, for that needs a driver."""
    import flashinfer

    module, empty = Compiled(), torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    for part in (flashinfer.prefill, flashinfer.decode):
        monkeypatch.setattr(part, "get_batch_prefill_module", lambda *arguments: module)
    monkeypatch.setattr(flashinfer_ops, "_recorded_event", lambda: SimpleNamespace(query=lambda: True))
    return module


def batch_of(new: list[int], reused: list[int]) -> Batch:
    table = np.random.default_rng(3).permutation(np.arange(1, 31))[: 10 * len(new)]
    tables = tables_of(np.zeros(sum(new), np.int32), new, reused, table.reshape(-1, 10).astype(np.int32))
    return upload(tables, CPU)


def pool() -> KvLayer:
    kv = empty_kv_layer(32, HEADS.kv, HEADS.dim, torch.float16, CPU)
    generator = torch.Generator().manual_seed(1)
    for part in (kv.keys, kv.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return kv


def queries_of(batch: Batch) -> Tensor:
    shape = (len(batch.tokens), HEADS.queries, HEADS.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).half()


def agree(attend: Callable[..., None], batch: Batch) -> None:
    """With the reference, in layers of both windows."""
    kv, queries = pool(), queries_of(batch)
    for window in SHAPE.windows:
        found, wanted = torch.zeros_like(queries), torch.zeros_like(queries)
        attend(queries, kv, window, found)
        TorchAttentionKind(SHAPE).planner(1).plan(batch)(queries, kv, window, wanted)
        assert torch.equal(found, wanted)


def test_a_prefill_reads_the_pages_contexts_and_windows_of_its_rows(compiled: Compiled) -> None:
    batch = batch_of([7, 1, 40], [0, 33, 64])
    agree(flashinfer_ops.FlashInferKind(SHAPE).planner(units=100).plan(batch), batch)


def test_a_step_in_a_graph_reads_the_tables_of_each_step_in_buffers_of_its_own(compiled: Compiled) -> None:
    planner = flashinfer_ops.FlashInferKind(SHAPE).planner(units=32).step_planner(rows=3, pages=40)
    table = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
    attend = None
    for positions in ([3, 40], [77, 0]):
        tables = decode_tables(np.zeros(2, np.int32), np.array(positions, np.int32), table, rows=3)
        batch = upload(tables, CPU)
        planned = planner.plan(batch)
        # A graph keeps what was captured with the first plan.
        attend = attend or planned
        agree(attend, batch)


def test_a_plan_does_not_go_through_the_contexts_one_by_one(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer takes Python's max() of them: for 64 rows longer than the rest of a step's launch."""
    planner = flashinfer_ops.FlashInferKind(SHAPE).planner(units=32)
    step = planner.step_planner(rows=2, pages=20)

    def one_by_one(self: Tensor) -> None:
        raise AssertionError("a tensor was read number by number")

    monkeypatch.setattr(Tensor, "__iter__", one_by_one)
    planner.plan(batch_of([7, 2], [0, 9]))
    step.plan(batch_of([1, 1], [3, 40]))
    for arguments, contexts in zip(compiled.plans, [[7, 11]] * 2 + [[4, 41]] * 2, strict=True):
        assert type(arguments[5]) is Tensor, "compiled code is given plain tensors"
        assert arguments[5].tolist() == contexts


def test_the_partial_results_of_every_plan_have_room() -> None:
    """As `PrefillPlan` allocates them, on a card of 132 SMs."""
    for queries, kv in ((32, 8), (16, 2), (64, 8), (28, 4), (32, 1)):
        heads = Heads(queries, kv, 128, 0.0)
        room = attention_workspace_bytes(heads, 132, 256)
        blocks, group = 2 * 132 // kv, queries // kv
        tile = 16 if group <= 16 else 64
        prefill = 4 * queries * blocks * 128 * 129
        step = 4 * queries * max(blocks, -(-256 * group // tile) + 255) * tile * 129
        assert room >= max(prefill, step)
    assert attention_workspace_bytes(Heads(32, 8, 128, 0.0), 132, 256) == 128 << 20
    assert attention_workspace_bytes(Heads(64, 8, 128, 0.0), 132, 256) > 128 << 20


@pytest.mark.parametrize("units", [8, 100, 132])
def test_plans_are_made_for_the_thread_blocks_of_the_partition(compiled: Compiled, units: int) -> None:
    planner = flashinfer_ops.FlashInferKind(SHAPE).planner(units)
    step = planner.step_planner(rows=2, pages=20)
    planner.plan(batch_of([7], [0]))
    step.plan(batch_of([1, 1], [3, 40]))
    assert len(compiled.plans) == 2 * len(SHAPE.windows)
    for arguments in compiled.plans:
        assert len(arguments) in flashinfer_ops.PLAN_ARGUMENTS
        assert arguments[flashinfer_ops.COLOCATED_PLACE] == 2 * (132 - units)
    assert planner.why_not is None
    assert step.why_not is None


def test_a_planner_with_other_arguments_is_left_alone_and_that_is_told() -> None:
    calls = []
    module = SimpleNamespace(plan=lambda *arguments: calls.append(arguments))
    for arguments in (tuple(range(19)), (*range(18), False, 0), (*range(18), 3, 0)):
        planned = flashinfer_ops.PlanForPartition(module, units_less=10)
        planned.plan(*arguments)
        assert calls[-1] == arguments
        assert f"takes {len(arguments)} arguments" in str(planned.why_not)


def test_a_plan_is_never_written_where_an_earlier_one_is_still_copied_from() -> None:
    done: list[bool] = []

    def recorded() -> SimpleNamespace:
        place = len(done)
        done.append(False)
        return SimpleNamespace(query=lambda: done[place])

    made = iter(range(100))
    ring = flashinfer_ops.PinnedRing(lambda: next(made), recorded)
    for wanted in range(10):
        buffer = ring.take()
        assert buffer == wanted, "the copies of all others are outstanding"
        ring.give(buffer)
    done[0] = True
    assert ring.take() == 0
    assert ring.take() == 10


def test_the_wrappers_of_a_lane_share_its_partial_results_and_no_two_lanes_do(compiled: Compiled) -> None:
    kind = flashinfer_ops.FlashInferKind(SHAPE)
    lanes = [kind.planner(units=100), kind.planner(units=100)]
    batch = batch_of([7], [0])
    for lane in (*lanes, lanes[0].step_planner(rows=1, pages=9)):
        lane.plan(batch if lane in lanes else batch_of([1], [20]))
    sums = [arguments[0].data_ptr() for arguments in compiled.plans]
    plans = [arguments[1].data_ptr() for arguments in compiled.plans]
    assert sums == [sums[0]] * 2 + [sums[2]] * 2 + [sums[0]] * 2
    assert sums[0] != sums[2]
    assert len(set(plans)) == len(plans), "each wrapper has the plan on the device for itself"
    for arguments in compiled.plans:
        assert arguments[2].nbytes >= arguments[1].nbytes, "the planner checks the size on the device only"


def test_every_call_fits_the_signatures_of_the_installed_version() -> None:
    batch, workspace = batch_of([1, 1], [3, 40]), torch.zeros(16)
    buffers = flashinfer_ops.step_buffers(2, 20, CPU)
    prefill, decode = flashinfer_ops.PartitionPrefillWrapper, flashinfer_ops.PartitionDecodeWrapper
    run = {"out": workspace, "enable_pdl": False}
    window = {"window_left": -1}
    for function, arguments, options in (
        (prefill.__init__, (workspace, "NHD"), {"backend": "fa2"}),
        (
            decode.__init__,
            (workspace, "NHD"),
            {"use_cuda_graph": True, "use_tensor_cores": True, "backend": "fa2", **buffers},
        ),
        (decode.reset_workspace_buffer, (workspace, workspace), {}),
        (prefill.reset_workspace_buffer, (workspace, workspace), {}),
        (
            prefill.plan,
            flashinfer_ops.prefill_tables(batch),
            flashinfer_ops.prefill_sizes(SHAPE, batch) | window,
        ),
        (
            decode._plan_impl,
            flashinfer_ops.decode_tables(batch),
            flashinfer_ops.decode_sizes(SHAPE, batch) | window,
        ),
        (prefill.run, (workspace, (workspace, workspace)), run),
        (decode.run, (workspace, (workspace, workspace)), run),
    ):
        inspect.signature(function).bind(None, *arguments, **options)
