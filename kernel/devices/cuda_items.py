"""A CUDA lane, and an item on its way through it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from muxk.kernel.cuda_runner import CudaLaneState, Pending
from muxk.kernel.device import ItemDone, ItemFailed
from muxk.kernel.devices.cuda_clock import LaneClock
from muxk.kernel.devices.cuda_streams import CudaEvent, CudaStream, first_line
from muxk.kernel.work import DecodeWork, Item, Phase, StepOutput


@dataclass(eq=False)
class CudaLane:
    """A stream of a partition, and what of the model belongs to it alone."""

    name: str
    phase: Phase
    units: range
    stream: CudaStream
    clock: LaneClock
    state: CudaLaneState
    in_flight: deque[Launch] = field(default_factory=deque)
    """Enqueued and not seen to end, oldest first."""
    last_ns: int = 0
    """When its last item ended."""


@dataclass(eq=False)
class Launch:
    """An item on its way through the thread."""

    lane: CudaLane
    item: Item
    after: tuple[int, ...]
    next_layer: int
    started: CudaEvent | None = None
    ended: CudaEvent | None = None
    begun_ns: int = 0
    """When its first kernel was about to be enqueued, on the runtime's clock."""
    queued_ns: int = 0
    """When its last one was."""
    pending: Pending | None = None
    decode: Pending | None = None
    failure: str | None = None
    waits: list[Launch] = field(default_factory=list)
    """Items on other lanes that its stream waits for."""
    over_ns: int | None = None
    """When it ended; None until that was seen."""

    @property
    def decodes(self) -> bool:
        return isinstance(self.item.work, DecodeWork) or self.item.decode is not None

    @property
    def enqueued(self) -> bool:
        return self.ended is not None

    @property
    def has_ended(self) -> bool:
        """Asks the card, and does not wait for it."""
        assert self.ended is not None
        return self.ended.done()


def completion(launch: Launch, started_ns: int, ended_ns: int) -> ItemDone | ItemFailed:
    """What is posted of an item that has ended; its output is read here."""
    item_id = launch.item.item_id
    if launch.failure is not None:
        return ItemFailed(item_id, launch.failure)
    try:
        output = StepOutput() if launch.pending is None else launch.pending.read()
        decode = None if launch.decode is None else launch.decode.read()
    except Exception as error:  # what it brought can not be read: its requests fail, others do not
        return ItemFailed(item_id, first_line(error))
    logprobs, prompt_logprobs = output.logprobs, output.prompt_logprobs
    return ItemDone(item_id, started_ns, ended_ns, output.tokens, logprobs, prompt_logprobs, decode)
