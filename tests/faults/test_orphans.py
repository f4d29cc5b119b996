"""A server that belongs to a program does not outlive it, however the program ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from muxk.client import Client, ServerProcess

server = ServerProcess("muxwise", device="sim:2")
client = Client(server.wait_ready())
stream = client.submit("hello", max_tokens=50_000, ignore_eos=True)
next(stream)
print(server.pid, flush=True)
for piece in stream:
    pass
"""


@pytest.mark.alone
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_when_its_program_is_killed_in_mid_stream(how: signal.Signals, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        server = os.pidfd_open(pid)
        program.send_signal(how)
    ended: list[int] = []
    try:
        ended, _, _ = select.select([server], [], [], 20.0)
        assert ended, "the server is an orphan"
    finally:
        if not ended:
            signal.pidfd_send_signal(server, signal.SIGKILL)
        os.close(server)
