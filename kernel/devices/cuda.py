"""A card as a device: a unit is an SM, a lane is a stream of a green context.

Partitions, streams and the model come from outside (`Opened`), so that the card can be opened again after
it was lost, and so that everything here runs without one. `kernel/devices/cuda_launcher.py` is the thread
that enqueues; all that touches the card happens there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muxk.kernel.cuda_runner import CudaRunner
from muxk.kernel.device import DeviceLost, DevicePort, ItemFailed, Lane
from muxk.kernel.devices.cuda_clock import LaneClock
from muxk.kernel.devices.cuda_graphs import Graphs, Progress, capture_graphs
from muxk.kernel.devices.cuda_items import CudaLane
from muxk.kernel.devices.cuda_launcher import DRAIN_S, Launcher
from muxk.kernel.devices.cuda_partition import Partitions
from muxk.kernel.devices.cuda_streams import CudaStreams
from muxk.kernel.work import Item, Phase, Split

REBUILDS_MAX = 3
"""Times that a lost card is opened again in one process; the supervisor's own limit is for a minute."""


@dataclass(frozen=True)
class Opened:
    """What a device runs on: replaced as a whole when the card was lost."""

    streams: CudaStreams
    partitions: Partitions
    runner: CudaRunner
    graphs_budget_bytes: int
    graph_rows: tuple[int, ...]
    """Buckets of decode graphs."""
    memory: Mapping[str, int]
    """How the memory was shared out, for the state."""


