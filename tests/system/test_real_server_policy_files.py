"""A real server and its policy's file: read again when it changes, recorded, and explained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from muxk.client.cli import build_app
from muxk.client.client import Client
from typer.testing import CliRunner, Result

POLICY = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: mine, version: "1"}
spec:
  extends: muxwise
  params:
    room: {type: number, default: 8}
  form: {requests: params.room, tokens: 4096}
"""
SECOND = POLICY.replace('"1"', '"2"')
BAD = POLICY.replace("form:", "frm:")


class Server:
    """`muxk run FILE --device sim` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.errors = directory / "errors"

    def muxk(self, *arguments: str) -> Result:
        environment = {"MUXK_RUN_DIR": str(self.directory / "run")}
        return CliRunner().invoke(build_app(), list(arguments), env=environment)

    def state(self) -> dict[str, Any]:
        shown = self.muxk("state", "--json")
        assert shown.exit_code == 0, shown.output
        state: dict[str, Any] = json.loads(shown.stdout)["server"]
        return state

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 8.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not condition(state := self.state()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {state}"
            time.sleep(0.02)
        return state


@contextmanager
def serve(directory: Path, policy: Path, *options: str) -> Iterator[tuple[Server, Client]]:
    command = [sys.executable, "-m", "muxk.client.cli", "run", str(policy), "--device", "sim", *options]
    environment = os.environ | {"MUXK_RUN_DIR": str(directory / "run")}
    with (
        (directory / "errors").open("w") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving "), (directory / "errors").read_text()
            with Client(line.split()[-1]) as client:
                yield Server(process, directory), client
        finally:
            process.kill()


def put(path: Path, text: str) -> None:
    """As editors do: another file takes the place of this one."""
    beside = path.with_name(".new")
    beside.write_text(text)
    beside.replace(path)


def test_an_edited_file_is_swapped_in_and_a_bad_one_leaves_the_last_good_policy_running(
    tmp_path: Path,
) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text(POLICY)
    with serve(tmp_path, policy, "--watch", "--set", "room=3") as (server, client):
        stream = client.submit(token_ids=[65] * 20, max_tokens=250, ignore_eos=True)
        next(stream)
        put(policy, BAD)
        state = server.until(lambda state: "policy_last_refused" in state)
        assert (state["policy_version"], state["policy_generation"]) == ("1", 0)
        assert f"{policy}:8:3: unknown key 'frm'" in state["policy_last_refused"]["report"]
        put(policy, POLICY + "# the same policy, laid out in another way\n")
        state = server.until(lambda state: "policy_last_refused" not in state)
        assert state["policy_generation"] == 0
        policy.write_text(SECOND)  # in place
        state = server.until(lambda state: state["policy_version"] == "2")
        assert (state["policy"], state["policy_generation"]) == ("mine", 1)
        assert (state["policy_api"], state["policy_from"]) == ("muxk/v1beta1", str(policy))
        assert len(stream.result(timeout_s=20).token_ids) == 250
        client.submit(token_ids=[66] * 5, max_tokens=1).result(timeout_s=10)
        shown = server.muxk("explain", "--last", "20")
        assert "params.room = 3" in shown.stdout  # the setting of the command line holds for the file too
        errors = server.errors.read_text()
    assert errors.count("unknown key 'frm'") == 1
    assert "did you mean 'form'?" in errors
    assert "mine goes on" in errors


def test_a_link_that_leads_to_another_folder_is_followed_as_it_changes(tmp_path: Path) -> None:
    """As Kubernetes mounts configuration: the file links through a folder whose link is replaced."""
    for name, text in (("one", POLICY), ("two", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.yaml").write_text(text)
    (tmp_path / "data").symlink_to("one")
    policy = tmp_path / "mine.yaml"
    policy.symlink_to("data/mine.yaml")
    with serve(tmp_path, policy, "--watch") as (server, _):
        (tmp_path / "new").symlink_to("two")
        (tmp_path / "new").replace(tmp_path / "data")
        server.until(lambda state: state["policy_version"] == "2")
        (tmp_path / "two" / "mine.yaml").write_text(SECOND.replace('"2"', '"3"'))
        server.until(lambda state: state["policy_version"] == "3")


def test_a_hangup_reads_the_file_again_and_a_missing_one_is_told(tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text(POLICY)
    with serve(tmp_path, policy) as (server, _):
        put(policy, SECOND)
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda state: state["policy_version"] == "2")
        policy.unlink()
        server.process.send_signal(signal.SIGHUP)
        state = server.until(lambda state: "policy_last_refused" in state)
        assert "can not be read: No such file" in state["policy_last_refused"]["report"]
        assert state["policy_version"] == "2"


def test_waiting_requests_are_explained_live_and_from_the_recording_afterwards(tmp_path: Path) -> None:
    policy, record = tmp_path / "mine.yaml", tmp_path / "run.record"
    policy.write_text(POLICY)
    options = ("--kv-tokens", "4000", "--record", str(record), "--shadow", "temporal")
    with serve(tmp_path, policy, *options) as (server, client):
        running = client.submit(token_ids=[65] * 20, max_tokens=3000, ignore_eos=True, request_id="runs")
        next(running)
        waiting = client.submit(token_ids=[66] * 3989, max_tokens=10, request_id="waits")
        waiting.accepted()
        told = server.muxk("explain").stdout.splitlines()
        assert [line.split()[0] for line in told] == ["request", "runs", "waits"]
        assert "decoding" in told[1]
        assert "no_pages" in told[2]
        one = server.muxk("explain", "waits")
        assert "=> admit/welcome" in one.stdout
        assert "request.pages = " in one.stdout
        assert "[defaults.yaml:" in one.stdout
        differences = server.muxk("explain", "--shadow")
        assert "temporal (shadow)" in differences.stdout
        as_json = json.loads(server.muxk("explain", "waits", "--json").stdout)
        assert as_json["requests"][0]["code"] == "no_pages"
        assert server.muxk("explain", "nobody").exit_code == 1
        waiting.abort()
        running.abort()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0
    shown = CliRunner().invoke(build_app(), ["explain", "runs", "--record", str(record)])
    assert "=> admit/welcome" in shown.stdout
    assert "at most 8 requests and 4096 tokens" in shown.stdout
    around = CliRunner().invoke(
        build_app(), ["explain", "--at", "1s", "--last", "3", "--record", str(record)]
    )
    assert around.exit_code == 0
    record.write_bytes(record.read_bytes()[:-5])
    cut = CliRunner().invoke(build_app(), ["explain", "--shadow", "--record", str(record)])
    assert "the end of the file is cut off" in cut.stdout
    assert "differs in split" in cut.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "muxwise", "--watch", "--device", "sim"], "--watch needs the file of a policy"),
        (["run", "muxwise", "--demo", "--watch"], "--watch is for a server that stays"),
        (["run", "muxwise", "--device", "sim", "--record-max", "5"], "a size is expected, such as 256MiB"),
        (["run", "muxwise", "--device", "sim", "--shadow", "nothing.yaml"], "nothing.yaml"),
        (["explain", "x", "--at", "3s"], "give one of REQUEST and --at"),
        (["explain", "--at", "3"], "a time needs a unit"),
        (["explain", "--record", "nothing.record"], "can not be read"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_command_lines_that_make_no_sense_say_why(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    shown = CliRunner().invoke(build_app(), arguments, env={"MUXK_RUN_DIR": str(tmp_path / "run")})
    assert shown.exit_code in (1, 2)
    assert complaint in shown.stderr
    assert "Traceback" not in shown.output
