"""Swaps to a policy that is installed where the server runs: by name, never by path, by operators only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muxk.actors import protocol as wire
from muxk.kernel.actor import Ref
from muxk.kernel.messages import FrameReceived
from virtual_server import MS, S, VirtualServer

YAML = Path(__file__).parents[2] / "policies" / "temporal.yaml"


def answers(*commands: wire.SwapPolicy) -> list[wire.PolicySwapped]:
    server = VirtualServer()
    for index, command in enumerate(commands):
        server.send(2 * S + index * MS, command)
    server.submit(3 * S, "after", prompt_token_ids=[65] * 20, max_tokens=3, ignore_eos=True)
    server.run_until(6 * S)
    assert len(server.outcome("after").tokens) == 3
    server.check_whole()
    return [event for _, _, event in server.events if isinstance(event, wire.PolicySwapped)]


def test_a_name_is_opened_at_the_server_with_its_settings() -> None:
    plain, set_, wrong = answers(
        wire.SwapPolicy("", plugin="chunked"),
        wire.SwapPolicy("", plugin="chunked", settings={"budget": "64"}),
        wire.SwapPolicy("", plugin="chunked", settings={"bugdet": "64"}),
    )
    assert (plain.accepted, plain.name, set_.accepted) == (True, "chunked", True)
    assert plain.sha != set_.sha
    assert not wrong.accepted
    assert "did you mean 'budget'?" in wrong.report


def test_a_path_and_a_name_with_a_text_are_refused() -> None:
    path, both, nobody = answers(
        wire.SwapPolicy("", plugin=str(YAML)),
        wire.SwapPolicy(YAML.read_text("utf-8"), plugin="chunked"),
        wire.SwapPolicy("", plugin="x" * 2000),
    )
    assert [path.accepted, both.accepted, nobody.accepted] == [False] * 3
    assert "no policy of this name is installed where the server runs" in path.report
    assert "not both" in both.report
    assert len(nobody.report) < 500


def test_a_client_that_is_no_operator_can_not_name_one() -> None:
    server = VirtualServer()
    command = server._encoder.encode(wire.SwapPolicy("", plugin="chunked"))
    gateway: Ref[Any] = Ref("gateway")
    server.runtime.inject(gateway, FrameReceived(b"client", command), 2 * S)
    server.run_until(3 * S)
    [answer] = [event for _, _, event in server.events if isinstance(event, wire.PolicySwapped)]
    assert not answer.accepted
    assert "admin" in answer.report
