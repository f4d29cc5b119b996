"""The admin socket, keys and several servers at once, with real processes and the command line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from muxk.client.client import Client
from muxk.client.errors import ConnectError, RequestError
from muxk.client.server_process import ServerProcess
from typer.testing import CliRunner, Result

TCP = "tcp://127.0.0.1:0"

LISTEN_UNTIL_STDIN_CLOSES = """
import sys, zmq
from pathlib import Path
from muxk.actors.rundir import EndpointClaims, admin_endpoint
from muxk.actors.system import new_ingress, ServeOptions
directory = Path(sys.argv[1])
with EndpointClaims(directory) as claims:
    ingress = new_ingress(ServeOptions("muxwise"), "tcp://127.0.0.1:0", directory, claims)
    with zmq.Context() as context:
        ingress.open(context, print)
        print(ingress.endpoint, admin_endpoint(ingress.endpoint, directory), flush=True)
        sys.stdin.read()
        ingress.close()
"""


def muxk(*arguments: str, **environment: str) -> Result:
    from muxk.client.cli import build_app

    return CliRunner(env=environment).invoke(build_app(), arguments)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """On a port, so that its admin socket is elsewhere."""
    with ServerProcess("muxwise", device="sim", endpoint=TCP) as process:
        process.wait_ready()
        yield process


def test_an_operator_works_from_the_run_directory_of_a_server_on_a_port(server: ServerProcess) -> None:
    endpoint, place = server.wait_ready(), str(server.run_directory)
    with Client(endpoint) as client:
        streams = [client.submit(token_ids=[65] * 20, max_tokens=20_000, ignore_eos=True) for _ in range(3)]
        named = client.submit(
            token_ids=[65] * 20, max_tokens=20_000, ignore_eos=True, request_id="the-long-one"
        )
        for stream in (*streams, named):
            next(stream)
        shown = muxk("abort", "the-long-one", "no-such", "--endpoint", endpoint, "--run-dir", place)
        assert (shown.exit_code, shown.stdout) == (0, "aborted 1 request\n")
        assert named.result(timeout_s=10).finish_reason == "abort"
        shown = muxk("abort", "--all", "--endpoint", endpoint, "--admin", server.admin)
        assert shown.stdout == "aborted 3 requests\n"
        assert [stream.result(timeout_s=10).finish_reason for stream in streams] == ["abort"] * 3
    shown = muxk("policy", "swap", "inflight", "--endpoint", endpoint, "--run-dir", place)
    assert shown.stdout.startswith("running inflight")
    assert "inflight" in muxk("state", "--endpoint", endpoint, "--run-dir", place).stdout
    assert "inflight" in muxk("state", "--endpoint", endpoint).stdout


def test_an_admin_command_over_tcp_alone_says_where_the_admin_socket_is(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUXK_RUN_DIR", str(tmp_path))
    for command in (["drain"], ["abort", "--all"], ["policy", "swap", "inflight"]):
        shown = muxk(*command, "--endpoint", server.wait_ready())
        assert shown.exit_code == 1
        assert "on the machine of the server only" in shown.stderr
        assert "--run-dir" in shown.stderr
    with Client(server.wait_ready()) as client, pytest.raises(ConnectError, match="--run-dir"):
        client.swap("inflight")


def test_abort_needs_to_be_told_what() -> None:
    assert muxk("abort").exit_code == 2
    assert muxk("abort", "--all", "r1").exit_code == 2


def test_keys_made_by_the_command_open_a_server_to_other_machines(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    for arguments in ([], ["--client", "alice"], ["--client", "mallory"]):
        shown = muxk("keys", str(folder), *arguments)
        assert shown.exit_code == 0, shown.stderr
        secret = (folder / f"{arguments[-1] if arguments else 'server'}.key_secret").read_text()
        assert secret.split('"')[-2] not in shown.stdout
    (folder / "clients" / "mallory.key").unlink()
    assert muxk("keys", str(folder)).exit_code == 1
    public, alice, mallory = (
        folder / name for name in ("server.key", "alice.key_secret", "mallory.key_secret")
    )
    with ServerProcess(
        "muxwise", device="sim", endpoint="tcp://0.0.0.0:0", allow_remote=True, keys=folder
    ) as server:
        endpoint = server.wait_ready().replace("0.0.0.0", "127.0.0.1")
        with Client(endpoint, server_key=public, keys=alice, admin=server.admin) as client:
            assert client.submit("hello", max_tokens=3, ignore_eos=True).result(10).completion_tokens == 3
            assert client.swap("inflight").name == "inflight"
            with pytest.raises(ConnectError, match="wants other keys"):
                Client(endpoint, server_key=public, keys=mallory)
            with pytest.raises(ConnectError):
                Client(endpoint, connect_timeout_s=0.5)
            with pytest.raises(ConnectError, match="MUXK_KEYS"):
                Client(endpoint, server_key=public)
            assert client.state()["server"]["broken_frames"] == 0
        own = {"MUXK_SERVER_KEY": str(public), "MUXK_KEYS": str(alice)}
        shown = muxk("submit", "hello", "--max-tokens", "3", "--json", "--endpoint", endpoint, **own)
        assert shown.exit_code == 0, shown.stderr
        shown = muxk("state", "--endpoint", endpoint, **own)
        assert shown.exit_code == 0, shown.stderr


def test_eight_servers_at_once_bind_ports_of_their_own_and_leave_nothing(tmp_path: Path) -> None:
    # What a server does about its sockets, without the seconds that the rest of one takes to start.
    command = [sys.executable, "-c", LISTEN_UNTIL_STDIN_CLOSES, str(tmp_path)]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            for _ in range(8)
        ]
        for server in servers:
            stack.callback(server.kill)
        lines = [server.stdout.readline().split() for server in servers if server.stdout is not None]
        assert len({client for client, _ in lines}) == 8
        assert {admin for _, admin in lines} == {f"ipc://{path}" for path in tmp_path.glob("tcp-*.admin")}
        for server in servers:
            server.communicate()
        assert [server.returncode for server in servers] == [0] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["directory.lock"]


def test_a_client_without_a_server_is_told_so_on_either_socket(tmp_path: Path) -> None:
    for command in (["state"], ["drain"], ["policy", "swap", "muxwise"]):
        shown = muxk(*command, "--run-dir", str(tmp_path))
        assert shown.exit_code == 1
        assert "no muxk server answers" in shown.stderr
    with pytest.raises((ConnectError, RequestError)):
        Client(f"ipc://{tmp_path}/nothing")
