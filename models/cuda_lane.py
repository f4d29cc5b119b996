"""What one lane of a card holds: scratch, workspaces of attention, and decode steps with their graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from muxk.models.config import ModelConfig
from muxk.models.cuda_batch import Tables, packed_words
from muxk.models.cuda_kernels import LanePlanner, Planner
from muxk.models.cuda_layers import Scratch
from torch import Tensor


@dataclass
class StepBucket:
    """A decode step of at most `rows` rows, whose tables always lie in the same place."""

    rows: int
    pages: int
    """Most pages of all rows together."""
    packed: Tensor
    """int32: the tables."""
    planner: Planner
    graph: Any = None
    """torch.cuda.CUDAGraph once captured; torch's CPU device has none."""
    logits: Tensor | None = None
    """float32[rows, vocabulary]: what the graph writes."""

    @property
    def bytes(self) -> int:
        """Without the graph's own memory, which it shares with the lane's other graphs."""
        logits = 0 if self.logits is None else self.logits.nbytes
        return self.packed.nbytes + self.planner.bytes + logits

    def holds(self, tables: Tables) -> bool:
        return tables.rows == self.rows and len(tables.pages) <= self.pages

    def replay(self) -> Tensor | None:
        """Enqueue the graph; None where there is none."""
        if self.graph is None:
            return None
        self.graph.replay()
        return self.logits


@dataclass
class CudaLane:
    """Implements `kernel.cuda_runner.CudaLaneState`."""

    units: int
    scratch: Scratch
    planner: LanePlanner
    buckets: dict[int, StepBucket] = field(default_factory=dict)
    """By their rows."""
    pool: Any = None
    """Memory that the graphs of this lane share; they run one after the other."""

    @property
    def bytes(self) -> int:
        """Device memory that it holds, that of graphs aside."""
        buckets = sum(bucket.bytes for bucket in self.buckets.values())
        return self.scratch.bytes + self.planner.bytes + buckets

    def bucket(self, rows: int) -> StepBucket | None:
        """The smallest bucket for so many rows; None where all are smaller."""
        fitting = [bucket for bucket in self.buckets.values() if bucket.rows >= rows]
        return min(fitting, key=lambda bucket: bucket.rows, default=None)

    def room(self, tokens: int, config: ModelConfig) -> Scratch:
        """Activations for so many tokens.

        More than the lane was opened for get buffers for this call alone; graphs hold the lane's own.
        """
        if tokens <= self.scratch.tokens:
            return self.scratch
        like = self.scratch.like
        return Scratch(config, tokens, like.dtype, like.device)


def open_bucket(rows: int, pages: int, planner: Planner, device: torch.device) -> StepBucket:
    """Static buffers of a step, not captured yet."""
    packed = torch.zeros(packed_words(rows, rows, pages), dtype=torch.int32, device=device)
    return StepBucket(rows, pages, packed, planner)


def capture_step(lane: CudaLane, bucket: StepBucket, step: Callable[[], Tensor]) -> None:
    """Run the step once, capture it on the current stream, and give the bucket to the lane.

    Where there are no graphs the step is run alone. The graph keeps the SMs of the stream it is captured on.
    """
    step()
    if bucket.packed.device.type == "cuda":
        lane.pool = lane.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=lane.pool, stream=stream, capture_error_mode="thread_local"):
            bucket.logits = step()
        bucket.graph = graph
    lane.buckets[bucket.rows] = bucket


def release_memory() -> None:
    """Give back to the driver what nothing refers to any more: lanes refer to themselves through graphs."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
