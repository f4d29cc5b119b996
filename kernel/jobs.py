"""What the arbiter knows of the work that executors gave it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
from muxk.kernel.device import Lane
from muxk.kernel.messages import StepsRan
from muxk.kernel.view import PrefillView
from muxk.kernel.work import (
    DecodeWork,
    Phase,
    PrefillShape,
    PrefillWork,
    ProbeWork,
    RowPages,
    attention_pairs,
    chunk_rows,
)

NO_TOKENS = range(0)


@dataclass(frozen=True, slots=True)
class Load:
    """What the time of a prefill layer grows with."""

    new_tokens: int
    pairs: int

    @staticmethod
    def of(work: PrefillWork, tokens: range) -> Load:
        """Of some of the tokens of a batch."""
        if not tokens:
            return Load(0, 0)
        rows = chunk_rows(work, tokens)
        pairs = attention_pairs(
            tuple(row.new_tokens for row in rows), tuple(row.reused_tokens for row in rows)
        )
        return Load(len(tokens), pairs)


@dataclass(slots=True)
class PrefillJob:
    """A prefill batch between its submission and its last layer.

    It goes through its tokens in chunks, and through each chunk in layers. A chunk is begun when its first
    layers are launched; the next one when all of its layers are.
    """

    work: PrefillWork
    arrival_ns: int
    deadline_ns: int
    depth: int
    layers: int
    class_rank: int = 0
    """The best of its requests' classes."""
    tbt_slo_ns: int | None = None
    """The tightest of its requests' classes."""
    bytes_per_token: int = 0
    """Of a hidden state on this device."""
    chunk: range = NO_TOKENS
    """Tokens of the chunk that was begun last."""
    next_layer: int = 0
    """Of that chunk."""
    preemptions: int = 0
    parked_by: str | None = None
    """The rule that parked it last."""
    cancelled: bool = False
    failure: str | None = None
    in_flight: int = 0
    layers_in_flight: int = 0
    total: Load = field(init=False)
    begun: Load = field(init=False)
    """Of `chunk`."""
    left: Load = field(init=False)
    """Of the tokens of no chunk yet."""
    shape: PrefillShape = field(init=False)
    """Of the whole batch."""

    def __post_init__(self) -> None:
        self.next_layer = self.layers
        self.total = self.left = Load.of(self.work, range(sum(self.work.new_tokens)))
        self.begun = Load(0, 0)
        self.shape = PrefillShape(self.total.new_tokens, sum(self.work.reused_tokens))

    @property
    def between_chunks(self) -> bool:
        """All layers of the chunk that was begun last are launched."""
        return self.next_layer == self.layers

    @property
    def launched(self) -> bool:
        """Nothing is left to launch."""
        return self.between_chunks and self.left.new_tokens == 0

    @property
    def hands_over(self) -> bool:
        """Its rows decode as soon as what is in flight has ended."""
        return self.launched and self.in_flight > 0 and not self.cancelled and self.failure is None

    @property
    def context_tokens(self) -> int:
        return sum(self.shape)

    @property
    def parked_bytes(self) -> int:
        """Hidden state between its items; between chunks there is none."""
        return 0 if self.between_chunks else self.begun.new_tokens * self.bytes_per_token

    def begin_chunk(self, tokens: int) -> None:
        """The next so many tokens, or all that are left."""
        assert self.between_chunks
        assert tokens >= 1
        whole = self.total.new_tokens
        first = self.chunk.stop
        self.chunk = range(first, min(whole, first + tokens))
        self.begun = Load.of(self.work, self.chunk)
        self.left = Load.of(self.work, range(self.chunk.stop, whole))
        self.next_layer = 0

    def take_layers(self, layers: int) -> range:
        """The next layers of the chunk that was begun, at least one, as an item to launch."""
        span = range(self.next_layer, min(self.layers, self.next_layer + max(1, layers)))
        self.next_layer = span.stop
        self.in_flight += 1
        self.layers_in_flight += len(span)
        return span

    def item_ended(self, layers: int) -> None:
        """So many layers, launched as one item, are in flight no more."""
        self.in_flight -= 1
        self.layers_in_flight -= layers

    def view(self) -> PrefillView:
        between = self.between_chunks
        return PrefillView(
            batch_id=self.work.batch_id,
            requests=self.work.rows,
            new_tokens=self.total.new_tokens,
            reused_tokens=self.shape.reused_tokens,
            pairs=self.total.pairs,
            layers_left=self.layers if between and self.left.new_tokens else self.layers - self.next_layer,
            arrival_ns=self.arrival_ns,
            deadline_ns=self.deadline_ns,
            depth=self.depth,
            preemptions=self.preemptions,
            chunk_tokens=0 if between else self.begun.new_tokens,
            chunk_pairs=0 if between else self.begun.pairs,
            tokens_left=self.left.new_tokens,
            pairs_left=self.left.pairs,
            layers_launched=self.layers_in_flight,
            launched_tokens=self.begun.new_tokens if self.in_flight else 0,
            launched_pairs=self.begun.pairs if self.in_flight else 0,
            class_rank=self.class_rank,
            parked_bytes=self.parked_bytes,
        )


