"""FlashInfer's fa2 attention over paged KV, planned for the SMs of a partition.

Backend `fa2` alone is used: its kernels neither launch cooperatively nor count on all SMs of the device.
Decode takes its tensor-core kernel for every group size, since that is the one whose plan can be told how
many SMs there are; so one compiled module serves prefill and decode.

`plan` runs on the host and counts the device's SMs. The argument `num_colocated_ctas` of the compiled
planner, which FlashInfer's Python code always passes as 0, takes thread blocks off that count. It is
private: its place and the number of arguments are checked at each plan, and where they are not those of the
versions that were read, plans are made for the whole device (right results, more and smaller splits), and
`why_not` says so.

A plan is copied to the device from pinned memory of the wrapper after `plan` has returned. The next plan
must not write that memory before, so each is made in the next of a ring of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cuda_batch import Batch
from muxk.models.cuda_kernels import Attend, AttentionShape, LanePlanner, Planner
from muxk.models.cuda_workspace import BLOCKS_A_UNIT, attention_workspace_bytes
from muxk.models.ops import KvLayer
from torch import Tensor

LAYOUT = "NHD"
BACKEND = "fa2"
STEP_ROWS_MAX = 256
"""Rows of the largest graph that a lane has room for; the plan of a larger one is refused by FlashInfer."""
PLAN_BYTES = 2 << 20
"""The plan of a prefill, on the device and pinned on the host: a few numbers for each token, row and tile. A
wrapper's own 8 MiB take milliseconds to pin, while a step may wait."""
STEP_WORKSPACE_BYTES = 1 << 20
"""The plan of a decode step on the device: a few numbers for each row and thread block."""
PINNED = "_pin_memory_int_workspace_buffer"
"""Where a wrapper has the memory that plans are written in."""
PLAN_ARGUMENTS = (20, 21)
"""Arguments of the compiled fa2 planner in FlashInfer 0.6.18 and in 0.7.4."""
COLOCATED_PLACE = 18
"""Where `num_colocated_ctas` is among them, in both."""
RING = 8
"""Plans whose copies may be outstanding before more are made: a prefill is planned every few layers."""


class Lengths(Tensor):
    """Contexts on the host, whose largest is found at once.

    `plan` asks for `max(contexts)`, which goes through a tensor number by number: 0.3 ms for 64 rows, in
    every step.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter((_plain(self).max(),))


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Lengths) else value


class PlanForPartition:
    """Stands for a compiled module of FlashInfer, whose planner is told of SMs that it may not count on."""

    def __init__(self, module: Any, units_less: int) -> None:
        self._module = module
        self._less = BLOCKS_A_UNIT * units_less
        self.why_not: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def plan(self, *arguments: Any) -> Any:
        """The module's own, with the thread blocks of other partitions taken off."""
        arguments = tuple(_plain(argument) for argument in arguments)
        found = arguments[COLOCATED_PLACE : COLOCATED_PLACE + 1]
        if len(arguments) not in PLAN_ARGUMENTS or found != (0,) or isinstance(found[0], bool):
            self.why_not = f"the planner of this FlashInfer takes {len(arguments)} arguments"
            return self._module.plan(*arguments)
        after = arguments[COLOCATED_PLACE + 1 :]
        return self._module.plan(*arguments[:COLOCATED_PLACE], self._less, *after)


class _PartitionPlanned:
    """For wrappers: their `_cached_module`, which `plan` sets each time, plans for `units_less` SMs less."""

    units_less = 0
    _for_partition: PlanForPartition | None = None

    @property
    def _cached_module(self) -> Any:
        return self._for_partition

    @_cached_module.setter
    def _cached_module(self, module: Any) -> None:
        self._for_partition = None if module is None else PlanForPartition(module, self.units_less)

    @property
    def why_not(self) -> str | None:
        """Why plans are made for the whole device; None when they are not, or none was made."""
        return None if self._for_partition is None else self._for_partition.why_not


class PartitionPrefillWrapper(_PartitionPlanned, BatchPrefillWithPagedKVCacheWrapper):  # type: ignore[misc]
    """FlashInfer's wrapper for rows of any number of new tokens."""


