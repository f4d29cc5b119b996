"""The device protocol: splits, lanes, launches and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from muxk.kernel.actor import Message, Timer
from muxk.kernel.work import (
    DecodeWork,
    Item,
    Phase,
    PrefillWork,
    ProbeWork,
    RowLogprobs,
    RowPages,
    Split,
    StepOutput,
)


class ItemDone(Message, frozen=True):
    """device -> arbiter: an item ended."""

    item_id: int
    started_ns: int
    ended_ns: int
    """Both on the runtime's clock, taken by the lane, so that host latency is not in them."""
    tokens: bytes
    """int32 sampled tokens, see `StepOutput.tokens`."""
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    decode: StepOutput | None = None
    """The output of the decode step of a fused item."""


class ItemFailed(Message, frozen=True):
    """device -> arbiter: an item raised; the device still serves others."""

    item_id: int
    reason: str


class DeviceFailed(Message, frozen=True):
    """device -> arbiter: it is gone with all its memory, after an `ItemFailed` for each item in flight."""

    reason: str


class DeviceLost(RuntimeError):
    """The device is gone: whoever uses it is restarted, and `reset` builds it again."""


class Lane(Protocol):
    """A place where items run one after the other, on a fixed set of units."""

    @property
    def name(self) -> str: ...

    @property
    def units(self) -> range:
        """Indices of its units; lanes whose ranges meet must not run at the same time."""


class DevicePort(Protocol):
    """How a device reaches the arbiter and the clock. `post` may be called from any thread."""

    def now_ns(self) -> int: ...

    def post(self, message: Message) -> None: ...

    def post_after(self, delay_ns: int, message: Message) -> Timer:
        """Only from the thread that called `launch`."""

    def cancel(self, timer: Timer) -> None:
        """Take back what `post_after` would deliver; ignored when it was delivered. Same thread as there."""

    def quiet_until_ns(self, beside: Timer) -> int:
        """Before this nothing happens but what a timer brings; now where nobody knows. Same thread."""


class Device(Protocol):
    """One device with its units, KV pool and model."""

    @property
    def name(self) -> str: ...

    @property
    def units(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def pages(self) -> int:
        """Pages of its KV pool, page 0 included, which is never given to a request."""

    @property
    def chunk_tokens_max(self) -> int:
        """Most prompt tokens of one prefill chunk: what scratch memory allows."""

    @property
    def decode_ahead(self) -> int:
        """Decode steps that may be queued behind the one that runs, before its tokens are known: 0 or 1."""

    @property
    def parked_bytes_per_token(self) -> int:
        """Hidden state that is kept for each token of a chunk between two of its items."""

    def splits(self) -> tuple[Split, ...]:
        """Disjoint splits, ascending in decode units; empty when only time sharing is possible."""

    def start(self, port: DevicePort) -> None:
        """Make lanes and threads; called once."""

    def lane(self, phase: Phase, units: int) -> Lane:
        """The lane of a phase on a number of units; all units give the same lane for both phases."""

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        """Queue an item behind those in the lane; it starts when the items `after` have ended."""

    def discard(self, batch_id: int) -> None:
        """Free the parked state of a prefill batch none of whose items is in flight."""

    def reset(self) -> None:
        """Forget parked state and wait for items in flight, after a crash of the executors.

        A device that is lost is built again. Raises what keeps it from that.
        """

    def describe(self) -> Mapping[str, Any]:
        """For the state: what of it is worth showing beside its name and units. Plain values."""

    def close(self) -> None:
        """End threads and free memory; idempotent."""


class ElasticDevice(Device, Protocol):
    """One that can work together with others of its server on the same items."""

    @property
    def width(self) -> int:
        """Devices that work as one."""

    def resize(self, width: int) -> None:
        """From the next launch on; at least 1."""


class StepAhead(NamedTuple):
    """A decode step in flight whose end is known."""

    item_id: int
    started_ns: int
    ended_ns: int
    known_ns: int
    """When the arbiter is told."""
    tokens: Sequence[int]
    """Of its rows."""


class StepsAhead(Protocol):
    """Decode steps of the same rows, each behind the one before, on a device where nothing else runs."""

    @property
    def newest(self) -> StepAhead:
        """The last one that was launched."""

    @property
    def quiet_until_ns(self) -> int:
        """Before this nothing happens but the ends of steps."""

    def launch(self, item_id: int, at_ns: int) -> StepAhead:
        """The next step, at a time that may be ahead of the runtime's."""


class ForeseeingDevice(Device, Protocol):
    """One in virtual time, which knows at the launch of a step when it ends if nothing comes beside it."""

    def steps_behind(self, lane: Lane, item_id: int, work: DecodeWork, pages: RowPages | None) -> StepsAhead:
        """Of a step on its lane; `pages` are those of its rows, if they are others than the work says."""

    def commit(self, steps: StepsAhead) -> None:
        """They were launched; the completions of the last two are posted, of none before."""


class Runner(Protocol):
    """A model over a paged KV pool, as the CPU device runs it. One call at a time for each lane."""

    @property
    def layers(self) -> int: ...

    @property
    def pages(self) -> int: ...

    @property
    def chunk_tokens_max(self) -> int:
        """Most prompt tokens whose activations one item may hold."""

    @property
    def parked_bytes_per_token(self) -> int:
        """Hidden state of one token, as it is parked."""

    def prefill(self, work: PrefillWork, tokens: range, layers: range) -> StepOutput:
        """Run layers of the chunk `tokens` of a batch.

        The hidden state is parked between two items of a chunk. Chunks of a batch run in order, each through
        all layers before the next begins.
        """

    def decode(self, work: DecodeWork) -> StepOutput:
        """Run one whole step, and keep its tokens for a step that follows with `carried_rows`."""

    def fused(self, decode: DecodeWork, work: PrefillWork, tokens: range) -> tuple[StepOutput, StepOutput]:
        """A decode step and a prefill chunk in one pass through all layers: (decode's output, prefill's)."""

    def probe(self, work: ProbeWork, first_layer: int, last_layer: int) -> None:
        """Run made-up tokens on page 0, for timing only."""

    def discard(self, batch_id: int) -> None:
        """Free the parked state of a prefill batch; an unknown id is ignored."""

    def reset(self) -> None:
        """Free the parked state of all batches."""
