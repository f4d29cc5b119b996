"""What a connection does with events, without a socket."""

from __future__ import annotations

import anyio
import msgspec
import pytest
from muxk.client import protocol
from muxk.client.completion import Delta
from muxk.client.errors import RequestError
from muxk.client.inbox import Inbox
from muxk.client.session import Session


def frame(*events: protocol.Event) -> bytes:
    return msgspec.msgpack.encode({"events": list(events)})


def test_a_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    inbox = Inbox(bound=2)
    for number in range(5):
        inbox.put(protocol.Tokens("r", f"w{number} ", (number,)), number)
    assert inbox.take() == [Delta("w0 ", (0,), 0), Delta("w1 w2 w3 w4 ", (1, 2, 3, 4), 4)]
    assert inbox.take() == []


def test_the_first_terminal_event_is_the_only_one() -> None:
    inbox = Inbox(bound=2)
    inbox.finish(protocol.Finished("r", "stop", None, 1, 1, 0))
    inbox.fail(RequestError("server_gone", "too late"))
    assert inbox.finished is not None
    assert inbox.error is None


def test_late_events_of_an_ended_request_are_ignored() -> None:
    session = Session()
    inbox = session.open_request("r")
    end = protocol.Finished("r", "stop", None, 1, 1, 0)
    session.receive(frame(end, protocol.Tokens("r", "late", (1,)), end, protocol.Failed("r", "x", "y")), 1)
    assert inbox.take() == []
    assert not session.is_live("r")
    assert not session.busy


def test_an_unknown_field_from_a_newer_server_is_ignored() -> None:
    session = Session()
    inbox = session.open_request("r")
    event = {"type": "Tokens", "request_id": "r", "text": "x", "token_ids": [1], "mood": [0.5]}
    session.receive(msgspec.msgpack.encode({"events": [event], "sequence": 4}), 7)
    assert inbox.take() == [Delta("x", (1,), 7)]


def test_a_lost_connection_fails_questions_too() -> None:
    async def main() -> None:
        session = Session()
        _ticket, answer = session.open_question()
        session.lose(RequestError("server_gone", "gone"))
        with pytest.raises(RequestError, match="gone"):
            await answer.wait()

    anyio.run(main)
