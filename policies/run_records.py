"""What a run in virtual time left behind: its requests, items, decisions, and the state at asked moments.

All times are ns since the start of the run, which is when the device had been measured. Expectations of a
PolicyTest read these, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    """How a request ended for its client."""

    LIVE = "live"
    """It did not."""
    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"
    """It can never be served."""
    SHED = "shed"
    """Too much was waiting."""
    FAILED = "failed"


@dataclass(slots=True)
class RequestRecord:
    """One request, as its client saw it."""

    name: str
    group: str
    arrival_ns: int
    prompt_tokens: int
    class_name: str = ""
    """The class that the policy put it in; empty when the policy was never asked."""
    tbt_slo_ns: int | None = None
    ttft_slo_ns: int | None = None
    """From its class, or the deadline that came with it."""
    token_ns: list[int] = field(default_factory=list)
    """When each event with tokens arrived."""
    tokens: int = 0
    cached_tokens: int = 0
    """Of its prompt, found in the prefix index."""
    recomputes: int = 0
    end: End = End.LIVE
    end_ns: int = 0
    message: str = ""
    """Why it was refused, shed, or failed."""
    notes: tuple[str, ...] = ()

    @property
    def gaps_ns(self) -> list[int]:
        return [later - earlier for earlier, later in zip(self.token_ns, self.token_ns[1:], strict=False)]

    @property
    def ttft_ns(self) -> int | None:
        """None before its first token."""
        return self.token_ns[0] - self.arrival_ns if self.token_ns else None


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """A work item that ran on the device."""

    phase: str
    """`decode`, `prefill`, or `fused`, which is a chunk and a decode step in one pass."""
    units: int
    begins_ns: int
    ends_ns: int
    requests: tuple[str, ...]
    """Of its prefill chunk; empty for a decode step."""
    rows: int
    """Of its decode step; 0 for prefill."""
    tokens: int
    """Of its prefill chunk."""
    layers: int

    @property
    def decodes(self) -> bool:
        return self.phase != "prefill"

    @property
    def prefills(self) -> bool:
        return self.phase != "decode"


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """An answer of the policy's `decide`."""

    at_ns: int
    rules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MomentRecord:
    """The state at a moment, all that happened at it included."""

    at_ns: int
    decode_units: int
    prefill_units: int
    decode_batch: int
    prefill_batches: int
    parked: bool
    queue_requests: int
    queue_tokens: int
    kv_total: int
    kv_free: int
    live: int
    rules: tuple[str, ...] = ()
    """Of the last decision before."""


@dataclass(slots=True)
class RunRecord:
    """One run."""

    requests: list[RequestRecord] = field(default_factory=list)
    """In the order of their arrival."""
    items: list[ItemRecord] = field(default_factory=list)
    """In the order in which they ended."""
    decisions: list[DecisionRecord] = field(default_factory=list)
    moments: dict[int, MomentRecord] = field(default_factory=dict)
    hits: Counter[str] = field(default_factory=Counter)
    """Answers by `point/rule`, of all policies that were in force."""
    hits_of: dict[str, Counter[str]] = field(default_factory=dict)
    """The same of each policy, by its sha."""
    errors: Counter[str] = field(default_factory=Counter)
    """What went wrong in rules."""
    ended_ns: int = 0
    preemptions: int = 0
    split_changes: int = 0
    faults: list[str] = field(default_factory=list)
    """Why the run is no evidence: what did not end, what crashed, which swap was refused."""

    def decisions_in(self, begins_ns: int, ends_ns: int) -> Sequence[DecisionRecord]:
        """Decisions from the last one before a time up to another."""
        first = bisect_right(self.decisions, begins_ns, key=lambda decision: decision.at_ns)
        last = bisect_left(self.decisions, ends_ns, key=lambda decision: decision.at_ns)
        return self.decisions[max(0, first - 1) : max(last, first)]

    def items_in(self, begins_ns: int, ends_ns: int) -> list[ItemRecord]:
        """Items that ran between two times."""
        return [item for item in self.items if item.begins_ns < ends_ns and item.ends_ns > begins_ns]
