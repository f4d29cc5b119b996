"""What the CUDA device uses of torch.cuda: streams that somebody else made, events, memory.

It goes through these protocols so that the whole device, launcher thread included, runs in CI on streams
that a test makes up.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol


class DeviceMemory(NamedTuple):
    """Bytes of the card, as the driver tells them."""

    free: int
    total: int


class CudaEvent(Protocol):
    """A mark in a stream. It may be recorded again once nobody waits for what it marked."""

    def record(self, stream: CudaStream) -> None:
        """Mark where the stream is now: done when all that was enqueued before has ended."""

    def done(self) -> bool:
        """Asks and does not wait. Raises when the device is lost."""

    def elapsed_ns(self, later: CudaEvent) -> int:
        """From this event to a later one of the same stream; both done."""


class CudaStream(Protocol):
    """A stream of a partition, made and destroyed by who partitioned the device."""

    def wait(self, event: CudaEvent) -> None:
        """What is enqueued from now on starts after the event as it was recorded last. The host goes on."""

    def current(self) -> AbstractContextManager[object]:
        """Make it the calling thread's current stream for a `with` block."""


class CudaStreams(Protocol):
    """One card, as one thread uses it."""

    def bind(self) -> None:
        """Make the card current in the calling thread."""

    def stream(self, handle: int) -> CudaStream:
        """Wrap a raw `CUstream`."""

    def event(self) -> CudaEvent:
        """A new event that takes times."""

    def memory(self) -> DeviceMemory: ...

    def fault(self) -> str | None:
        """Why every further call will fail; None while the card's context is sound."""


def _cuda() -> Any:
    """Not at import: nothing of torch is loaded where there is no card. Much of it has no types."""
    import torch

    return torch.cuda


class TorchEvent:
    """A `torch.cuda.Event` with timing."""

    def __init__(self) -> None:
        self.event = _cuda().Event(enable_timing=True)

    def record(self, stream: CudaStream) -> None:
        assert isinstance(stream, TorchStream)
        self.event.record(stream.stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def elapsed_ns(self, later: CudaEvent) -> int:
        assert isinstance(later, TorchEvent)
        elapsed_ms: float = self.event.elapsed_time(later.event)
        return round(elapsed_ms * 1e6)


class TorchStream:
    """A `torch.cuda.ExternalStream`: torch keeps the handle and does not own it."""

    def __init__(self, handle: int, index: int) -> None:
        self.stream = _cuda().ExternalStream(handle, device=index)

    def wait(self, event: CudaEvent) -> None:
        assert isinstance(event, TorchEvent)
        self.stream.wait_event(event.event)

    def current(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = _cuda().stream(self.stream)
        return context


class TorchStreams:
    """The card of an index, as torch counts them."""

    def __init__(self, index: int) -> None:
        self._index = index

    def bind(self) -> None:
        _cuda().set_device(self._index)

    def stream(self, handle: int) -> TorchStream:
        return TorchStream(handle, self._index)

    def event(self) -> TorchEvent:
        return TorchEvent()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(*_cuda().mem_get_info(self._index))

    def fault(self) -> str | None:
        """An error that sticks to the context comes back from every call, this query too."""
        try:
            _cuda().default_stream(self._index).query()
        except RuntimeError as error:
            return first_line(error)
        return None


def first_line(error: BaseException) -> str:
    """CUDA errors come with a page of advice."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"
