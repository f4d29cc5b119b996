"""The seam between the CUDA device, which owns streams and events, and the model that runs on them.

The device calls every method on its launcher thread, with the lane's stream current. A call only enqueues
work: it never waits for the device, so that a prefill can not hold back a decode step. What an item brings is
read later, when the event behind it has passed.
"""

from __future__ import annotations

from typing import Protocol

from muxk.kernel.work import DecodeWork, Phase, PrefillWork, ProbeWork, StepOutput


class Pending(Protocol):
    """The output of an item that was enqueued."""

    def read(self) -> StepOutput:
        """After the item has ended on the device; copies nothing from it but what is on the host already."""


class CudaLaneState(Protocol):
    """Buffers, workspaces, attention wrappers and graphs of one lane; two lanes share none of them."""

    @property
    def bytes(self) -> int:
        """Device memory that it holds."""


class CudaRunner(Protocol):
    """A model over a paged KV pool, as the CUDA device runs it."""

    @property
    def layers(self) -> int: ...

    @property
    def pages(self) -> int: ...

    @property
    def chunk_tokens_max(self) -> int: ...

    @property
    def parked_bytes_per_token(self) -> int: ...

    def open_lane(self, phase: Phase, units: int) -> CudaLaneState:
        """Allocate and warm what a lane of so many units needs. Only before serving: it may wait.

        A lane of all units runs every kind of item, whichever phase it is opened for.
        """

    def capture(self, lane: CudaLaneState, rows: int) -> None:
        """Capture the graph of a decode step of at most `rows` rows. Only before serving: it may wait."""

    def prefill(
        self, lane: CudaLaneState, work: PrefillWork, tokens: range, layers: range, item_id: int
    ) -> Pending:
        """Enqueue layers of the chunk `tokens`; the hidden state is parked between two items of a chunk."""

    def decode(self, lane: CudaLaneState, work: DecodeWork, item_id: int) -> Pending:
        """Enqueue one whole step; its tokens stay on the device for a step with `carried_rows`."""

    def fused(
        self, lane: CudaLaneState, decode: DecodeWork, work: PrefillWork, tokens: range, item_id: int
    ) -> tuple[Pending, Pending]:
        """Enqueue a step and a chunk in one pass through all layers: (decode's output, prefill's)."""

    def probe(self, lane: CudaLaneState, work: ProbeWork, layers: range) -> None:
        """Enqueue made-up tokens on page 0, for timing only."""

    def discard(self, batch_id: int) -> None:
        """Free the parked state of a batch none of whose items is in flight; an unknown id is ignored."""

    def reset(self) -> None:
        """Free the parked state of all batches; nothing is in flight."""

    def close(self) -> None:
        """Free all device memory; idempotent."""
