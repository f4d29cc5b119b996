"""A server in a process of its own, real sockets and signals; simulated where the model does not matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from muxk.client.client import Client
from muxk.client.commands import Sampling
from muxk.client.errors import RequestError
from muxk.client.server_process import ServerProcess

CLIENT_THAT_DIES = """
import sys
from muxk.client.client import Client
client = Client(sys.argv[1])
stream = client.submit(token_ids=[65] * 400, max_tokens=3000, ignore_eos=True)
next(stream)
print("streaming", flush=True)
for _ in stream:
    pass
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with ServerProcess("muxwise", device="sim") as server:
        yield server.wait_ready()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)


def pages_used(client: Client) -> int:
    return int(client.state()["kv_pool"]["pages_used"])


def test_a_client_killed_in_mid_stream_gives_its_pages_back(endpoint: str) -> None:
    with Client(endpoint) as observer:
        until(lambda: pages_used(observer) == 0)
        victim = subprocess.Popen(
            [sys.executable, "-c", CLIENT_THAT_DIES, endpoint], stdout=subprocess.PIPE, text=True
        )
        assert victim.stdout is not None
        assert victim.stdout.readline() == "streaming\n"
        assert pages_used(observer) >= 25
        neighbour = observer.submit(token_ids=[70] * 30, max_tokens=100, ignore_eos=True)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()
        killed = time.monotonic()
        until(lambda: pages_used(observer) <= 9)
        # A step is 6 ms and the kernel has to close the connection first: a tenth of a second is generous.
        assert time.monotonic() - killed < 1.0
        assert len(neighbour.result(timeout_s=20).token_ids) == 100
        until(lambda: pages_used(observer) == 0)


def test_without_text_the_ids_are_those_of_the_text(endpoint: str) -> None:
    with Client(endpoint) as client:
        fields: Sampling = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "n": 2}
        streams = [client.submit("Once upon", **fields, detokenize=place == 0) for place in range(3)]
        told, *bare = [stream.result(timeout_s=20) for stream in streams]
        for result in bare:
            assert [choice.token_ids for choice in result.choices] == [
                choice.token_ids for choice in told.choices
            ]
            assert result.completion_tokens == told.completion_tokens
            assert (told.text != "", result.text) == (True, "")
        with pytest.raises(RequestError, match="give stop_token_ids in place of stop"):
            client.submit("Once upon", stop="x", detokenize=False).result(timeout_s=20)


def test_garbage_on_the_socket_disturbs_nobody(endpoint: str) -> None:
    with Client(endpoint) as client, zmq.Context() as context:
        stream = client.submit(token_ids=[70] * 30, max_tokens=200, ignore_eos=True)
        vandal = context.socket(zmq.DEALER)
        vandal.connect(endpoint)
        for index in range(300):
            vandal.send_multipart([os.urandom(index) for _ in range(index % 4 + 1)])
        vandal.send(b"\x91" * 1_000_000)
        assert len(stream.result(timeout_s=20).token_ids) == 200
        vandal.close(linger=0)
        assert client.state()["server"]["broken_frames"] >= 300


def test_a_frame_over_the_limit_costs_its_sender_the_connection_and_nobody_else(endpoint: str) -> None:
    with Client(endpoint) as client, zmq.Context() as context:
        vandal = context.socket(zmq.DEALER)
        vandal.connect(endpoint)
        vandal.send(b"x" * (64 << 20))
        stream = client.submit(token_ids=[70] * 30, max_tokens=100, ignore_eos=True)
        assert len(stream.result(timeout_s=20).token_ids) == 100
        vandal.close(linger=0)


def test_what_can_never_fit_is_refused_with_the_numbers(endpoint: str) -> None:
    with Client(endpoint) as client:
        with pytest.raises(RequestError, match=r"70000 tokens; with one more it exceeds the limit of 65536"):
            client.submit(token_ids=[65] * 70_000, max_tokens=1).result(timeout_s=10)
        with pytest.raises(RequestError, match=r"max_tokens may be 65436 at most"):
            client.submit(token_ids=[65] * 100, max_tokens=66_000).result(timeout_s=10)


@contextmanager
def start(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A server started from the command line; killed at the end of the block if it still runs."""
    command = [sys.executable, "-m", "muxk.client.cli", "run", "muxwise", "--device", "sim", *arguments]
    environment = os.environ | {"MUXK_RUN_DIR": str(directory)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def wait_serving(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line.startswith("serving "), line
    return line.split()[-1]


def test_the_first_interrupt_drains_and_the_second_stops(tmp_path: Path) -> None:
    with start(tmp_path) as server, Client(wait_serving(server)) as client:
        stream = client.submit(token_ids=[65] * 20, max_tokens=60_000, ignore_eos=True)
        next(stream)
        server.send_signal(signal.SIGINT)
        until(lambda: client.state()["server"]["draining"])
        with pytest.raises(RequestError, match="draining"):
            client.submit(token_ids=[65], max_tokens=1).result(timeout_s=10)
        assert server.poll() is None
        server.send_signal(signal.SIGINT)
        output, errors = server.communicate(timeout=10)
    assert "second signal" in output + errors


def test_an_interrupted_server_without_requests_ends_well_and_leaves_no_socket(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        wait_serving(server)
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=10)
        assert server.returncode == 0
    assert not (tmp_path / "muxk.sock").exists()


def test_a_device_of_one_unit_says_that_the_phases_take_turns(tmp_path: Path) -> None:
    with start(tmp_path, "--device", "sim:1") as server, Client(wait_serving(server)) as client:
        stream = client.submit(token_ids=[65] * 20, max_tokens=100, ignore_eos=True)
        long = client.submit(token_ids=[66] * 3000, max_tokens=1, ignore_eos=True)
        assert len(stream.result(timeout_s=30).token_ids) == 100
        assert long.result(timeout_s=30).completion_tokens == 1
        server.send_signal(signal.SIGINT)
        assert server.stdout is not None
        output = server.stdout.read()  # not communicate: it does not see what readline read ahead
    assert "one unit only: prefill and decode take turns" in output


def test_a_second_server_is_refused_and_a_killed_one_does_not_stand_in_the_way(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        wait_serving(first)
        with start(tmp_path) as second:
            _, errors = second.communicate(timeout=20)
            assert second.returncode == 2
            assert "already listens" in errors
        first.kill()
    with start(tmp_path) as third, Client(wait_serving(third)) as client:
        assert client.submit(token_ids=[65], max_tokens=1).result(timeout_s=10).completion_tokens == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "model.gguf"), (b"", "model.gguf"), (b"GGUF" + os.urandom(2000), "model.gguf")],
    ids=["missing", "empty", "damaged"],
)
@pytest.mark.model
def test_a_model_that_can_not_be_loaded_is_named(
    content: bytes | None, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with start(tmp_path / "run", "--model", str(path), "--device", "cpu") as server:
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 2
    assert complaint in errors
    assert "Traceback" not in errors
