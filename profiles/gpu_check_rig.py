"""What the stages of gpu_check work on: a card with its partitions, or nothing but the shape of one.

In a dry run a "stream" does its work at once on the CPU and partitions are those of the driver that is
found, or nominal ones: every line of a stage runs that needs no card, on sizes that take no time, and no
figure means anything.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from muxk.kernel.devices.cuda_driver import CudaUnavailable, open_driver, prepare_process
from muxk.kernel.devices.cuda_partition import Partitions, open_partitions
from muxk.kernel.devices.cuda_streams import CudaEvent, CudaStream, CudaStreams, DeviceMemory, TorchStreams
from muxk.kernel.work import Phase, Split
from muxk.models.config import ModelConfig
from muxk.models.cuda_lane import release_memory

DRY_UNITS = 132
DRY_MENU = (16, 64)
POLL_S = 20e-6


class BoxIsOver(Exception):
    """The time of a stage is used up: what it has is kept."""


@dataclass(frozen=True)
class TimeBox:
    """Until when a stage may go on, and what it has found until now."""

    ends_s: float
    found: dict[str, Any]
    save: Callable[[], None]
    """Writes `found`: it is not lost when the stage hangs later."""

    @staticmethod
    def of(seconds: float, found: dict[str, Any], save: Callable[[], None]) -> TimeBox:
        return TimeBox(time.monotonic() + seconds, found, save)

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_s - time.monotonic())

    def check(self) -> None:
        """Between two parts of a stage. Raises BoxIsOver."""
        self.save()
        if self.left_s <= 0.0:
            raise BoxIsOver


@dataclass(frozen=True)
class Sizes:
    """How much is computed."""

    copy_bytes: int
    tokens: tuple[int, ...]
    """Rows of the products that are timed."""
    repeats: int
    rows: int
    context: int
    """Of the decode step."""
    model: ModelConfig
    background_ms: float
    """Work that is kept on the other lane while one is timed."""


LLAMA_8B = ModelConfig(
    architecture="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128_256,
    rope_theta=500_000.0,
    rms_epsilon=1e-5,
    tied_embeddings=False,
    max_context_tokens=32_768,
)
TINY = ModelConfig(
    architecture="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocabulary=257,
    rope_theta=10_000.0,
    rms_epsilon=1e-5,
    tied_embeddings=False,
    max_context_tokens=512,
)
FULL = Sizes(1 << 30, (64, 512, 4096), 20, 64, 1024, LLAMA_8B, 30.0)
DRY = Sizes(1 << 16, (4, 8), 2, 4, 40, TINY, 0.0)


class Rig:
    """A card for the stages; `close` when all are done."""

    def __init__(self, *, dry: bool, index: int = 0) -> None:
        self.dry = dry
        self.index = index
        self.sizes = DRY if dry else FULL
        self.torch_device = "cpu" if dry else f"cuda:{index}"
        self.device = torch.device(self.torch_device)
        self.dtype = torch.float32 if dry else torch.bfloat16
        prepare_process()
        if dry:
            torch.set_num_threads(1)  # sizes this small are done before a second thread has woken
        self.streams: CudaStreams = HostStreams() if dry else TorchStreams(index)
        self.streams.bind()
        self._partitions: Partitions | None = None

    @property
    def partitions(self) -> Partitions:
        """Opened when first asked for, and kept."""
        if self._partitions is None:
            self._partitions = self.open_partitions()
        return self._partitions

    def open_partitions(self) -> Partitions:
        """Once more: for what opening them costs. Whoever asks closes them."""
        try:
            return open_partitions(self.index)
        except CudaUnavailable:
            if not self.dry:
                raise
            return NominalPartitions()

    def lane(self, phase: Phase, units: int) -> CudaStream:
        return self.streams.stream(self.partitions.streams(phase, units))

    def splits(self, count: int) -> tuple[Split, ...]:
        """So many of the menu, evenly from its first to its last."""
        menu = self.partitions.splits()
        if len(menu) <= count:
            return menu
        return tuple(menu[place * (len(menu) - 1) // (count - 1)] for place in range(count))

    def settle(self) -> None:
        """Wait for all of the card."""
        if not self.dry:
            torch.cuda.synchronize(self.index)

    def time_ns(self, stream: CudaStream, work: Callable[[], object], repeats: int | None = None) -> float:
        """Median time of `work` on a stream by events, one repeat after the other, after one to warm up."""
        count = self.sizes.repeats if repeats is None else repeats
        marks = [self.streams.event() for _ in range(count + 1)]
        with stream.current():
            work()
            marks[0].record(stream)
            for mark in marks[1:]:
                work()
                mark.record(stream)
        self.wait(marks[-1])
        return median(float(a.elapsed_ns(b)) for a, b in itertools.pairwise(marks))

    def wait(self, event: CudaEvent) -> None:
        while not event.done():
            time.sleep(POLL_S)

    def header(self) -> Mapping[str, Any]:
        """What every file begins with."""
        card = _card(self.index)
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "dry_run": self.dry,
            "card": card.get("name"),
            "units": card.get("units"),
            "driver_cuda": card.get("driver_cuda"),
            "driver_release": card.get("driver_release"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
        }

    def close(self) -> None:
        partitions, self._partitions = self._partitions, None
        if partitions is not None:
            self.settle()
            release_memory()  # while the streams that used it are there
            partitions.close()


def _card(index: int) -> dict[str, Any]:
    from muxk.kernel.devices.cuda_facts import gather_facts

    facts = gather_facts()
    found: dict[str, Any] = {"driver_cuda": facts.driver_cuda, "driver_release": facts.driver_release}
    cards = [card for card in facts.cards if card.index == index]
    return found | ({"name": cards[0].name, "units": cards[0].units} if cards else {})


def memory_free(index: int) -> int | None:
    """By the driver and not by torch: contexts are in it. None where there is no card."""
    try:
        driver = open_driver()
        primary = driver.retain_primary(index)
        try:
            with driver.current(primary):
                return driver.memory_free()
        finally:
            driver.release_primary(index)
    except CudaUnavailable:
        return None


# --- a card that is not there ---


class HostEvent:
    def __init__(self) -> None:
        self._at_ns = 0

    def record(self, stream: CudaStream) -> None:
        self._at_ns = time.monotonic_ns()

    def done(self) -> bool:
        return True

    def elapsed_ns(self, later: CudaEvent) -> int:
        assert isinstance(later, HostEvent)
        return later._at_ns - self._at_ns


class HostStream:
    """Work on it has ended when it is enqueued."""

    def wait(self, event: CudaEvent) -> None:
        assert event.done()

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()


class HostStreams:
    """Implements `CudaStreams` without a card."""

    def bind(self) -> None:
        pass

    def stream(self, handle: int) -> HostStream:
        return HostStream()

    def event(self) -> HostEvent:
        return HostEvent()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(16 << 30, 16 << 30)

    def fault(self) -> str | None:
        return None


class NominalPartitions:
    """The sizes of a card's splits, where no driver tells them."""

    units = DRY_UNITS
    why_not: str | None = "there is no driver here"

    def splits(self) -> tuple[Split, ...]:
        return tuple(Split(units, self.units - units) for units in DRY_MENU)

    def streams(self, phase: Phase, units: int) -> int:
        return units

    def describe(self) -> Mapping[str, object]:
        return {"units": self.units, "why_not": self.why_not}

    def close(self) -> None:
        pass


@contextmanager
def busy(rig: Rig, stream: CudaStream, load: Callable[[], object], enough: Sequence[int]) -> Iterator[None]:
    """Keep a stream at work while the block runs: `load` is enqueued as often as `enough` has entries."""
    with stream.current():
        for _ in enough:
            load()
    yield
    rig.settle()
