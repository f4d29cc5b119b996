"""Streams and events of a card that is not there, and a model on them: what is enqueued runs on CPU threads.

Each stream is a thread that runs what it is given in order, so work of two streams overlaps as it would on a
card. The card's clock has an offset and a drift; the card can be lost at any moment.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from muxk.kernel.cuda_runner import CudaLaneState
from muxk.kernel.devices.cuda import CudaDevice, Opened
from muxk.kernel.devices.cuda_graphs import BUCKETS
from muxk.kernel.devices.cuda_streams import CudaEvent, CudaStream, DeviceMemory
from muxk.kernel.token_pool import TokenPool
from muxk.kernel.work import (
    PAGE_SIZE,
    DecodeWork,
    Phase,
    PrefillWork,
    ProbeWork,
    Split,
    StepOutput,
    chunk_rows,
    int32_array,
)

GIB = 1 << 30
ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"


class _Mark:
    """Where a stream was when an event was recorded."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.card_ns = 0


class FakeEvent:
    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self.mark = _Mark()

    def record(self, stream: CudaStream) -> None:
        assert isinstance(stream, FakeStream)
        self._streams.check()
        mark = self.mark = _Mark()
        stream.enqueue(lambda: self._pass(mark))

    def _pass(self, mark: _Mark) -> None:
        mark.card_ns = self._streams.card_ns()
        mark.done.set()

    def done(self) -> bool:
        self._streams.check()
        return self.mark.done.is_set()

    def elapsed_ns(self, later: CudaEvent) -> int:
        assert isinstance(later, FakeEvent)
        assert self.mark.done.is_set()
        assert later.mark.done.is_set()
        return later.mark.card_ns - self.mark.card_ns


class FakeStream:
    """A thread that runs what was enqueued, in order."""

    def __init__(self, streams: FakeStreams, handle: int) -> None:
        self._streams = streams
        self.handle = handle
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"stream {handle}", daemon=True)
        self.thread.start()

    def enqueue(self, function: Callable[[], None]) -> None:
        self._work.put(function)

    def wait(self, event: CudaEvent) -> None:
        assert isinstance(event, FakeEvent)
        self._streams.check()
        mark = event.mark
        self.enqueue(lambda: self._await(mark))

    def _await(self, mark: _Mark) -> None:
        while not mark.done.wait(0.005):
            if self._streams.fault() is not None:
                return

    @contextmanager
    def current(self) -> Iterator[None]:
        before = self._streams.current
        self._streams.current = self
        try:
            yield
        finally:
            self._streams.current = before

    def end(self) -> None:
        self._work.put(None)
        self.thread.join(10)

    def _run(self) -> None:
        while (function := self._work.get()) is not None:
            if self._streams.fault() is not None:
                continue
            try:
                function()
            except Exception as error:
                self._streams.lose(f"CUDA error: device-side assert triggered ({error})")


class FakeStreams:
    """Implements `CudaStreams`."""

    def __init__(self, drift: float = 0.0) -> None:
        self._drift = drift
        self._fault: str | None = None
        self.made: dict[int, FakeStream] = {}
        self.current: FakeStream | None = None
        self.used_bytes = 0
        self.bound: list[str] = []

    def card_ns(self) -> int:
        return 7_000_000_000 + round(time.monotonic_ns() * (1.0 + self._drift))

    def bind(self) -> None:
        self.bound.append(threading.current_thread().name)

    def stream(self, handle: int) -> FakeStream:
        self.check()
        if handle not in self.made:
            self.made[handle] = FakeStream(self, handle)
        return self.made[handle]

    def event(self) -> FakeEvent:
        self.check()
        return FakeEvent(self)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(80 * GIB - self.used_bytes, 80 * GIB)

    def fault(self) -> str | None:
        return self._fault

    def check(self) -> None:
        if self._fault is not None:
            raise RuntimeError(f"{self._fault}\nCUDA kernel errors might be asynchronously reported")

    def lose(self, reason: str = ILLEGAL_ACCESS) -> None:
        self._fault = self._fault or reason

    def enqueue(self, function: Callable[[], None]) -> None:
        """On the current stream, as a kernel launch does."""
        self.check()
        assert self.current is not None, "a kernel was launched on no lane's stream"
        self.current.enqueue(function)

    def close(self) -> None:
        for stream in self.made.values():
            stream.end()


