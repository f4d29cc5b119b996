"""The machine's cores as a device: a compute unit is a core, a lane is a pinned worker thread.

Each lane of each split has its own worker with its own OpenMP team, made once at start and kept, like green
contexts on a GPU. The worker pins itself before its first parallel region, so that its team inherits the
cores. `prepare_process` has to run before torch is imported: idle OpenMP threads must not spin, or lanes on
all cores starve the event loop.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from muxk.kernel.device import DevicePort, ItemDone, ItemFailed, Lane, Runner
from muxk.kernel.work import DecodeWork, Item, Phase, PrefillWork, Split, StepOutput

if TYPE_CHECKING:
    from muxk.kernel.actor import Message

SPLITS_MAX = 7
"""Bound on disjoint splits, so that a machine of 64 cores does not keep 63 teams for each phase."""
CLOSE_S = 10.0
"""How long `close` waits for items in flight: one that hangs must not keep the process from ending."""


def prepare_process() -> None:
    """Set what OpenMP reads when torch loads; call it before anything imports torch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def available_cores() -> list[int]:
    """The cores this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class DeviceHangs(RuntimeError):
    """Items that can not be taken back keep a lane; only a new process has a whole device again."""


class _Launch(NamedTuple):
    item: Item
    waits: list[threading.Event]
    ended: threading.Event


class CpuLane:
    """A worker thread on a fixed set of cores."""

    def __init__(self, name: str, units: range, cores: Sequence[int]) -> None:
        self.name = name
        self.units = units
        self.cores = frozenset(cores[unit] for unit in units)
        self.queue: SimpleQueue[_Launch | None] = SimpleQueue()
        self.ready = threading.Event()
        self.thread: threading.Thread | None = None


class CpuDevice:
    """Implements `kernel.device.Device` over a `Runner` and the cores of this process."""

    def __init__(self, runner: Runner, cores: Sequence[int] | None = None) -> None:
        self._runner = runner
        self._cores = list(cores) if cores is not None else available_cores()
        self.units = len(self._cores)
        self.name = f"cpu:{self.units}"
        self.layers = runner.layers
        self.pages = runner.pages
        self.chunk_tokens_max = runner.chunk_tokens_max
        self.decode_ahead = 1
        self.parked_bytes_per_token = runner.parked_bytes_per_token
        self._lanes: dict[tuple[Phase, int], CpuLane] = {}
        self._ended: dict[int, threading.Event] = {}
        self._port: DevicePort | None = None
        self._idle = threading.Condition()
        self._in_flight = 0

    def splits(self) -> tuple[Split, ...]:
        borders = self.units - 1
        count = min(SPLITS_MAX, borders)
        decode_units = sorted({1 + step * borders // count for step in range(count)}) if count else []
        return tuple(Split(units, self.units - units) for units in decode_units)

    def start(self, port: DevicePort) -> None:
        self._port = port
        self._add_lane(Phase.DECODE, CpuLane("whole", range(self.units), self._cores))
        for split in self.splits():
            decode_range = range(split.decode_units)
            prefill_range = range(split.decode_units, self.units)
            decode_name, prefill_name = f"decode@{split.decode_units}", f"prefill@{split.prefill_units}"
            self._add_lane(Phase.DECODE, CpuLane(decode_name, decode_range, self._cores))
            prefill_lane = CpuLane(prefill_name, prefill_range, self._cores)
            self._add_lane(Phase.PREFILL, prefill_lane)
        for lane in self._lanes.values():
            lane.ready.wait()

    def _add_lane(self, phase: Phase, lane: CpuLane) -> None:
        self._lanes[phase, len(lane.units)] = lane
        lane.thread = threading.Thread(target=self._work, args=(lane,), name=f"lane {lane.name}", daemon=True)
        lane.thread.start()

    def lane(self, phase: Phase, units: int) -> CpuLane:
        if units == self.units:
            phase = Phase.DECODE
        return self._lanes[phase, units]

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        assert isinstance(lane, CpuLane)
        ended = self._ended
        for item_id in [item_id for item_id, event in ended.items() if event.is_set()]:
            del ended[item_id]
        waits = [ended[item_id] for item_id in after if item_id in ended]
        ended[item.item_id] = threading.Event()
        with self._idle:
            self._in_flight += 1
        lane.queue.put(_Launch(item, waits, ended[item.item_id]))

    def discard(self, batch_id: int) -> None:
        self._runner.discard(batch_id)

    def reset(self) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: self._in_flight == 0, timeout=CLOSE_S):
                raise DeviceHangs(f"{self._in_flight} items have not ended within {CLOSE_S:g} s of a crash")
        self._ended.clear()
        self._runner.reset()

    def describe(self) -> Mapping[str, Any]:
        return {"cores": self._cores}

    def close(self) -> None:
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.queue.put(None)
        deadline = time.monotonic() + CLOSE_S
        for lane in lanes.values():
            if lane.thread is not None:
                lane.thread.join(max(0.0, deadline - time.monotonic()))

    # --- on a lane's thread ---

    def _work(self, lane: CpuLane) -> None:
        _settle_thread(lane)
        lane.ready.set()
        while (launch := lane.queue.get()) is not None:
            for event in launch.waits:
                event.wait()
            message = self._run(launch.item)
            launch.ended.set()
            assert self._port is not None
            self._port.post(message)
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()

    def _run(self, item: Item) -> Message:
        assert self._port is not None
        started_ns = self._port.now_ns()
        try:
            decode, output = self._run_work(item)
        except Exception as error:  # the reason goes to the client; the lane serves on
            return ItemFailed(item.item_id, f"{type(error).__name__}: {error}")
        return ItemDone(
            item.item_id,
            started_ns,
            self._port.now_ns(),
            output.tokens,
            output.logprobs,
            output.prompt_logprobs,
            decode,
        )

    def _run_work(self, item: Item) -> tuple[StepOutput | None, StepOutput]:
        """The output of a fused decode step, if there is one, and that of the item's work."""
        work = item.work
        if isinstance(work, PrefillWork):
            tokens = range(item.first_token, item.last_token)
            if item.decode is not None:
                return self._runner.fused(item.decode, work, tokens)
            return None, self._runner.prefill(work, tokens, range(item.first_layer, item.last_layer))
        if isinstance(work, DecodeWork):
            return None, self._runner.decode(work)
        self._runner.probe(work, item.first_layer, item.last_layer)
        return None, StepOutput()


def _settle_thread(lane: CpuLane) -> None:
    """Pin the calling thread, give it its thread count, and make its OpenMP team."""
    import torch

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, lane.cores)
    # No lane is niced: a prefill thread that is pushed aside while it holds the interpreter's lock would hold
    # up decode. That is a reason, not a measurement: the runs that compared both had other load beside them.
    torch.set_num_threads(len(lane.units))
    _set_mkl_threads(len(lane.units))
    deadline = time.monotonic() + 1.0
    # A few regions large enough to be parallel wake every thread of the team once.
    for _ in range(3):
        torch.ones(1 << 18).add_(1.0)
        if time.monotonic() > deadline:
            break


def _set_mkl_threads(threads: int) -> None:
    """MKL's thread count is process-wide unless it is set for the thread; other builds have no MKL."""
    try:
        set_local = ctypes.CDLL(None).MKL_Set_Num_Threads_Local
    except (AttributeError, OSError):
        return
    set_local(ctypes.c_int(threads))
