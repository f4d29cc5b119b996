"""The running decode batch: one slot a request, its columns kept in arrays between steps.

A step gathers the columns of its rows in a few array operations, so that its host time hardly grows with the
batch; the page table is written one cell at a time, when a page is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from muxk.actors.columns import SAMPLING_DTYPE, ExtrasMaker, plain_sampling
from muxk.actors.decode_rows import GROW_TOGETHER_TOKENS, NEVER, Ending, Row, Stretch
from muxk.actors.messages import GrowPages, Request, ReservedRequest
from muxk.actors.request_views import class_of
from muxk.kernel.work import PAGE_SIZE, DecodeWork, RowPages, SamplingColumns, int32_bytes, int32_values

FEW_ROWS = 24
"""Up to so many rows a page table is joined from theirs; of more it is kept as an array."""
FORESEEN_PAGES = 2
"""So many pages more than a step needs are told of rows whose next steps are foreseen: they ask for others
before they have used these up (see `GROW_AHEAD_TOKENS` and `GROW_TOGETHER_TOKENS`)."""


class Submitted(NamedTuple):
    """One version of a step, and the rows in it: the same list as of the step before if they are the same."""

    work: DecodeWork
    rows: list[Row]
    more: int = 0
    """Steps of the same rows that can follow without a look at them: none ends or needs a page before the
    last of these is launched."""


@dataclass(slots=True)
class _Taken:
    """Columns of a step that those of the next one repeat when it has the same rows, as most do."""

    rows: list[Row]
    slots: npt.NDArray[np.intp]
    requests: tuple[int, ...]
    places: bytes
    """int32: 0, 1, 2, ..."""
    sampling: SamplingColumns
    """Without what depends on the tokens so far."""
    has_extras: bool
    foreseen: bool
    """No token ends a row before it has all of them, of each there is nothing to say but its id, and none is
    drawn."""
    table: bytes = b""
    """int32[rows, width]; empty once a page was added."""
    width: int = 0
    """0 when it has to be looked up."""
    pages: npt.NDArray[np.int32] | None = None
    """`table` of many rows, to write new pages to."""

    def has_rows(self, rows: list[Row]) -> bool:
        return len(rows) == len(self.rows) and all(map(is_, rows, self.rows))

    def add_page(self, row: Row, page: int) -> None:
        """The last of a row, which may be one that stood aside."""
        if row.pages > self.width or row.place >= len(self.rows) or self.rows[row.place] is not row:
            return
        if self.pages is not None:
            self.pages[row.place, row.pages - 1] = page
            self.table = b""
        else:
            begin = 4 * (row.place * self.width + row.pages - 1)
            self.table = b"".join((self.table[:begin], int32_bytes([page]), self.table[begin + 4 :]))


@dataclass
class DecodeBatch:
    """Rows by request id, in the order in which they joined."""

    foreseeing: bool = False
    """Whether anybody wants to know what may follow a step."""
    rows: dict[int, Row] = field(default_factory=dict)
    tbt_slo_ns: int | None = None
    """The tightest of the rows' classes; None without rows."""
    endings: int = 0
    """Rows that are ending."""
    _moved: bool = False
    """A row may need a page that did not before."""
    _launches: int = 0
    """Of steps, counted for `_together_from`."""
    _together_from: int = 0
    """Until then rows ask for pages only when they need them."""
    _slos: dict[int, int] = field(default_factory=dict)
    """Rows by the TBT SLO of their class: as few entries as there are classes."""
    _free_slots: list[int] = field(default_factory=list)
    _table: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((8, 16), dtype="<i4"))
    _columns: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(8, dtype=SAMPLING_DTYPE))
    _taken: _Taken | None = None
    """Of the last step, until a row joins or leaves."""
    _stretch: Stretch | None = None
    """Of the last step that ended, if all its rows were plain and went on."""

    def __post_init__(self) -> None:
        self._free_slots = list(range(len(self._table) - 1, -1, -1))

    def _count_slo(self, row: Row, change: int) -> None:
        slo_ns = class_of(row.request).tbt_slo_ns
        count = self._slos.get(slo_ns, 0) + change
        if count:
            self._slos[slo_ns] = count
        else:
            del self._slos[slo_ns]
        self.tbt_slo_ns = min(self._slos, default=None)

    def put_into_classes(self, classified: Callable[[Request], Request]) -> None:
        """A policy came into force."""
        self._slos.clear()
        self.tbt_slo_ns = None
        for row in self.rows.values():
            row.request = classified(row.request)
            self._count_slo(row, 1)

    def add(self, reserved: ReservedRequest, first_token: int, end_ids: frozenset[int]) -> Row:
        """Take a request whose first token was sampled by prefill."""
        request = reserved.request
        slot = self._take_slot()
        params = request.params
        extras = ExtrasMaker(request, end_ids)
        row = Row(
            request=request,
            slot=slot,
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            max_tokens=params.max_tokens,
            last=request.prompt_tokens + params.max_tokens - 1,
            said=[*int32_values(request.generated), first_token],
            next=request.prompt_tokens + request.generated_tokens,
            pages=len(reserved.pages),
            reused_tokens=reserved.reused_tokens,
            extras=extras if extras.needed else None,
            history=bytearray(request.generated + int32_bytes([first_token]) if extras.needed else b""),
            plain=request.as_ids and not extras.needed,
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids),
        )
        self._widen(row.pages)
        self._taken = None
        self._moved = True
        self._table[slot] = 0
        self._table[slot, : row.pages] = reserved.pages
        drawing = (params.temperature, params.top_p, params.top_k, params.seed, params.choice, params.min_p)
        self._columns[slot] = drawing
        row.look_ahead()
        self.rows[row.request_id] = row
        self._count_slo(row, 1)
        return row

    def launched(self, rows: list[Row]) -> None:
        """A step with these rows is known to run, or has ended: the next one writes behind it."""
        for row in rows:
            row.next += 1
        self._launches += 1
        self._moved = True

    def ran(self, rows: list[Row], tokens: bytes) -> None:
        """Steps ended, int32[steps, rows], and as many were launched, of rows that had nothing to add."""
        width = 4 * len(rows)
        columns = [tokens[begin : begin + width] for begin in range(0, len(tokens), width)]
        for row in rows:
            row.next += len(columns)
        self._launches += len(columns)
        self._moved = True
        stretch = self._stretch
        if stretch is not None and stretch.take_plain(rows, columns):
            return
        for column in columns:
            others = self.advance(rows, column)
            assert not others, "a row ended in a step of which nobody was told"

    def advance(self, rows: list[Row], column: bytes) -> list[int]:
        """Take the tokens of a step, int32, but for rows that are ending.

        Returns the places of all rows but those that are plain and go on.
        """
        tokens, stretch = int32_values(column), self._stretch
        if stretch is not None:
            if not self.endings and stretch.take(rows, column, tokens):
                return []
            stretch.settle()
        others = _advance_each(rows, tokens)
        self._stretch = None if others else Stretch.of(rows)
        return others

    def end(self, row: Row, ending: Ending) -> None:
        """No step that is submitted from now on takes it; an ending may replace another."""
        self.endings += row.ending is None
        row.ending, row.reach, row.grow_from = ending, 0, NEVER

    def ending_rows(self) -> list[Row]:
        """In the order in which they joined."""
        return [row for row in self.rows.values() if row.ending is not None] if self.endings else []

    @property
    def stalled(self) -> bool:
        """A row can not take the next step for want of a page."""
        return any(row.goes_on and not row.fits for row in self.rows.values())

    def take_wanting(self) -> GrowPages | None:
        """What to ask for: a page for each row that needs one, if any does, and for those that soon will."""
        if not self._moved:
            return None
        self._moved = False
        rows = self.rows.values()
        wanting = [row for row in rows if row.next >= row.grow_from]
        if not wanting:
            return None
        ahead = GROW_TOGETHER_TOKENS if self._launches >= self._together_from else 0
        soon = [row for row in rows if row.next < row.grow_from <= row.next + ahead]
        for row in (*wanting, *soon):
            row.grow_from = NEVER
        return GrowPages(_ids_of(wanting), _ids_of(soon))

    def ask_apart(self) -> None:
        """There are not plenty of pages: for a while no row asks before it has to."""
        self._together_from = self._launches + GROW_TOGETHER_TOKENS

    def deny_page(self, row: Row) -> None:
        """It gets none now: it is asked for again."""
        row.look_ahead()
        self._moved = True

    def add_page(self, row: Row, page: int) -> None:
        if row.pages == self._table.shape[1]:
            self._widen(row.pages + 1)
        self._table[row.slot, row.pages] = page
        row.pages += 1
        row.look_ahead()
        if self._taken is not None:
            self._taken.add_page(row, page)

    def pages_of(self, row: Row) -> tuple[int, ...]:
        """In the order of its tokens."""
        return tuple(self._table[row.slot, : row.pages].tolist())

    def remove(self, row: Row) -> None:
        del self.rows[row.request_id]
        self.endings -= row.ending is not None
        self._taken = None
        self._count_slo(row, -1)
        self._free_slots.append(row.slot)

    def ready(self) -> list[Row]:
        """Rows that the next step can take."""
        return [row for row in self.rows.values() if row.next < row.reach]

    def submit(self, rows: list[Row], step_id: int, version: int, running: DecodeWork | None) -> Submitted:
        """The columns of one step; `rows` is not empty.

        `running` is the step on a lane that the rows which are ahead get their tokens from.
        """
        taken = self._taken
        if taken is None or not taken.has_rows(rows):
            taken = self._taken = self._take(rows)
        positions = [row.next for row in rows]
        self._look_up(taken, self._width(taken, max(positions)))
        carried, sources = _carried(taken, running)
        work = DecodeWork(
            step_id=step_id,
            version=version,
            requests=taken.requests,
            tokens=self._newest(taken) if len(carried) < len(taken.places) else bytes(len(carried)),
            positions=int32_bytes(positions),
            page_table=taken.table,
            pages_per_row=taken.width,
            context_tokens=sum(positions) + len(rows),
            sampling=_with_extras(taken.sampling, rows) if taken.has_extras else taken.sampling,
            after_step=running.step_id if running is not None and carried else 0,
            carried_rows=carried,
            carried_from=sources,
        )
        return Submitted(work, taken.rows, self._more(taken, behind=1))

    def _width(self, taken: _Taken, position: int) -> int:
        """Pages of a row that the step, and those that may follow it, go to."""
        width = position // PAGE_SIZE + 1 + FORESEEN_PAGES * taken.foreseen
        return width if width < self._table.shape[1] else self._table.shape[1]

    def more_behind(self, rows: list[Row]) -> tuple[int, RowPages] | None:
        """`Submitted.more` of the newest step, which has these rows and is launched, and their pages; None
        where that can not be said."""
        taken = self._taken
        if taken is None or taken.rows is not rows:
            return None
        self._look_up(taken, self._width(taken, max([row.next for row in rows])))
        return self._more(taken, behind=0), RowPages(taken.table, taken.width)

    def _more(self, taken: _Taken, behind: int) -> int:
        """See `Submitted.more`. So many steps are submitted that the rows do not count as launched."""
        if not taken.foreseen or self.endings or len(taken.rows) < len(self.rows):
            return 0
        end = taken.width * PAGE_SIZE
        # Before each of them a row's position is less than `reach`, and but for the last one, after which
        # decode is told, it is less than `grow_from` behind it.
        left = min([min(end, row.reach, row.grow_from) - row.next for row in taken.rows])
        return left - behind if left > behind else 0

    def _newest(self, taken: _Taken) -> bytes:
        """int32: the last token of each row that the host knows."""
        stretch = self._stretch
        if stretch is not None and stretch.rows is taken.rows and stretch.steps and not stretch.over:
            return stretch.steps[-1]
        return int32_bytes([row.generated[-1] for row in taken.rows])

    def _take(self, rows: list[Row]) -> _Taken:
        for place, row in enumerate(rows):
            row.place = place
        slots = np.fromiter((row.slot for row in rows), dtype=np.intp, count=len(rows))
        sampling = plain_sampling(self._columns[slots])
        return _Taken(
            rows,
            slots,
            tuple(row.request_id for row in rows),
            int32_bytes(range(len(rows))),
            sampling,
            any(row.extras is not None for row in rows),
            self.foreseeing and sampling.greedy and all(row.plain and not row.ends for row in rows),
        )

    def _look_up(self, taken: _Taken, width: int) -> None:
        """The pages of its rows, unless nothing changed."""
        if taken.width != width:
            taken.width, taken.pages = width, None
            if len(taken.rows) <= FEW_ROWS:  # without a copy between: a row can have thousands of pages
                taken.table = b"".join([self._table[row.slot, :width].data for row in taken.rows])
                return
            taken.pages, taken.table = self._table[taken.slots, :width], b""
        if taken.pages is not None and not taken.table:
            taken.table = taken.pages.tobytes()

    def _take_slot(self) -> int:
        if not self._free_slots:
            old = len(self._table)
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._free_slots = list(range(2 * old - 1, old - 1, -1))
        return self._free_slots.pop()

    def _widen(self, pages: int) -> None:
        while self._table.shape[1] < pages:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)


