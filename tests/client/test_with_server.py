"""The client's side of a whole server over the simulated device: demo, bench, quickstart, a killed server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from muxk.client import Client, RequestError, ServerProcess, protocol
from muxk.client.server_process import ServerDied

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, run_directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "MUXK_RUN_DIR": str(run_directory)},
        cwd=ROOT,
    )


def test_a_client_streams_from_a_server_in_a_child_process_and_it_ends_with_the_block() -> None:
    with ServerProcess("muxwise", device="sim") as server:
        with Client(server.wait_ready()) as client:
            assert client.submit("hello", max_tokens=5, ignore_eos=True).result().completion_tokens == 5
        assert server.alive
    assert not server.alive
    assert server.stop() == 0


def test_a_server_that_does_not_start_tells_its_parent_why() -> None:
    with (
        ServerProcess("no-such-policy", device="sim") as server,
        pytest.raises(ServerDied, match="no-such-policy"),
    ):
        server.wait_ready()


def test_a_drained_server_finishes_its_requests_and_ends_well_also_for_who_reads_them_late() -> None:
    with (
        ServerProcess("muxwise", device="sim") as server,
        Client(server.wait_ready()) as client,
        late_reader(client.endpoint) as late,
    ):
        submit = protocol.Submit("late", prompt="hello", max_tokens=50, ignore_eos=True, detokenize=False)
        late.send(msgspec.msgpack.encode(submit))
        stream = client.submit("hello", max_tokens=60, ignore_eos=True)
        next(stream)
        client.drain()
        with pytest.raises(RequestError, match="draining"):
            client.submit("too late").result()
        assert stream.result().completion_tokens == 60
        with pytest.raises(TimeoutError):
            server.wait(timeout_s=0.5)
        events = read_to_the_end(late)
        assert server.wait(timeout_s=30) == 0
        assert sum(len(event.token_ids) for event in events if isinstance(event, protocol.TokenIds)) == 50
        [finished] = [event for event in events if isinstance(event, protocol.Finished)]
        assert (finished.finish_reason, finished.completion_tokens) == ("length", 50)


@contextmanager
def late_reader(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A connection that takes two frames, and more only when they are read."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVHWM, 2)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        dealer.setsockopt(zmq.RECONNECT_IVL, 3_600_000)
        dealer.connect(endpoint)
        yield dealer


def read_to_the_end(dealer: zmq.Socket[bytes]) -> list[protocol.Event]:
    """All events up to the terminal one."""
    events: list[protocol.Event] = []
    while not events or not isinstance(events[-1], protocol.Finished | protocol.Failed):
        events += msgspec.msgpack.decode(dealer.recv(), type=protocol.Frame).events
    return events


def test_a_killed_server_fails_its_streams() -> None:
    with ServerProcess("muxwise", device="sim") as server, Client(server.wait_ready()) as client:
        stream = client.submit("hello", max_tokens=4000, ignore_eos=True)
        next(stream)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="the server is gone"):
            stream.result()


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path: Path) -> None:
    ended = python("examples/quickstart.py", "sim", run_directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "[now under inflight]" in ended.stdout


@pytest.mark.slow
def test_the_demo_shows_lines_and_a_summary_without_a_terminal(tmp_path: Path) -> None:
    arguments = ("run", "muxwise", "--demo", "--device", "sim", "--demo-seconds", "6")
    ended = python("-m", "muxk.client.cli", *arguments, run_directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("tok/s") >= 4
    assert "long prompts read" in ended.stdout


@pytest.mark.slow
def test_bench_measures_both_phases_of_both_policies(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    lengths = ("--seconds", "1.5", "--solo-seconds", "1", "--warmup-seconds", "0.2", "--long-every", "0.5")
    arguments = ("bench", "--device", "sim", "--runs", "1", *lengths, "--json", str(report))
    ended = python("-m", "muxk.client.cli", *arguments, run_directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "strict goodput / output" in ended.stdout
    runs = json.loads(report.read_text(encoding="utf-8"))["runs"]
    assert [run["policy"] for run in runs] == ["muxwise", "inflight"]
    for run in runs:
        assert run["figures"]["mixed"]["longs_sent"] == 3
        assert run["figures"]["solo"]["longs_sent"] == 0
        assert run["figures"]["mixed"]["failed"] == 0
        assert run["figures"]["mixed"]["output_tokens"] > 50