class PartitionDecodeWrapper(_PartitionPlanned, BatchDecodeWithPagedKVCacheWrapper):  # type: ignore[misc]
    """FlashInfer's wrapper for steps in a graph."""


class PinnedRing:
    """Pinned buffers that plans are written in, each not again before its copy is done."""

    def __init__(self, make: Callable[[], Tensor], record: Callable[[], Any]) -> None:
        """`make` gives a buffer; `record` an event that was recorded on the current stream."""
        self._make = make
        self._record = record
        self._used: list[tuple[Tensor, Any]] = []
        """(buffer, event after its last copy), the one used longest ago first."""

    def take(self) -> Tensor:
        """A buffer that nothing is copied from any more; a new one when there is none. Never waits."""
        if len(self._used) >= RING and self._used[0][1].query():
            return self._used.pop(0)[0]
        return self._make()

    def give(self, buffer: Tensor) -> None:
        """After a plan was made in it and its copy was enqueued."""
        self._used.append((buffer, self._record()))


@dataclass(frozen=True)
class LaneWorkspace:
    """What the wrappers of a lane share: its items run one after the other."""

    sums: Tensor
    """uint8: partial results."""
    ring: PinnedRing
    units_less: int
    """SMs of the device that are not the lane's."""


class Plans:
    """The plans of one wrapper, which is one window's."""

    def __init__(self, wrapper: Any, window: int | None, ring: PinnedRing) -> None:
        assert hasattr(wrapper, PINNED), f"FlashInfer's wrapper has no {PINNED}: use the version of [cuda]"
        self.wrapper = wrapper
        self.window_left = -1 if window is None else window - 1
        self._ring = ring

    def plan(self, *tables: Tensor, **sizes: Any) -> None:
        """`wrapper.plan`, in pinned memory that no earlier plan is still copied from."""
        buffer = self._ring.take()
        setattr(self.wrapper, PINNED, buffer)
        self.wrapper.plan(*tables, window_left=self.window_left, **sizes)
        self._ring.give(buffer)


def _pinned_workspace() -> Tensor:
    return torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)


def _recorded_event() -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class FlashInferKind:
    """Implements `cuda_kernels.AttentionKind`."""

    shape: AttentionShape
    name: str = "flashinfer"

    def planner(self, units: int) -> LanePlanner:
        needed = attention_workspace_bytes(self.shape.heads, units, STEP_ROWS_MAX)
        sums = torch.empty(needed, dtype=torch.uint8, device=self.shape.device)
        ring = PinnedRing(_pinned_workspace, _recorded_event)
        return FlashInferPlanner(self.shape, LaneWorkspace(sums, ring, self.shape.device_units - units))


class FlashInferPlanner:
    """A prefill wrapper for each window; rows of one new token go through it too when no graph fits them."""

    def __init__(self, shape: AttentionShape, workspace: LaneWorkspace) -> None:
        self._shape = shape
        self._workspace = workspace
        self._plans = {
            window: Plans(prefill_wrapper(workspace), window, workspace.ring) for window in shape.windows
        }

    @property
    def bytes(self) -> int:
        return self._workspace.sums.nbytes + len(self._plans) * PLAN_BYTES

    @property
    def why_not(self) -> str | None:
        """Why plans are made for the whole device; None when they are for the partition."""
        return _why_not(self._plans)

    def step_planner(self, rows: int, pages: int) -> Planner:
        return FlashInferStepPlanner(self._shape, self._workspace, rows, pages)

    def plan(self, batch: Batch) -> Attend:
        """Tables on the host are pinned, so that the copies that FlashInfer makes of them do not wait."""
        for plans in self._plans.values():
            plans.plan(*prefill_tables(batch), **prefill_sizes(self._shape, batch))
        return _attend(self._plans)