class FakePartitions:
    """Streams of numbered handles; implements `Partitions`."""

    def __init__(self, units: int, decode_units: Sequence[int], why_not: str | None = None) -> None:
        self.units = units
        self.why_not = why_not
        self._decode_units = tuple(decode_units)
        self.closed = False

    def splits(self) -> tuple[Split, ...]:
        return tuple(Split(units, self.units - units) for units in self._decode_units)

    def streams(self, phase: Phase, units: int) -> int:
        assert not self.closed
        return units if phase is Phase.DECODE else 1000 + units

    def describe(self) -> dict[str, object]:
        return {"splits": [split.decode_units for split in self.splits()]}

    def close(self) -> None:
        self.closed = True


class FakeLaneState:
    def __init__(self, phase: Phase, units: int) -> None:
        self.phase, self.units = phase, units
        self.bytes = 1 << 20
        self.graphs: list[int] = []


class FakePending:
    """Can be read once the stream got to it."""

    def __init__(self) -> None:
        self.output: StepOutput | None = None

    def read(self) -> StepOutput:
        assert self.output is not None, "read before the item had ended"
        return self.output


class PageUse:
    """Sees a page that is written by one kernel while another one reads or writes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self._next = 0

    @contextmanager
    def of(self, reads: frozenset[int], writes: frozenset[int]) -> Iterator[None]:
        with self._lock:
            for other_reads, other_writes in self._running.values():
                clash = (writes & (other_reads | other_writes)) | (reads & other_writes)
                assert not clash, f"pages {sorted(clash)} are in use on another lane"
            self._next += 1
            number = self._next
            self._running[number] = (reads, writes)
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]


class FakeRunner:
    """A model whose tokens are hashes of all tokens before them; implements `CudaRunner`."""

    chunk_tokens_max = 4096
    parked_bytes_per_token = 16

    def __init__(self, streams: FakeStreams, layers: int = 4, pages: int = 64, item_s: float = 0.0) -> None:
        self.streams = streams
        self.layers, self.pages = layers, pages
        self.item_s = item_s
        self.gate: threading.Event | None = None
        """What every kernel of a prefill waits for, where a test sets one."""
        self.log: list[tuple[str, object, range]] = []
        """What was enqueued: (call, batch or step, layers), in order."""
        self.ran: list[tuple[str, object]] = []
        self.discarded: list[int] = []
        self.resets = 0
        self.closed = False
        self.graph_bytes = 1 << 20
        self.fails: dict[object, Exception] = {}
        """By batch, or by (batch, first layer), or by step: raised by the call that enqueues it."""
        self.parked: dict[int, int] = {}
        self._pool = TokenPool(pages, None)
        self._lock = threading.Lock()
        self._pages_used = PageUse()
        self._nap = threading.Event()

    def open_lane(self, phase: Phase, units: int) -> FakeLaneState:
        assert self.streams.current is not None
        return FakeLaneState(phase, units)

    def capture(self, lane: CudaLaneState, rows: int) -> None:
        assert isinstance(lane, FakeLaneState)
        if ("graph", rows) in self.fails:
            raise self.fails["graph", rows]
        self.streams.used_bytes += self.graph_bytes
        lane.graphs.append(rows)

    def prefill(
        self, lane: CudaLaneState, work: PrefillWork, tokens: range, layers: range, item_id: int
    ) -> FakePending:
        self.log.append(("prefill", work.batch_id, layers))
        self._maybe_fail(work.batch_id, (work.batch_id, layers.start))
        if layers.start:
            assert self.parked.pop(work.batch_id) == layers.start
        if layers.stop < self.layers:
            self.parked[work.batch_id] = layers.stop
        pending, gate = FakePending(), self.gate
        self.streams.enqueue(lambda: self._prefill(work, tokens, layers, pending, gate))
        return pending

    def decode(self, lane: CudaLaneState, work: DecodeWork, item_id: int) -> FakePending:
        self.log.append(("decode", work.step_id, range(self.layers)))
        self._maybe_fail(work.step_id)
        pending = FakePending()
        self.streams.enqueue(lambda: self._decode(work, pending))
        return pending

    def fused(
        self, lane: CudaLaneState, decode: DecodeWork, work: PrefillWork, tokens: range, item_id: int
    ) -> tuple[FakePending, FakePending]:
        self.log.append(("fused", work.batch_id, range(self.layers)))
        step, chunk = FakePending(), FakePending()
        self.streams.enqueue(lambda: self._decode(decode, step))
        everything = range(self.layers)
        self.streams.enqueue(lambda: self._prefill(work, tokens, everything, chunk, self.gate))
        return step, chunk

    def probe(self, lane: CudaLaneState, work: ProbeWork, layers: range) -> None:
        self.streams.enqueue(lambda: self._spend("probe", work.probe_id))

    def discard(self, batch_id: int) -> None:
        self.discarded.append(batch_id)
        self.parked.pop(batch_id, None)

    def reset(self) -> None:
        self.resets += 1
        self.parked.clear()
        self._pool.forget_steps()

    def close(self) -> None:
        self.closed = True

    def _maybe_fail(self, *keys: object) -> None:
        for key in keys:
            if key in self.fails:
                raise self.fails[key]

    # --- on a stream's thread ---

    def _prefill(
        self,
        work: PrefillWork,
        tokens: range,
        layers: range,
        pending: FakePending,
        gate: threading.Event | None,
    ) -> None:
        with self._pages_used.of(*_pages_of(work, tokens)):
            while gate is not None and not gate.wait(0.01):
                if self.streams.fault() is not None:
                    return
            self._spend("prefill", work.batch_id)
            with self._lock:
                ends = layers.stop == self.layers
                pending.output = self._pool.prefill(work, tokens) if ends else StepOutput()

    def _decode(self, work: DecodeWork, pending: FakePending) -> None:
        table = int32_array(work.page_table).reshape(work.rows, work.pages_per_row)
        written = table[np.arange(work.rows), int32_array(work.positions) // PAGE_SIZE]
        with self._pages_used.of(frozenset(table.ravel().tolist()) - {0}, frozenset(written.tolist())):
            self._spend("decode", work.step_id)
            with self._lock:
                pending.output = self._pool.decode(work)

    def _spend(self, call: str, key: object) -> None:
        if self.item_s:
            self._nap.wait(self.item_s)
        self.ran.append((call, key))


def _pages_of(work: PrefillWork, tokens: range) -> tuple[frozenset[int], frozenset[int]]:
    """Pages that a chunk reads and those that it writes; of rows that ended before, none."""
    table = int32_array(work.page_table).reshape(work.rows, work.pages_per_row)
    reads: set[int] = set()
    writes: set[int] = set()
    for row in chunk_rows(work, tokens):
        first, last = row.reused_tokens, row.reused_tokens + row.new_tokens - 1
        reads |= set(table[row.row, : last // PAGE_SIZE + 1].tolist())
        writes |= set(table[row.row, first // PAGE_SIZE : last // PAGE_SIZE + 1].tolist())
    return frozenset(reads), frozenset(writes)


def fake_device(
    streams: FakeStreams,
    runner: FakeRunner,
    *,
    units: int = 2,
    decode_units: Sequence[int] = (1,),
    reopen: Callable[[], Opened] | None = None,
) -> CudaDevice:
    """A card of so many SMs. Reopened, it has new streams and the same model, unless told otherwise."""
    opened = opened_with(streams, runner, units, decode_units)
    return CudaDevice("cuda:0", opened, reopen or (lambda: opened_again(runner, units, decode_units)))


def opened_with(
    streams: FakeStreams, runner: FakeRunner, units: int = 2, decode_units: Sequence[int] = (1,)
) -> Opened:
    return Opened(
        streams, FakePartitions(units, decode_units), runner, 8 << 20, BUCKETS, {"kv_pages": runner.pages}
    )


def opened_again(runner: FakeRunner, units: int, decode_units: Sequence[int]) -> Opened:
    streams = FakeStreams()
    again = FakeRunner(streams, runner.layers, runner.pages, runner.item_s)
    return opened_with(streams, again, units, decode_units)
