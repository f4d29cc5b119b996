"""Explaining recorded runs: what comes out of a whole file, and of one that somebody damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from muxk.actors import protocol as wire
from muxk.actors.gateway import Gateway
from muxk.client import cli, explain_view
from muxk.client.commands import ExplainQuestion
from muxk.client.recorded import RecordError, explain_recorded
from muxk.kernel.fronts import ADMIN_PREFIX
from muxk.kernel.recording import Recorder
from typer.testing import CliRunner
from virtual_server import MS, S, VirtualServer

HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: NAME}\nspec:\n  extends: muxwise\n"
QUESTIONS: tuple[ExplainQuestion, ...] = (
    {"about": "latest", "count": 200},
    {"about": "differences", "count": 200},
    {"about": "moment", "at": 20.1, "count": 50},
    {"about": "request", "request_id": "second", "count": 50},
)


def record_a_run(path: Path) -> None:
    """A request under a policy without a text, then two under one that was swapped in, with a shadow."""
    server = VirtualServer("muxwise", kv_tokens=4096)
    server.run_until(1 * S)
    gateway = server.runtime.actor("gateway")
    assert isinstance(gateway, Gateway)
    book = gateway._policy._book
    recorder = Recorder(path, book, "1")
    book.journal.sink = recorder
    server.submit(5 * S, "first", prompt_token_ids=[65] * 200, max_tokens=20)
    server.send(10 * S, wire.SwapPolicy(HEAD.replace("NAME", "mine"), "mine.yaml"))
    shadow = HEAD.replace("NAME", "shadow") + "  split: {decode: all, prefill: all}\n"
    server.send(11 * S, wire.SetShadow(shadow), ADMIN_PREFIX + b"operator")
    for number, name in enumerate(("second", "third")):
        server.submit(20 * S + number * MS, name, prompt_token_ids=[65] * 200, max_tokens=20)
    server.run_until(30 * S)
    recorder.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recorded") / "run"
    record_a_run(path)
    return path.read_bytes()


def test_a_request_is_found_by_its_name_and_by_its_id(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(whole)
    by_name = explain_recorded(path, {"about": "request", "request_id": "second"})
    by_id = explain_recorded(path, {"about": "request", "request_id": "#2"})
    assert by_name.decisions == by_id.decisions
    assert [one.question for one in by_name.decisions][:2] == ["classify", "admit"]
    with pytest.raises(RecordError, match="no request 'nobody'"):
        explain_recorded(path, {"about": "request", "request_id": "nobody"})


HOSTILE = "\x07\r\x1b]0;gone\x07\u202e"
NAMED = HEAD.replace(
    "extends: muxwise",
    "extends: muxwise\n  classes: [{name: vip, when: request.class == 'vip'}, {name: rest}]",
)


def test_what_clients_name_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    server = VirtualServer("muxwise", calibrate=False)
    server.run_until(1 * S)
    gateway = server.runtime.actor("gateway")
    assert isinstance(gateway, Gateway)
    book = gateway._policy._book
    recorder = book.journal.sink = Recorder(tmp_path / "run", book, "1")
    server.send(2 * S, wire.SwapPolicy(NAMED, "named.yaml"))
    server.submit(3 * S, HOSTILE, prompt_token_ids=[65] * 20, max_tokens=2, request_class=HOSTILE)
    server.run_until(5 * S)
    recorder.close()
    shown = CliRunner().invoke(
        cli.build_app(), ["explain", "--record", str(tmp_path / "run"), "--last", "200"]
    )
    assert shown.exit_code == 0
    assert "first U+0007" in shown.output
    assert "request.class = 'U+0007" in shown.output
    assert all(line.isprintable() for line in shown.output.split("\n"))


def test_a_policy_whose_text_is_missing_is_told_by_its_answers(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(whole)
    told = explain_recorded(path, {"about": "request", "request_id": "first"})
    assert told.notes == ("the policy muxwise is not in the file: only its answers are known",)
    assert told.decisions
    assert all(one.answer and not one.points for one in told.decisions)
    told = explain_recorded(path, {"about": "differences", "count": 5})
    assert told.notes == ()
    assert all(one.points and one.shadow is not None and one.shadow.points for one in told.decisions)


def test_damaged_files_are_told_as_far_as_they_go_or_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run"
    chance = random.Random(7)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        for question in QUESTIONS:
            assert all(isinstance(line, str) for line in told_lines(path, question))


def told_lines(path: Path, question: ExplainQuestion) -> list[str]:
    try:
        told = explain_recorded(path, question)
    except RecordError as error:
        return [str(error)]
    return [*told.notes, *explain_view.decisions(told.decisions)]
