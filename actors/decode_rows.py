"""One request in the running batch, and tokens that many of them get together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from muxk.actors.columns import ExtrasMaker
from muxk.actors.messages import Request
from muxk.kernel.work import PAGE_SIZE, int32_array

GROW_AHEAD_TOKENS = 8
"""A page is asked for when fewer free token slots than this are left, half a page of steps ahead, or earlier,
with another row's."""
GROW_TOGETHER_TOKENS = PAGE_SIZE
"""Rows that will ask within so many steps ask with the first that does: while there are plenty of pages a
batch of any size asks once in so many steps, for half a page more a row."""
NEVER = 1 << 62
"""A position that no row comes to."""


@dataclass(slots=True)
class Row:
    """One request in the batch."""

    request: Request
    slot: int
    request_id: int
    prompt_tokens: int
    max_tokens: int
    """Of its request, as the two before."""
    last: int
    """The position of its last token, which no step writes."""
    said: list[int]
    """`generated`, but for what a stretch keeps for it."""
    next: int
    """The position that the next step writes: that of the last token, steps on a lane counted in."""
    pages: int
    reused_tokens: int
    extras: ExtrasMaker | None
    """None when the sampler needs nothing but the columns."""
    history: bytearray
    """int32: `generated` for the sampler's penalties; kept only when there are extras."""
    plain: bool
    """Of a token that does not end it there is nothing to say but its id."""
    ends: frozenset[int]
    """Tokens that may end it."""
    ending: Ending | None = None
    stretch: Stretch | None = None
    """What it gets tokens with."""
    place: int = 0
    """In the step that was submitted last, if it is in it."""
    reach: int = 0
    """The next step can take it while `next` is less: then it has a slot there, and goes on."""
    grow_from: int = NEVER
    """It needs a page once `next` is there: it will soon be without a free slot, it is not near its end, and
    none was asked for."""

    @property
    def generated(self) -> list[int]:
        """All generated tokens, those from before a recompute included."""
        if self.stretch is not None:
            self.stretch.settle()
        return self.said

    @property
    def count(self) -> int:
        """Of generated tokens."""
        return len(self.said) + (0 if self.stretch is None else len(self.stretch.steps))

    @property
    def ahead(self) -> int:
        """Steps with it that are known to be on a lane; the next one has its token from there."""
        return self.next - self.prompt_tokens - self.count + 1

    @property
    def fits(self) -> bool:
        """The next step has a slot to write to."""
        return self.slots_left > 0

    @property
    def goes_on(self) -> bool:
        """It needs a step after those on a lane, as far as the host can know."""
        return self.ending is None and self.next < self.last

    @property
    def slots_left(self) -> int:
        """Tokens that fit its pages behind those of steps on a lane."""
        return self.pages * PAGE_SIZE - self.next

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.generated.append(token)
        if self.extras is not None:
            self.history += token.to_bytes(4, "little")

    def look_ahead(self) -> None:
        """To where its pages and its request let it go: when it joins, and when a page came or was denied."""
        if self.ending is not None:
            return
        slots = self.pages * PAGE_SIZE
        if slots < self.last:
            self.reach, self.grow_from = slots, slots - GROW_AHEAD_TOKENS + 1
        else:
            self.reach, self.grow_from = self.last, NEVER


@dataclass(frozen=True, slots=True)
class Ending:
    """What happens to a row once no step in flight touches its pages."""

    keep: bool
    """Its pages go into the prefix index."""
    recompute: bool
    """It goes back to admission."""
    rule: str | None = None
    """The rule that chose it to be computed again."""
    to_group: int | None = None
    """It goes on in another group, and its pages are handed to migration; None: they go back."""

    @property
    def goes_elsewhere(self) -> bool:
        """It has not ended for its client."""
        return self.recompute or self.to_group is not None


@dataclass(slots=True)
class Stretch:
    """Steps of the same plain rows. Their tokens are kept by step, and given to the rows all at once: a batch
    of hundreds of rows has the same ones for some steps, and none of them is touched meanwhile."""

    rows: list[Row]
    left: int
    """Steps until the first of the rows has all its tokens."""
    ends: frozenset[int]
    """Tokens that may end one of them."""
    steps: list[bytes] = field(default_factory=list)
    """int32[rows] each."""
    over: bool = False

    @staticmethod
    def of(rows: list[Row]) -> Stretch:
        """From the next step on; the rows are in no other."""
        left = min([row.max_tokens - len(row.said) for row in rows])
        stretch = Stretch(rows, left, frozenset().union(*[row.ends for row in rows]))
        for row in rows:
            row.stretch = stretch
        return stretch

    def take(self, rows: list[Row], tokens: bytes, values: Sequence[int]) -> bool:
        """Add a step, given twice; False when it is of other rows, or one of these may be at its end."""
        if self.over or rows is not self.rows or len(self.steps) + 1 >= self.left:
            return False
        if self.ends and not self.ends.isdisjoint(values):
            return False
        self.steps.append(tokens)
        return True

    def take_plain(self, rows: list[Row], columns: list[bytes]) -> bool:
        """`take` of some steps none of whose tokens ends a row."""
        if self.over or rows is not self.rows or self.ends or len(self.steps) + len(columns) >= self.left:
            return False
        self.steps += columns
        return True

    def settle(self) -> None:
        """It is over; idempotent."""
        if self.over:
            return
        self.over = True
        tokens = int32_array(b"".join(self.steps)).reshape(-1, len(self.rows)).T.tolist()
        for row, column in zip(self.rows, tokens, strict=True):
            row.stretch = None
            row.said += column