class FlashInferStepPlanner:
    """A decode wrapper for each window, with buffers of their own that the kernels of a graph read."""

    def __init__(self, shape: AttentionShape, workspace: LaneWorkspace, rows: int, pages: int) -> None:
        self._shape = shape
        self._buffers = {window: step_buffers(rows, pages, shape.device) for window in shape.windows}
        self._plans = {
            window: Plans(decode_wrapper(workspace, buffers), window, workspace.ring)
            for window, buffers in self._buffers.items()
        }

    @property
    def bytes(self) -> int:
        tables = sum(part.nbytes for buffers in self._buffers.values() for part in buffers.values())
        return tables + len(self._plans) * STEP_WORKSPACE_BYTES

    @property
    def why_not(self) -> str | None:
        """As `FlashInferPlanner.why_not`."""
        return _why_not(self._plans)

    def plan(self, batch: Batch) -> Attend:
        for plans in self._plans.values():
            plans.plan(*decode_tables(batch), **decode_sizes(self._shape, batch))
        return _attend(self._plans)


def prefill_wrapper(workspace: LaneWorkspace) -> PartitionPrefillWrapper:
    wrapper = PartitionPrefillWrapper(workspace.sums, LAYOUT, backend=BACKEND)
    wrapper.units_less = workspace.units_less
    plans = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.sums.device)
    wrapper.reset_workspace_buffer(workspace.sums, plans)
    return wrapper


def decode_wrapper(workspace: LaneWorkspace, buffers: Mapping[str, Tensor]) -> PartitionDecodeWrapper:
    """For the graph of a step."""
    wrapper = PartitionDecodeWrapper(
        workspace.sums, LAYOUT, use_cuda_graph=True, use_tensor_cores=True, backend=BACKEND, **buffers
    )
    wrapper.units_less = workspace.units_less
    plans = torch.empty(STEP_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.sums.device)
    wrapper.reset_workspace_buffer(workspace.sums, plans)
    return wrapper


def step_buffers(rows: int, pages: int, device: torch.device) -> dict[str, Tensor]:
    """Where the tables of a graph lie; FlashInfer copies each step's there."""
    sizes = {"indptr": rows + 1, "indices": pages, "last_page_len": rows}
    return {
        f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=device)
        for name, size in sizes.items()
    }


def prefill_tables(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tables that a prefill plan takes, in its order: on the host but for the pages."""
    _, _, _, query_starts, page_starts, last_page, _, _ = batch.pinned
    return query_starts, page_starts, batch.pages, last_page


def prefill_sizes(shape: AttentionShape, batch: Batch) -> dict[str, Any]:
    """The other arguments of a prefill plan, its window aside. Contexts given are copied as they are."""
    own = {"head_dim_qk": shape.heads.dim, "causal": True, "seq_lens": _contexts(batch)}
    return _sizes(shape) | own | {"max_token_per_sequence": batch.host.most_new_tokens}


def decode_tables(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The tables that a decode plan takes, in its order: on the host but for the pages."""
    _, _, _, _, page_starts, last_page, _, _ = batch.pinned
    return page_starts, batch.pages, last_page


def decode_sizes(shape: AttentionShape, batch: Batch) -> dict[str, Any]:
    """The other arguments of a decode plan, its window aside."""
    return _sizes(shape) | {"head_dim": shape.heads.dim, "seq_lens": _contexts(batch)}


def _contexts(batch: Batch) -> Tensor:
    return batch.pinned[6].as_subclass(Lengths)


def _sizes(shape: AttentionShape) -> dict[str, Any]:
    return {
        "num_qo_heads": shape.heads.queries,
        "num_kv_heads": shape.heads.kv,
        "page_size": PAGE_SIZE,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }


def _attend(plans: Mapping[int | None, Plans]) -> Attend:
    def attend(queries: Tensor, kv: KvLayer, window: int | None, out: Tensor) -> None:
        plans[window].wrapper.run(queries, (kv.keys, kv.values), out=out, enable_pdl=False)

    return attend


def _why_not(plans: Mapping[int | None, Plans]) -> str | None:
    reasons = [each.wrapper.why_not for each in plans.values() if each.wrapper.why_not]
    return reasons[0] if reasons else None