def _ids_of(rows: Sequence[Row]) -> tuple[int, ...]:
    return tuple([row.request_id for row in rows])


def _advance_each(rows: list[Row], tokens: Sequence[int]) -> list[int]:
    """As `DecodeBatch.advance`, of rows that are in no stretch."""
    others = []
    for place, row in enumerate(rows):
        if row.ending is None:
            said, token = row.said, tokens[place]
            said.append(token)
            if row.plain and len(said) < row.max_tokens and token not in row.ends:
                continue
            if row.extras is not None:
                row.history += token.to_bytes(4, "little")
        others.append(place)
    return others


def _carried(taken: _Taken, running: DecodeWork | None) -> tuple[bytes, bytes]:
    """int32: rows whose token is sampled by the step on a lane, and by which of its rows."""
    if running is not None and running.requests == taken.requests:
        return taken.places, taken.places
    carried = [place for place, row in enumerate(taken.rows) if row.ahead]
    if running is None or not carried:
        return int32_bytes(carried), b""
    places = {request_id: place for place, request_id in enumerate(running.requests)}
    return int32_bytes(carried), int32_bytes([places[taken.requests[place]] for place in carried])


def _with_extras(plain: SamplingColumns, rows: Sequence[Row]) -> SamplingColumns:
    made = [
        row.extras.make(index, bytes(row.history), row.count + row.ahead)
        for index, row in enumerate(rows)
        if row.extras is not None
    ]
    extras = tuple(found for found in made if found is not None)
    return msgspec.structs.replace(plain, greedy=False, extras=extras) if extras else plain
