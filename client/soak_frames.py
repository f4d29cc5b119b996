"""A flood of hostile frames against a server, while somebody else's stream goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from muxk.client.client import Client
from muxk.client.memory import rss_bytes
from muxk.client.server_process import ServerProcess

WARM_UP_SHARE = 0.25
"""Of the messages: allocators and caches are as large then as they get."""
TOKENS = 200
"""Of each answer that the neighbour reads."""
NEIGHBOUR_S = 60.0


@dataclass(frozen=True)
class Flood:
    """What a flood did."""

    messages: int
    seconds: float
    broken_frames: int
    """As the server counted."""
    warm_bytes: int
    end_bytes: int
    """Resident memory of the server after the warm-up, and at the end."""
    neighbour_tokens: int
    """Read by another client meanwhile."""

    @property
    def growth_bytes(self) -> int:
        return self.end_bytes - self.warm_bytes


def flood(server: ServerProcess, count: int, seed: int, say: Callable[[str], None]) -> Flood:
    """Send `count` hostile messages. Raises ClientError when the neighbour is not served."""
    endpoint = server.wait_ready()
    started = time.monotonic()
    warm_up = int(count * WARM_UP_SHARE)
    with Client(endpoint) as neighbour:
        tokens = _vandalise(endpoint, neighbour, warm_up, seed)
        warm_bytes = rss_bytes(server.pid)
        say(f"{warm_up} messages sent, the server has {warm_bytes / 2**20:.0f} MiB")
        tokens += _vandalise(endpoint, neighbour, count - warm_up, seed + 1)
        state = neighbour.state()
    seconds = time.monotonic() - started
    broken = int(state["server"]["broken_frames"])
    return Flood(count, seconds, broken, warm_bytes, rss_bytes(server.pid), tokens)


def _vandalise(endpoint: str, neighbour: Client, count: int, seed: int) -> int:
    """Tokens that the neighbour read while another process sent `count` messages."""
    command = [sys.executable, "-m", "muxk.client.hostile", endpoint, str(seed), str(count)]
    tokens = 0
    with subprocess.Popen(command) as vandal:
        try:
            while vandal.poll() is None:
                stream = neighbour.submit(token_ids=[70] * 30, max_tokens=TOKENS, ignore_eos=True)
                tokens += len(stream.result(NEIGHBOUR_S).token_ids)
        finally:
            vandal.kill()
    if vandal.returncode:
        raise RuntimeError(f"the sender of hostile messages ended with {vandal.returncode}")
    return tokens
