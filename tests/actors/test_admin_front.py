"""Who may change the server: only what comes by the admin socket."""

from __future__ import annotations

import msgspec
import pytest
from muxk.actors import protocol as wire
from virtual_server import MS, S, VirtualServer


def one_live_each(*peers: bytes) -> VirtualServer:
    server = VirtualServer(calibrate=False)
    for peer in peers:
        server.submit(1 * S, "r", peer, prompt_token_ids=[65] * 20, max_tokens=4000, ignore_eos=True)
    return server


@pytest.mark.parametrize(
    "command", [wire.SwapPolicy("spec: {}", ticket=3), wire.AbortAny(ticket=3), wire.Drain()]
)
def test_an_admin_command_of_a_client_changes_nothing_and_is_told_where_it_belongs(
    command: wire.Command,
) -> None:
    server = one_live_each(b"one", b"two")
    server.send_raw(2 * S, msgspec.msgpack.encode(command), b"one")
    server.run_until(3 * S)
    [answer] = [
        event
        for _, _, event in server.events
        if isinstance(event, wire.ProtocolError | wire.PolicySwapped | wire.AbortedAny | wire.Draining)
    ]
    assert "admin socket" in (answer.report if isinstance(answer, wire.PolicySwapped) else answer.message)
    assert server.describe("gateway")["live"] == 2
    assert not server.describe("gateway")["draining"]
    assert server.describe("gateway")["policy"] == "muxwise"


def test_all_requests_of_all_clients_are_aborted_and_counted() -> None:
    server = one_live_each(b"one", b"two", b"three")
    server.send(2 * S, wire.AbortAny(ticket=9))
    server.run_until(3 * S)
    assert [event for _, _, event in server.events if isinstance(event, wire.AbortedAny)] == [
        wire.AbortedAny(9, 3)
    ]
    for peer in (b"one", b"two", b"three"):
        assert [event.finish_reason for event in server.outcome("r", peer).terminal] == ["abort"]
    server.check_whole()


def test_requests_are_aborted_by_the_names_of_their_clients() -> None:
    server = one_live_each(b"one")
    for name in ("x", "y"):
        server.submit(1 * S, name, b"two", prompt_token_ids=[66] * 20, max_tokens=4000, ignore_eos=True)
    server.send(2 * S, wire.AbortAny(["x", "unknown"], ticket=1))
    server.run_until(2 * S + 300 * MS)
    assert wire.AbortedAny(1, 1) in [event for _, _, event in server.events]
    assert len(server.outcome("x", b"two").terminal) == 1
    assert server.outcome("y", b"two").terminal == []
    assert server.outcome("r", b"one").terminal == []
