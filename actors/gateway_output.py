"""What becomes of the tokens of a step: notes of the gateway, and frames for clients, one a peer and step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from muxk.actors import protocol as wire
from muxk.actors.gateway_owner import Owner
from muxk.actors.gateway_state import Choice, GatewayState
from muxk.actors.messages import EmittedRow, IdsEmitted, TextEmitted, TextRow
from muxk.actors.text_output import no_bytes, token_logprobs
from muxk.kernel.work import int32_values


@dataclass(slots=True)
class _Told:
    """What one peer gets of a step without text."""

    names: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    events: list[wire.Event] = field(default_factory=list)
    """Of what is no plain token: ends, and tokens with log-probabilities."""

    def frame(self) -> list[wire.Event]:
        """A choice's tokens come before its end."""
        if not self.names:
            return self.events
        choices = tuple(self.choices) if any(self.choices) else ()
        return [wire.TokenIds(tuple(self.names), tuple(self.tokens), choices), *self.events]


class GatewayOutput:
    """The gateway's way from executors to clients."""

    def __init__(self, owner: Owner, state: GatewayState) -> None:
        self._owner = owner
        self._state = state

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
        told: dict[bytes, _Told] = {}
        now_ns = self._owner.now_ns()
        for row in message.rows:
            choice = self._state.live.get(row.request_id)
            if choice is None:
                continue
            if not choice.request.ended:
                self._take_row(choice, row, now_ns, _of_peer(told, choice))
            if row.finish_reason is not None:
                self._owner.forget(row.request_id)
        self._take_column(message.requests, int32_values(message.tokens), now_ns, told)
        for peer, of_peer in told.items():
            self._owner.tell(peer, *of_peer.frame())

    def _take_row(self, choice: Choice, row: EmittedRow, now_ns: int, told: _Told) -> None:
        logprobs = token_logprobs(row.logprobs, no_bytes)
        ids = () if logprobs else row.tokens
        told.names += [choice.request.name] * len(ids)
        told.tokens += ids
        told.choices += [choice.index] * len(ids)
        text_row = TextRow(
            row.request_id, "", row.tokens, row.finish_reason, row.reused_tokens, row.stop_token, logprobs
        )
        self._state.note_tokens(choice, text_row, now_ns)
        told.events += choice.events(text_row) if logprobs else choice.ends()

    def _take_column(
        self, requests: Iterable[int], tokens: Iterable[int], now_ns: int, told: dict[bytes, _Told]
    ) -> None:
        """One more token for each of these, which had tokens before and go on."""
        live = self._state.live
        for request_id, token in zip(requests, tokens, strict=True):
            choice = live.get(request_id)
            if choice is None or choice.request.ended:
                continue
            self._state.note_token(choice, now_ns)
            of_peer = _of_peer(told, choice)
            of_peer.names.append(choice.request.name)
            of_peer.tokens.append(token)
            of_peer.choices.append(choice.index)


def _of_peer(told: dict[bytes, _Told], choice: Choice) -> _Told:
    peer = choice.request.peer
    found = told.get(peer)
    if found is None:
        found = told[peer] = _Told()
    return found
