"""What decode has for clients: new tokens, sorted by the way that they take."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.actors.decode_ends import Finish
from muxk.actors.decode_rows import Row
from muxk.actors.messages import EarlierIds, EmittedRow, IdsEmitted, TokensEmitted
from muxk.kernel.work import RowLogprobs


@dataclass(slots=True)
class Emitted:
    """What a handler brought. Of one request `rows` come before the columns."""

    rows: list[EmittedRow] = field(default_factory=list)
    requests: tuple[int, ...] = ()
    """Plain rows that go on, with one new token each."""
    tokens: bytes = b""
    """int32[requests]."""
    advanced: bool = False
    """A step ended."""
    earlier: EarlierIds | None = None
    """What comes before all of this."""

    @property
    def ends_some(self) -> bool:
        return any(row.finish_reason is not None for row in self.rows)

    def take_plain(self, requests: tuple[int, ...], tokens: bytes, others: list[int]) -> int:
        """Of a step with these rows and tokens all but the places in `others`; how many that is."""
        if others:
            left_out = frozenset(others)
            places = [place for place in range(len(requests)) if place not in left_out]
            requests = tuple([requests[place] for place in places])
            tokens = b"".join([tokens[4 * place : 4 * place + 4] for place in places])
        self.requests, self.tokens = requests, tokens
        return len(requests)

    def for_tokenizer(self, group: int) -> TokensEmitted | None:
        """Of requests that want text."""
        rows = tuple([row for row in self.rows if not row.as_ids])
        return TokensEmitted(rows, group) if rows else None

    def for_gateway(self) -> IdsEmitted | None:
        """Of requests that want none."""
        rows = tuple([row for row in self.rows if row.as_ids])
        if not rows and not self.requests and self.earlier is None:
            return None
        return IdsEmitted(rows, self.requests, self.tokens, self.earlier)


@dataclass(slots=True)
class Held:
    """First tokens that wait for the end of a step in flight; at most one a row, and one more of a request
    that was evicted and is back."""

    rows: list[tuple[int, EmittedRow]] = field(default_factory=list)
    """With the step's id."""

    def add(self, step_id: int, rows: list[EmittedRow]) -> None:
        self.rows += [(step_id, row) for row in rows]

    def take_of(self, request_ids: set[int]) -> list[EmittedRow]:
        """Of requests whose next token is here: they were evicted in between, and came back."""
        rows = self.rows
        self.rows = [(step, row) for step, row in rows if row.request_id not in request_ids]
        return [row for _, row in rows if row.request_id in request_ids]

    def take_until(self, step_id: int) -> list[EmittedRow]:
        """Those that waited for the end of this step."""
        if not (rows := self.rows):
            return []
        self.rows = [(step, row) for step, row in rows if step > step_id]
        return [row for step, row in rows if step <= step_id]


def emitted_row(
    row: Row,
    token: int,
    finish: Finish,
    logprobs: tuple[RowLogprobs, ...],
    prompt_logprobs: tuple[RowLogprobs, ...],
) -> EmittedRow:
    """A new token of a row, with all there is to say of it."""
    return EmittedRow(
        row.request_id,
        (token,),
        finish.reason,
        row.reused_tokens,
        finish.stop_token,
        logprobs,
        prompt_logprobs,
        row.request.as_ids,
    )


def by_row(reported: tuple[RowLogprobs, ...]) -> dict[int, tuple[RowLogprobs, ...]]:
    """What a device reported of sampled tokens, one of each row at most."""
    return {found.row: (found,) for found in reported}
