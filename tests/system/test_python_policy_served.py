"""The package of examples/python_policy beside a real server: run by name, listed, swapped out and in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from muxk.client import Client, PolicyRefused
from plugin_packages import install, install_example

RAISES = """
from muxk.policies.api import BasePolicy
class Raises(BasePolicy):
    api_version = 1
    name = "raises"
    spec = "extends: muxwise"
    def order(self, requests, now_ns, service):
        raise RuntimeError("no order today")
    def decide(self, view):
        return None
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of processes that have the example, and a policy that always fails, installed."""
    folder = install_example(tmp_path / "site")
    install(folder, "raising", {"raises": "raises:Raises"}, {"raises": RAISES})
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return os.environ | {"MUXK_RUN_DIR": str(tmp_path / "run"), "PYTHONPATH": path}


def muxk(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "muxk.client.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def serving(environment: dict[str, str], *arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "muxk.client.cli", "run", *arguments, "--device", "sim:8"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("serving "), line
            yield line.split()[-1]
            server.send_signal(signal.SIGINT)
            server.stdout.read()
        finally:
            server.kill()


def ask(client: Client) -> int:
    streams = [client.submit(token_ids=[65] * 40, max_tokens=5, ignore_eos=True) for _ in range(6)]
    return sum(len(stream.result(timeout_s=20).token_ids) for stream in streams)


def counts(state: dict[str, Any]) -> str:
    return json.dumps(state, default=str)


def test_a_policy_of_another_package_serves_and_is_swapped_by_name(environment: dict[str, str]) -> None:
    with serving(environment, "shortest-first", "--set", "patience=5s") as endpoint:
        with Client(endpoint) as client:
            assert ask(client) == 30
            assert "order/shortest-first" in counts(client.state())
            assert client.swap("inflight").name == "inflight"
            first = client.swap("shortest-first", {"patience": "1s"})
            second = client.swap("shortest-first", {"patience": "2s"})
            assert (first.name, second.name) == ("shortest-first", "shortest-first")
            assert first.sha != second.sha
            assert ask(client) == 30
            with pytest.raises(PolicyRefused, match="did you mean 'shortest-first'"):
                client.swap("shortest-fist")
            with pytest.raises(PolicyRefused, match="above the largest value"):
                client.swap("shortest-first", {"patience": "1h"})
        swapped = muxk(environment, "policy", "swap", "shortest-first", "--endpoint", endpoint)
        assert swapped.stdout.startswith("running shortest-first ("), swapped.stderr


def test_a_policy_that_fails_at_every_question_stops_nothing(environment: dict[str, str]) -> None:
    with serving(environment, "raises") as endpoint, Client(endpoint) as client:
        assert ask(client) == 30
        state = counts(client.state())
    assert "order/raises: RuntimeError: no order today" in state
    assert "decide/raises: the answer must be a Decision, not None" in state


def test_the_list_names_who_brought_a_policy(environment: dict[str, str]) -> None:
    rows = json.loads(muxk(environment, "policy", "list", "--json").stdout)
    [row] = [row for row in rows if row["name"] == "shortest-first"]
    assert (row["origin"], row["version"], row["problem"]) == ("muxk-shortest-first 1.0", "1.0", "")
    assert row["description"].startswith("The shortest prompt first")
    shown = muxk(environment, "policy", "list").stdout
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [row["name"] for row in rows]
    missing = muxk(environment, "policy", "list", "nobody")
    assert (missing.returncode, missing.stderr) == (1, "no policy named 'nobody' is installed here\n")
