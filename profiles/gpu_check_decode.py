"""Stage 4: the decode step of a model of real size: its time, its launch, and its share of the card's
bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from muxk.kernel.cuda_runner import Pending
from muxk.kernel.devices.cuda_streams import CudaEvent, CudaStream, first_line
from muxk.kernel.work import PAGE_SIZE, DecodeWork, Phase, SamplingColumns, int32_bytes
from muxk.models.config import ModelConfig
from muxk.models.cuda_lane import CudaLane
from muxk.models.cuda_load import RandomCardWeights, load_cuda_runner, page_bytes, weight_bytes
from muxk.models.cuda_runner import CudaModelRunner
from muxk.profiles.gpu_check_rig import BoxIsOver, Rig, TimeBox

STEPS = 40
LAUNCH_GOAL_MS = 0.5
BANDWIDTH_GOAL = 0.8
SPLITS = 3
"""Of the menu, beside the whole device."""


def check_decode(rig: Rig, box: TimeBox) -> dict[str, Any]:
    """With and without a graph on the whole device, with one on some splits."""
    sizes, units = rig.sizes, rig.partitions.units
    copy = _copy_bandwidth(rig)
    began = time.perf_counter_ns()
    pages = sizes.rows * (-(-(sizes.context + STEPS * 4) // PAGE_SIZE)) + 2
    runner = load_cuda_runner(
        RandomCardWeights(sizes.model, rig.device, rig.dtype),
        rig.torch_device,
        rig.dtype,
        device_units=units,
        pages=pages,
        chunk_tokens_max=max(64, sizes.rows),
        rows_max=sizes.rows,
    )
    found = box.found
    found |= {
        "rows": sizes.rows,
        "context": sizes.context,
        "operators": runner.operators_name,
        "load_s": (time.perf_counter_ns() - began) / 1e9,
        "weights_bytes": weight_bytes(sizes.model, rig.dtype.itemsize),
        "copy_bytes_per_ns": copy,
        "lanes": [],
    }
    bench = _Bench(rig, runner, copy)
    try:
        found["lanes"].append(bench.lane(units, graph=None))
        for count in (units, *(split.decode_units for split in rig.splits(SPLITS))):
            box.check()
            found["lanes"].append(bench.lane(count, graph=sizes.rows))
    except BoxIsOver:
        found["left_out"] = "the time of the stage was over"
    finally:
        runner.close()
    whole = found["lanes"][1] if len(found["lanes"]) > 1 else found["lanes"][0]
    found["launch_under_goal"] = whole["launch_ms_median"] < LAUNCH_GOAL_MS
    found["graph_launch_under_goal"] = whole.get("graph_launch_ms_median", LAUNCH_GOAL_MS) < LAUNCH_GOAL_MS
    found["bandwidth_over_goal"] = whole["share_of_copy_bandwidth"] >= BANDWIDTH_GOAL
    return found


def step_bytes(model: ModelConfig, itemsize: int, rows: int, context: int) -> int:
    """Read in one step: all weights but the embedding table, of which `rows` rows are, and the rows' KV."""
    table = model.vocabulary * model.hidden * itemsize
    weights = weight_bytes(model, itemsize) - (0 if model.tied_embeddings else table)
    return weights + rows * context * page_bytes(model, itemsize) // PAGE_SIZE


def _copy_bandwidth(rig: Rig) -> float:
    """Bytes read and written a ns, by a kernel that copies (and negates) on the whole device."""
    words = rig.sizes.copy_bytes // 8
    source = torch.zeros(words, dtype=torch.float32, device=rig.device)
    target = torch.empty_like(source)
    rig.settle()
    stream = rig.lane(Phase.DECODE, rig.partitions.units)
    return 8 * words / max(1.0, rig.time_ns(stream, lambda: torch.neg(source, out=target)))


@dataclass(frozen=True)
class _Launch:
    """A step on its way."""

    begin: CudaEvent
    end: CudaEvent
    host_ns: int
    """For enqueuing it: tables, plan, graph, sampling."""
    pending: Pending


