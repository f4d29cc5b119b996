"""A frame that a client did not take: the ends in it are told again, once, and what is owed is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from muxk.actors import protocol as wire
from muxk.actors.gateway import LIVE_PER_PEER_MAX, Gateway
from muxk.actors.gateway_peers import OWED_PER_FRAME
from muxk.kernel.messages import PeerSlow, SendFrame
from virtual_server import GATEWAY, MS, S, VirtualServer, expected_tokens

Full = Callable[[int, tuple[Any, ...]], bool]
GOOD: dict[str, Any] = {"prompt_token_ids": [65] * 20, "temperature": 0.0, "ignore_eos": True}


class SlowServer(VirtualServer):
    """`full(now in ns, events)` says which frames the client's connection does not take."""

    def __init__(self, full: Full) -> None:
        self._full = full
        self.lost_frames = 0
        super().__init__(calibrate=False)

    def _receive(self, frame: SendFrame) -> None:
        now_ns = self.runtime.now_ns()
        if self._full(now_ns, self._decoder.decode(frame.payload).events):
            self.lost_frames += 1
            self.runtime.inject(GATEWAY, PeerSlow(frame.peer, frame.payload), now_ns)
        else:
            super()._receive(frame)

    def owed(self) -> int:
        gateway = self.runtime.actor("gateway")
        assert isinstance(gateway, Gateway)
        return sum(len(events) for events in gateway.state.owed.values())


def holds_end(events: tuple[Any, ...]) -> bool:
    return any(isinstance(event, wire.Finished | wire.Failed) for event in events)


@pytest.mark.parametrize("closed_ms", [1, 3500])
def test_the_end_in_a_lost_frame_is_told_again_once(closed_ms: int) -> None:
    server = SlowServer(lambda now_ns, events: now_ns < 2 * S + closed_ms * MS and holds_end(events))
    server.submit(1 * S, "early", max_tokens=100, **GOOD)
    server.submit(2 * S, "refused", prompt_token_ids=[65], max_tokens=0)
    server.run_until(30 * S)
    [cut_short] = server.outcome("early").terminal
    assert cut_short.code == "slow_reader"  # its last tokens were in the lost frame
    [failed] = server.outcome("refused").terminal
    assert failed.code == "invalid"
    assert server.lost_frames >= 1
    assert server.owed() == 0
    server.check_whole()


def test_an_end_without_output_in_a_lost_frame_is_told_as_it_was() -> None:
    server = SlowServer(lambda now_ns, events: now_ns < 2 * S and holds_end(events))
    server.submit(1 * S, "aborted", max_tokens=900, **GOOD)
    server.abort(1 * S + 500 * MS, "aborted")
    server.run_until(4 * S)
    [finished] = server.outcome("aborted").terminal
    assert finished.finish_reason == "abort"
    server.check_whole()


def test_the_other_streams_of_a_lost_frame_fail_and_each_hears_one_end() -> None:
    lost_once: list[int] = []

    def full(now_ns: int, events: tuple[Any, ...]) -> bool:
        loses = not lost_once and holds_end(events)
        lost_once.extend([now_ns] if loses else [])
        return loses

    server = SlowServer(full)
    server.submit(1 * S, "short", max_tokens=5, **GOOD)
    server.submit(1 * S, "long", max_tokens=500, **GOOD)
    server.submit(6 * S, "later", max_tokens=5, **GOOD)
    server.run_until(10 * S)
    [short], [failed] = server.outcome("short").terminal, server.outcome("long").terminal
    assert short.code == failed.code == "slow_reader"
    assert server.outcome("later").tokens == expected_tokens([65] * 20, 5)
    server.check_whole()


@pytest.mark.parametrize("lost", [wire.Tokens("cut", "x", (1,)), wire.TokenIds(("other", "cut"), (1, 2))])
def test_ends_are_found_in_every_frame_that_was_given_up(lost: wire.Event) -> None:
    server = VirtualServer(calibrate=False)
    frames = [
        wire.Frame((lost,)),
        wire.Frame((wire.Failed("refused", "invalid", "n must be"),)),
        wire.Frame((wire.Finished("cut", "stop", None, 1, 2, 0),)),
    ]
    oldest, *more = map(msgspec.msgpack.encode, frames)
    server.runtime.inject(GATEWAY, PeerSlow(b"client", oldest, tuple(more)), 1 * S)
    server.run_until(4 * S)
    assert [end.code for end in server.outcome("refused").terminal] == ["invalid"]
    assert [end.code for end in server.outcome("cut").terminal] == ["slow_reader"]


