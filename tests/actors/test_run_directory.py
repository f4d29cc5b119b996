"""Who may listen where: claims of endpoints, files of killed servers, endpoints that are open to others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from muxk.actors.backends import StartupError
from muxk.actors.endpoints import check_endpoint, load_server_keys
from muxk.actors.rundir import (
    EndpointClaims,
    RunDirectoryError,
    admin_endpoint,
    check_owner,
    default_endpoint,
)

KILLED_WHILE_IT_LISTENS = """
import os, socket, sys
from pathlib import Path
from muxk.actors.rundir import EndpointClaims
claims = EndpointClaims(Path(sys.argv[1]))
for endpoint in sys.argv[2:]:
    claims.claim(endpoint)
for name in ("muxk.sock", "muxk.sock.admin", "tcp-5555.admin"):
    socket.socket(socket.AF_UNIX).bind(os.path.join(sys.argv[1], name))
print("listening", flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_server(folder: Path, *endpoints: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED_WHILE_IT_LISTENS, str(folder), *endpoints]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def test_an_endpoint_belongs_to_one_server_until_that_ends(tmp_path: Path) -> None:
    endpoint = default_endpoint(tmp_path)
    with EndpointClaims(tmp_path) as first, EndpointClaims(tmp_path) as second:
        first.claim(endpoint)
        first.claim("tcp://127.0.0.1:5555")
        with pytest.raises(RunDirectoryError, match=r"already listens on ipc://.*--endpoint"):
            second.claim(endpoint)
        with pytest.raises(RunDirectoryError, match=r"already listens on tcp://127\.0\.0\.2:5555"):
            second.claim("tcp://127.0.0.2:5555")  # the name of its admin socket is taken
        second.claim("tcp://127.0.0.1:5556")
    assert names(tmp_path) == ["directory.lock"]


def test_what_a_killed_server_left_is_removed_and_what_a_live_one_has_is_not(tmp_path: Path) -> None:
    server = killed_server(tmp_path, default_endpoint(tmp_path), "tcp://127.0.0.1:5555")
    (tmp_path / "poetry.lock").write_text("of somebody else")
    (tmp_path / "crash-report.txt").write_text("of the killed server")
    try:
        with EndpointClaims(tmp_path):
            pass
        assert {"muxk.sock", "muxk.sock.admin", "tcp-5555.admin"} <= set(names(tmp_path))
    finally:
        server.kill()
        server.communicate()
    with EndpointClaims(tmp_path) as claims:
        assert names(tmp_path) == ["crash-report.txt", "directory.lock", "poetry.lock"]
        claims.claim(default_endpoint(tmp_path))


def test_a_file_that_is_no_socket_is_never_replaced(tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("do not lose me")
    with EndpointClaims(tmp_path / "run") as claims:
        with pytest.raises(RunDirectoryError, match="is no socket"):
            claims.claim(f"ipc://{letter}")
        with pytest.raises(RunDirectoryError, match="can not listen on"):
            claims.claim(f"ipc://{tmp_path}/no/such/folder/s")
    assert letter.read_text() == "do not lose me"


def test_the_directory_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o777)
    with EndpointClaims(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_directory_that_is_a_link_or_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match="not a directory"):
        EndpointClaims(link)
    check_owner(tmp_path / "nothing there")
    monkeypatch.setattr(os, "getuid", lambda: 123_456)
    with pytest.raises(RunDirectoryError, match="another user"):
        check_owner(tmp_path)


def test_the_admin_socket_lies_beside_the_endpoint_or_is_named_by_its_port(tmp_path: Path) -> None:
    assert admin_endpoint("ipc:///a/b.sock") == "ipc:///a/b.sock.admin"
    assert admin_endpoint("tcp://0.0.0.0:81", tmp_path) == f"ipc://{tmp_path}/tcp-81.admin"
    assert admin_endpoint("tcp://[::1]:81", tmp_path) == f"ipc://{tmp_path}/tcp-81.admin"


@pytest.mark.parametrize(
    "endpoint",
    ["ipc:///tmp/s", "tcp://127.0.0.1:0", "tcp://127.1.2.3:*", "tcp://localhost:5555", "tcp://[::1]:5555"],
)
def test_an_endpoint_on_this_machine_needs_nothing(endpoint: str) -> None:
    check_endpoint(endpoint, allow_remote=False, has_keys=False)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:1",
        "tcp://*:1",
        "tcp://[::]:1",
        "tcp://eth0:1",
        "tcp://10.0.0.1:1",
        "tcp://example.org:1",
    ],
)
def test_an_endpoint_beyond_this_machine_takes_the_flag_and_keys(endpoint: str) -> None:
    check_endpoint(endpoint, allow_remote=True, has_keys=True)
    for allow_remote, has_keys, missing in (
        (False, True, r"takes --allow-remote"),
        (True, False, r"takes --keys DIR, made by `muxk keys DIR`"),
        (False, False, r"takes --allow-remote.* and --keys"),
    ):
        with pytest.raises(StartupError, match=missing):
            check_endpoint(endpoint, allow_remote=allow_remote, has_keys=has_keys)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ipc://",
        "ipc://@abstract",
        "tcp://",
        "tcp://:5",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "inproc://a",
    ],
)
def test_an_endpoint_that_makes_no_sense_or_has_no_owner_is_refused_even_with_keys(endpoint: str) -> None:
    with pytest.raises(StartupError, match=r"use ipc://PATH"):
        check_endpoint(endpoint, allow_remote=True, has_keys=True)


def test_a_folder_without_keys_is_refused_by_the_name_of_the_file_that_is_missing(tmp_path: Path) -> None:
    assert load_server_keys(None) is None
    with pytest.raises(StartupError, match=r"server\.key_secret"):
        load_server_keys(tmp_path)