class _Bench:
    """Steps of the same rows on one lane after the other."""

    def __init__(self, rig: Rig, runner: CudaModelRunner, copy: float) -> None:
        self._rig, self._runner, self._copy = rig, runner, copy
        self._step = 0

    def lane(self, units: int, graph: int | None) -> dict[str, Any]:
        """A lane of so many SMs, with a graph for so many rows or kernel by kernel."""
        rig, stream = self._rig, self._rig.lane(Phase.DECODE, units)
        before = rig.streams.memory().free
        about: dict[str, Any] = {"units": units, "graph": graph is not None}
        with stream.current():
            lane = self._runner.open_lane(Phase.DECODE, units)
            rig.settle()
            if graph is not None:
                about |= self._captured(lane, graph)
        about["bytes"] = before - rig.streams.memory().free
        return about | self._steps(stream, lane) | self._replays(stream, lane)

    def _captured(self, lane: CudaLane, rows: int) -> dict[str, Any]:
        began = time.perf_counter_ns()
        try:
            self._runner.capture(lane, rows)
        except Exception as error:
            return {"graph": False, "capture_failed": first_line(error)}
        self._rig.settle()
        return {"capture_ms": (time.perf_counter_ns() - began) / 1e6}

    def _steps(self, stream: CudaStream, lane: CudaLane) -> dict[str, Any]:
        """First one at a time, then each launched while the one before it runs, as a server does."""
        count = 3 if self._rig.dry else STEPS
        launches, alone = [], []
        for place in range(count + 2):
            launch = self._launched(stream, lane, place)
            self._ended(launch)
            launches.append(launch.host_ns)
            alone.append(launch.begin.elapsed_ns(launch.end))
        chain = [self._launched(stream, lane, 0)]
        for place in range(1, count + 2):
            chain.append(self._launched(stream, lane, place))
            self._ended(chain[-2])
        self._ended(chain[-1])
        times = [one.end.elapsed_ns(next_one.end) for one, next_one in pairwise(chain)]
        return self._figures(launches[2:], alone[2:], times[1:])

    def _launched(self, stream: CudaStream, lane: CudaLane, place: int) -> _Launch:
        rig, work = self._rig, self._work(self._rig.sizes.context - 1 + place)
        begin, end = rig.streams.event(), rig.streams.event()
        with stream.current():
            begin.record(stream)
            began = time.perf_counter_ns()
            pending = self._runner.decode(lane, work, work.step_id)
            host_ns = time.perf_counter_ns() - began
            end.record(stream)
        return _Launch(begin, end, host_ns, pending)

    def _ended(self, launch: _Launch) -> None:
        self._rig.wait(launch.end)
        launch.pending.read()

    def _replays(self, stream: CudaStream, lane: CudaLane) -> dict[str, Any]:
        """The host's time for the graph by itself: without tables, plan and sampling."""
        bucket = lane.bucket(self._rig.sizes.rows)
        if bucket is None or bucket.graph is None:
            return {}
        times = []
        with stream.current():
            for _ in range(10):
                began = time.perf_counter_ns()
                bucket.replay()
                times.append(time.perf_counter_ns() - began)
                self._rig.settle()
        return {"graph_launch_ms_median": median(times) / 1e6}

    def _figures(self, launches: Sequence[int], alone: Sequence[int], times: Sequence[int]) -> dict[str, Any]:
        """`step_ms` of steps that follow each other, `waited_for` of steps that the host waits for."""
        rig, sizes = self._rig, self._rig.sizes
        moved = step_bytes(sizes.model, rig.dtype.itemsize, sizes.rows, sizes.context)
        step_ns, alone_ns = max(1.0, median(times)), max(1.0, median(alone))
        return {
            "launch_ms_median": median(launches) / 1e6,
            "launch_ms_max": max(launches) / 1e6,
            "step_ms_median": step_ns / 1e6,
            "step_ms_max": max(times) / 1e6,
            "bytes_per_ns": moved / step_ns,
            "share_of_copy_bandwidth": moved / step_ns / self._copy,
            "waited_for_step_ms_median": alone_ns / 1e6,
            "waited_for_share_of_copy_bandwidth": moved / alone_ns / self._copy,
        }

    def _work(self, position: int) -> DecodeWork:
        """Greedy rows, each with pages of its own."""
        rows = self._rig.sizes.rows
        each = -(-(self._rig.sizes.context + STEPS * 4) // PAGE_SIZE)
        self._step += 1
        table = np.arange(1, rows * each + 1, dtype=np.int32).reshape(rows, each)
        one = np.ones(rows, dtype=np.float32).tobytes()
        zeros = bytes(4 * rows)
        sampling = SamplingColumns(zeros, one, zeros, bytes(8 * rows), zeros, greedy=True)
        return DecodeWork(
            step_id=self._step,
            version=1,
            requests=tuple(range(rows)),
            tokens=int32_bytes([5] * rows),
            positions=int32_bytes([position] * rows),
            page_table=table.tobytes(),
            pages_per_row=each,
            context_tokens=rows * (position + 1),
            sampling=sampling,
        )