class CudaDevice:
    """Implements `kernel.device.Device` over a `CudaRunner` and the partitions of a card."""

    def __init__(self, name: str, opened: Opened, reopen: Callable[[], Opened]) -> None:
        """`reopen` loads everything once more, on the launcher's thread, or raises what prevents it."""
        self.name = name
        self.units = opened.partitions.units
        self.layers = opened.runner.layers
        self.pages = opened.runner.pages
        self.chunk_tokens_max = opened.runner.chunk_tokens_max
        self.parked_bytes_per_token = opened.runner.parked_bytes_per_token
        self.decode_ahead = 1
        self._opened = opened
        self._reopen = reopen
        self._splits = opened.partitions.splits()
        self._lanes: dict[tuple[Phase, int], CudaLane] = {}
        self._graphs = Graphs(opened.graphs_budget_bytes)
        self._rebuilds = 0
        self._port: DevicePort | None = None
        self._launcher: Launcher | None = Launcher(opened.streams, name)

    def splits(self) -> tuple[Split, ...]:
        return self._splits

    def prepare(self, progress: Progress) -> None:
        """Open lanes and capture decode graphs: seconds to a minute. `start` does it where nobody did."""
        launcher = self._running()
        launcher.call(lambda: self._prepare(launcher, progress))

    def start(self, port: DevicePort) -> None:
        self._port = port
        if not self._lanes:
            self.prepare(lambda what, done: None)
        self._running().listen(port)
        self._running().call(self._running().anchor)

    def lane(self, phase: Phase, units: int) -> CudaLane:
        if units == self.units:
            phase = Phase.DECODE
        return self._lanes[phase, units]

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        """Raises DeviceLost when the card is gone: whoever launches is restarted, and rebuilds it."""
        assert isinstance(lane, CudaLane)
        launcher = self._running()
        refused = launcher.launch(lane, item, after)
        if launcher.lost is not None:
            raise DeviceLost(launcher.lost)
        if refused is not None and self._port is not None:
            self._port.post(ItemFailed(item.item_id, refused))

    def discard(self, batch_id: int) -> None:
        launcher, runner = self._running(), self._opened.runner
        if launcher.lost is None:
            launcher.post(lambda: runner.discard(batch_id))

    def reset(self) -> None:
        """Drop what has not begun, wait for the rest, forget parked state; open a lost card again.

        Raises:
            DeviceLost: items hang, or the card can not be opened again in this process.
        """
        launcher = self._running()
        try:
            left = launcher.call(launcher.drain, 2 * DRAIN_S)
        except TimeoutError:
            raise DeviceLost(f"a launch has not returned within {2 * DRAIN_S:g} s") from None
        if launcher.lost is not None:
            launcher.call(lambda: self._rebuild(launcher))
        elif left:
            raise DeviceLost(f"{left} items have not ended within {DRAIN_S:g} s of a crash")
        else:
            launcher.call(self._opened.runner.reset)

    def close(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return
        launcher.post(lambda: self._close(launcher))
        launcher.stop(2 * DRAIN_S)

    def describe(self) -> dict[str, Any]:
        """For the state: partitions, lanes, graphs and memory, in bytes."""
        launcher, partitions = self._launcher, self._opened.partitions
        lanes = self._lanes.values()
        return {
            "partitions": partitions.describe(),
            "shared_units": partitions.why_not,
            "lanes": {lane.name: lane.state.bytes for lane in lanes},
            "graphs": self._graphs.describe(),
            "memory": dict(self._opened.memory),
            "clock_corrections": sum(lane.clock.corrections for lane in lanes),
            "rebuilds": self._rebuilds,
            "lost": None if launcher is None else launcher.lost,
        }

    def _running(self) -> Launcher:
        assert self._launcher is not None, "the device is closed"
        return self._launcher

    # --- on the launcher's thread ---

    def _prepare(self, launcher: Launcher, progress: Progress) -> None:
        opened = self._opened
        wanted = [(Phase.DECODE, range(self.units))]
        for split in self._splits:
            wanted.append((Phase.DECODE, range(split.decode_units)))
            wanted.append((Phase.PREFILL, range(self.units - split.prefill_units, self.units)))
        lanes: dict[tuple[Phase, int], CudaLane] = {}
        for place, (phase, units) in enumerate(wanted):
            progress("opening lanes", place / len(wanted))
            if (phase, len(units)) not in lanes:
                lanes[phase, len(units)] = self._open_lane(opened, phase, units)
        decode = [lane for (phase, _), lane in lanes.items() if phase is Phase.DECODE]
        budget, buckets = opened.graphs_budget_bytes, opened.graph_rows
        self._graphs = capture_graphs(opened.runner, decode, opened.streams, budget, progress, buckets)
        self._lanes = lanes
        launcher.use(opened.streams, opened.runner, list(lanes.values()))

    def _open_lane(self, opened: Opened, phase: Phase, units: range) -> CudaLane:
        """On the stream of its own partition, which its workspaces are warmed on."""
        count = len(units)
        whole = count == self.units
        name = "whole" if whole else f"{phase}@{count}"
        stream = opened.streams.stream(opened.partitions.streams(phase, count))
        with stream.current():
            # Both phases take turns on the whole device, and a prefill lane runs steps too.
            state = opened.runner.open_lane(Phase.PREFILL if whole else phase, count)
        return CudaLane(name, phase, units, stream, LaneClock(opened.streams), state)

    def _rebuild(self, launcher: Launcher) -> None:
        reason = launcher.lost
        if self._rebuilds >= REBUILDS_MAX:
            raise DeviceLost(f"{reason}; it was opened again {REBUILDS_MAX} times already")
        self._rebuilds += 1
        self._free(launcher)
        try:
            opened = self._reopen()
            self._check_same(opened)
            self._opened = opened
            self._prepare(launcher, lambda what, done: None)
            launcher.anchor()
        except Exception as error:
            raise DeviceLost(
                f"{reason}; it can not be opened again in this process ({error}): start a new one"
            ) from error

    def _check_same(self, opened: Opened) -> None:
        """The actors were built for a device of these sizes."""
        found = (opened.partitions.units, opened.partitions.splits(), opened.runner.pages)
        if found != (self.units, self._splits, self.pages):
            raise DeviceLost(f"units, splits and pages are {found} now")

    def _close(self, launcher: Launcher) -> None:
        """Streams and contexts last, and not under an item that hangs."""
        if launcher.drain() == 0:
            self._free(launcher)

    def _free(self, launcher: Launcher) -> None:
        """Lanes first: where memory is freed that a stream has used, torch records an event on that stream,
        which has to be there still. Each by itself: of a lost card every call may raise."""
        self._lanes = {}
        launcher.release()
        for free in (self._opened.runner.close, self._opened.partitions.close):
            try:
                free()
            except Exception as error:  # nothing can be done about it, and the reason is known
                _ = error