class Flight(msgspec.Struct, eq=False, gc=False):
    """An item between its launch and its completion."""

    item_id: int
    lane: Lane
    phase: Phase
    work: PrefillWork | DecodeWork | ProbeWork
    layers: int
    job: PrefillJob | None
    load: Load
    """Of its prefill chunk."""
    decode: DecodeWork | None
    """The decode step of a fused item."""
    waits_for: tuple[int, ...]
    """Items that must end before it starts, older ones of its lane included."""
    runnable_ns: int
    """When the last of them ended, as far as is known; its launch if there was none."""
    shared: bool
    """Another lane was busy when it was launched or when it ended."""
    launched_ns: int = 0
    ready_ns: int = 0
    """When, by the device's clock, the last of the items that it waited for ended."""
    begins_job: bool = False
    """It is the first of its prefill batch."""
    width: int = 1
    """Devices that work on it."""
    stuck: bool = False
    """The watchdog gave it up."""
    beside: PrefillShape | None = None
    """The prefill batch that was on another lane when it was launched."""

    def meets(self, units: range) -> bool:
        """True when its lane has a unit among `units`."""
        return self.lane.units.start < units.stop and units.start < self.lane.units.stop

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests that wait for it."""
        own = () if isinstance(self.work, ProbeWork) else self.work.requests
        return own if self.decode is None else own + self.decode.requests


@dataclass(slots=True)
class DecodeState:
    """The decode steps of the moment: expected from the executor, waiting for a lane, or in flight."""

    waiting: DecodeWork | None = None
    in_flight: deque[DecodeWork] = field(default_factory=deque)
    """Oldest first; more than one only where the device can queue a step behind another."""
    expected: bool = False
    """The executor was sent something it answers with `SubmitDecode` or `DecodeIdle`; until then the
    batch counts as it was, or a decision in between would take its units away."""
    rows: int = 0
    context_tokens: int = 0
    tbt_slo_ns: int | None = None
    """The tightest of the rows' classes."""
    more: int = 0
    """Steps that can follow the newest, see `SubmitDecode.more`."""
    pages: RowPages | None = None
    """Of those steps, where they are not the pages of the newest."""
    ran: StepsRan | None = None
    """What decode is told with the end of the step that ends next."""
    newest_step: int = 0
    """The last step that was launched: a version of it that was on its way then must not run again."""
    held_since_ns: int = 0
    """The later of two times: the submission of the step that waits, and the end of the last step."""

    @property
    def held(self) -> bool:
        """A step waits, and not for another one to end: nothing but the policy holds it."""
        return self.waiting is not None and not self.in_flight

    @property
    def active(self) -> bool:
        return self.waiting is not None or bool(self.in_flight) or self.expected
