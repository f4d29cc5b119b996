"""What becomes of the tokens of a step: notes of the gateway, and frames for clients, one a peer and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from muxk.actors import protocol as wire
from muxk.actors.gateway_owner import Owner
from muxk.actors.gateway_state import Choice, Crowd, GatewayState
from muxk.actors.messages import EarlierIds, EmittedRow, IdsEmitted, TextEmitted, TextRow
from muxk.actors.text_output import no_bytes, token_logprobs
from muxk.kernel.work import int32_values


@dataclass(slots=True)
class _Told:
    """What one peer gets of a step without text."""

    names: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    events: list[wire.Event] = field(default_factory=list)
    """Of what is no plain token: ends, and tokens with log-probabilities."""

    def add(self, names: tuple[str, ...], tokens: Sequence[int], choices: tuple[int, ...]) -> None:
        """One token for each of these."""
        if self.names:
            names, tokens, choices = self.names + names, (*self.tokens, *tokens), self.choices + choices
        self.names, self.tokens, self.choices = names, tuple(tokens), choices

    def frame(self) -> list[wire.Event]:
        """A choice's tokens come before its end."""
        if not self.names:
            return self.events
        return [_token_ids(self.names, self.tokens, self.choices), *self.events]


@dataclass(frozen=True, slots=True)
class _Part:
    """The choices of one peer among those of a column."""

    peer: bytes
    names: tuple[str, ...]
    choices: tuple[int, ...]
    places: tuple[int, ...]
    """In the column."""

    def tokens(self, column: Sequence[int]) -> Sequence[int]:
        return column if len(self.places) == len(column) else [column[place] for place in self.places]

    def event(self, column: Sequence[int], at_ns: int | None = None) -> wire.TokenIds:
        """What the peer gets of a step in which there is nothing else for it."""
        return _token_ids(self.names, tuple(self.tokens(column)), self.choices, at_ns)


@dataclass(frozen=True, slots=True)
class _Column:
    """What the next step's column is likely to have again: requests with one token each."""

    requests: tuple[int, ...]
    crowd: Crowd
    """Those of them that are live."""
    parts: tuple[_Part, ...]


class GatewayOutput:
    """The gateway's way from executors to clients."""

    def __init__(self, owner: Owner, state: GatewayState) -> None:
        self._owner = owner
        self._state = state
        self._column: _Column | None = None
        """Of the last step, until one of its choices leaves the crowd."""

    def text(self, message: TextEmitted) -> None:
        """A step of requests that get text."""
        events: dict[bytes, list[wire.Event]] = {}
        now_ns = self._owner.now_ns()
        for row in message.rows:
            choice = self._state.live.get(row.request_id)
            if choice is None:
                continue
            request = choice.request
            if not request.ended:
                self._state.note_tokens(choice, row, now_ns)
                events.setdefault(request.peer, []).extend(choice.events(row))
            if row.finish_reason is not None:
                self._owner.forget(row.request_id)
        for peer, of_peer in events.items():
            self._owner.tell(peer, *of_peer)

    def ids(self, message: IdsEmitted) -> None:
        """A step of requests that get none."""
        if message.earlier is not None:
            self._earlier(message.earlier)
        told: dict[bytes, _Told] = {}
        now_ns = self._owner.now_ns()
        for row in message.rows:
            choice = self._state.live.get(row.request_id)
            if choice is None:
                continue
            if not choice.request.ended:
                self._take_row(choice, row, now_ns, told.setdefault(choice.request.peer, _Told()))
            if row.finish_reason is not None:
                self._owner.forget(row.request_id)
        parts = self._parts(message.requests, now_ns) if message.requests else ()
        column = int32_values(message.tokens)
        if not told:  # as in most steps
            for part in parts:
                self._owner.tell(part.peer, part.event(column))
            return
        for part in parts:
            of_peer = told.setdefault(part.peer, _Told())
            of_peer.add(part.names, part.tokens(column), part.choices)
        for peer, of_peer in told.items():
            self._owner.tell(peer, *of_peer.frame())

    def _earlier(self, steps: EarlierIds) -> None:
        """Steps that ended before and brought a token for each of the same requests."""
        events: dict[bytes, list[wire.Event]] = {}
        tokens, width = int32_values(steps.tokens), len(steps.requests)
        for step, at_ns in enumerate(steps.known_ns):
            column = tokens[step * width : step * width + width]
            for part in self._parts(steps.requests, at_ns):
                events.setdefault(part.peer, []).append(part.event(column, at_ns))
        for peer, of_peer in events.items():
            self._owner.tell(peer, *of_peer)

    def _take_row(self, choice: Choice, row: EmittedRow, now_ns: int, told: _Told) -> None:
        logprobs = token_logprobs(row.logprobs, no_bytes)
        text_row = TextRow(
            row.request_id, "", row.tokens, row.finish_reason, row.reused_tokens, row.stop_token, logprobs
        )
        self._state.note_tokens(choice, text_row, now_ns)
        if logprobs:
            told.events += choice.events(text_row)
            return
        count = len(row.tokens)
        told.add((choice.request.name,) * count, row.tokens, (choice.index,) * count)
        told.events += choice.ends()

    def _parts(self, requests: tuple[int, ...], now_ns: int) -> tuple[_Part, ...]:
        """Note a token for each of these; the live ones, by peer."""
        last = self._column
        if last is not None and not last.crowd.over and last.requests == requests:
            self._state.note_step(last.crowd, now_ns)
            return last.parts
        if last is not None:
            last.crowd.dissolve()
        live = self._state.live
        found = [(place, live[one]) for place, one in enumerate(requests) if one in live]
        found = [(place, choice) for place, choice in found if not choice.request.ended]
        crowd = self._state.new_crowd([choice for _, choice in found], now_ns)
        self._column = _Column(requests, crowd, _by_peer(found))
        return self._column.parts


def _token_ids(
    names: tuple[str, ...], tokens: tuple[int, ...], choices: tuple[int, ...], at_ns: int | None = None
) -> wire.TokenIds:
    """Choices are said only where there are others than the first."""
    return wire.TokenIds(names, tokens, choices if any(choices) else (), at_ns)


def _by_peer(found: list[tuple[int, Choice]]) -> tuple[_Part, ...]:
    of_peers: dict[bytes, list[tuple[int, Choice]]] = {}
    for place, choice in found:
        of_peers.setdefault(choice.request.peer, []).append((place, choice))
    return tuple(
        _Part(
            peer,
            tuple([choice.request.name for _, choice in of_peer]),
            tuple([choice.index for _, choice in of_peer]),
            tuple([place for place, _ in of_peer]),
        )
        for peer, of_peer in of_peers.items()
    )
