"""What the arbiter knows of the work that executors gave it."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.kernel.device import Lane
from muxk.kernel.view import PrefillView
from muxk.kernel.work import DecodeWork, Phase, PrefillWork, ProbeWork, attention_pairs


@dataclass(slots=True)
class PrefillJob:
    """A prefill batch between its submission and its last layer."""

    work: PrefillWork
    arrival_ns: int
    deadline_ns: int
    depth: int
    layers: int
    next_layer: int = 0
    preemptions: int = 0
    cancelled: bool = False
    failure: str | None = None
    in_flight: int = 0
    new_tokens: int = field(init=False)
    pairs: int = field(init=False)

    def __post_init__(self) -> None:
        self.new_tokens = sum(self.work.new_tokens)
        self.pairs = attention_pairs(self.work.new_tokens, self.work.reused_tokens)

    @property
    def layers_left(self) -> int:
        return self.layers - self.next_layer

    def view(self) -> PrefillView:
        return PrefillView(
            batch_id=self.work.batch_id,
            requests=self.work.rows,
            new_tokens=self.new_tokens,
            reused_tokens=sum(self.work.reused_tokens),
            pairs=self.pairs,
            layers_left=self.layers_left,
            arrival_ns=self.arrival_ns,
            deadline_ns=self.deadline_ns,
            depth=self.depth,
            preemptions=self.preemptions,
        )


@dataclass(slots=True)
class Flight:
    """An item between its launch and its completion."""

    item_id: int
    lane: Lane
    phase: Phase
    work: PrefillWork | DecodeWork | ProbeWork
    layers: int
    job: PrefillJob | None
    shared: bool
    """Another lane was busy when it was launched or when it ended."""

    def meets(self, units: range) -> bool:
        """True when its lane has a unit among `units`."""
        return self.lane.units.start < units.stop and units.start < self.lane.units.stop


@dataclass(slots=True)
class DecodeState:
    """The decode step of the moment: expected from the executor, waiting for a lane, or in flight."""

    waiting: DecodeWork | None = None
    launched: DecodeWork | None = None
    expected: bool = False
    """The executor was sent something it answers with `SubmitDecode` or `DecodeIdle`; until then the
    batch counts as it was, or a decision in between would take its units away."""
    rows: int = 0
    context_tokens: int = 0
    ended_step: int = 0
    """The last step that ended: a version of it that was on its way then must not run again."""
    held_since_ns: int = 0
    """When the executor submitted the step that waits."""

    @property
    def active(self) -> bool:
        return self.waiting is not None or self.launched is not None or self.expected