def test_a_client_that_is_slow_again_right_after_it_was_told_hears_no_end_twice() -> None:
    told: list[int] = []

    def full(now_ns: int, events: tuple[Any, ...]) -> bool:
        if any(isinstance(event, wire.Failed) for event in events):
            told.append(now_ns)
            return False
        if not told:
            return 2 * S <= now_ns < 3 * S and any(isinstance(event, wire.Tokens) for event in events)
        return now_ns - told[0] < 400 * MS and any(isinstance(event, wire.Tokens) for event in events)

    server = SlowServer(full)
    server.submit(2 * S, "a", max_tokens=200, **GOOD)
    server.submit(3 * S + 100 * MS, "b", max_tokens=200, **GOOD)
    server.run_until(12 * S)
    for name in "ab":
        [failed] = server.outcome(name).terminal
        assert failed.code == "slow_reader"


def test_a_name_that_is_used_again_before_its_old_end_was_told_hears_one_end() -> None:
    server = SlowServer(lambda now_ns, events: now_ns < 2 * S and holds_end(events))
    server.submit(1 * S + 900 * MS, "again", prompt_token_ids=[65], max_tokens=0)
    server.submit(2 * S - 1 * MS, "again", max_tokens=400, **GOOD)
    server.run_until(10 * S)
    [finished] = server.outcome("again").terminal
    assert isinstance(finished, wire.Finished)
    assert server.outcome("again").tokens == expected_tokens([65] * 20, 400)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_client_that_never_reads_is_owed_a_bounded_number_of_ends(max_tokens: int) -> None:
    server = SlowServer(lambda now_ns, events: True)
    for index in range(LIVE_PER_PEER_MAX + 200):
        server.submit(
            1 * S + index * MS, f"{index:06d}" + "x" * 240, prompt_token_ids=[65], max_tokens=max_tokens
        )
    server.run_until(5 * S)
    assert server.outcomes == {}
    assert OWED_PER_FRAME < server.owed() <= LIVE_PER_PEER_MAX
    server.check_whole()


def test_many_owed_ends_arrive_in_several_frames_once_the_client_reads() -> None:
    count = OWED_PER_FRAME * 2 + 10
    server = SlowServer(lambda now_ns, events: now_ns < 2 * S + 500 * MS)
    for index in range(count):
        server.submit(1 * S + index, f"r{index}", prompt_token_ids=[65], max_tokens=0)
    server.run_until(10 * S)
    assert {len(server.outcome(f"r{index}").terminal) for index in range(count)} == {1}
    assert server.owed() == 0


def drained(server: SlowServer, until_ns: int) -> bool:
    """Whether the server has ended in order by then."""
    server.run_until(until_ns)
    assert server.runtime.stop_reason in (None, "drained")
    return server.runtime.stop_reason is not None


def test_a_drained_server_stays_for_a_client_that_reads_a_little_later() -> None:
    server = SlowServer(lambda now_ns, events: now_ns < 3 * S and holds_end(events))
    server.submit(1 * S, "it", max_tokens=5, **GOOD)
    server.send(1 * S + 10 * MS, wire.Drain())
    assert not drained(server, 3 * S)
    assert server.describe("gateway")["live"] == 0
    assert drained(server, 3 * S + 200 * MS)
    assert [end.code for end in server.outcome("it").terminal] == ["slow_reader"]


def test_a_drained_server_does_not_stay_for_a_client_that_never_reads() -> None:
    server = SlowServer(lambda now_ns, events: holds_end(events))
    server.submit(1 * S, "it", max_tokens=5, **GOOD)
    server.send(1 * S + 10 * MS, wire.Drain())
    for ms in range(0, 4000, 200):  # it asks for more, which changes nothing
        server.submit(2 * S + ms * MS, f"late{ms}", max_tokens=5, **GOOD)
    assert not drained(server, 3 * S + 500 * MS)
    assert drained(server, 5 * S)


def test_a_drained_server_stops_when_the_client_that_it_waits_for_is_gone() -> None:
    server = SlowServer(lambda now_ns, events: holds_end(events))
    server.submit(1 * S, "it", max_tokens=5, **GOOD)
    server.send(1 * S + 10 * MS, wire.Drain())
    server.leave(2 * S, b"client")
    assert not drained(server, 2 * S - 1 * MS)
    assert drained(server, 2 * S + 200 * MS)


def test_the_ends_of_an_earlier_time_are_told_before_an_idle_server_stops() -> None:
    server = SlowServer(lambda now_ns, events: now_ns < 1 * S + 900 * MS and holds_end(events))
    server.submit(1 * S + 800 * MS, "it", max_tokens=0, **GOOD)
    server.send(1 * S + 950 * MS, wire.Drain())
    assert drained(server, 3 * S)
    assert [end.code for end in server.outcome("it").terminal] == ["invalid"]


def test_a_drained_server_without_such_clients_stops_with_its_last_request() -> None:
    server = SlowServer(lambda now_ns, events: False)
    server.submit(1 * S, "it", max_tokens=20, **GOOD)
    server.send(1 * S + 10 * MS, wire.Drain())
    server.run_until(4 * S)
    assert server.runtime.stop_reason == "drained"
    [finished] = server.outcome("it").terminal
    assert finished.completion_tokens == 20
    assert server.runtime.now_ns() - server.outcome("it").times_ns[-1] < 5 * MS
