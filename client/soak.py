"""`make soak`: hostile frames and a crowd of clients against servers of its own; prints what they did.

Nothing here is a benchmark: the figures to look at are growth, what is left, and ratios.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from muxk.client.options import die
from muxk.client.server_process import ServerProcess
from muxk.client.soak_crowd import Load, crowd
from muxk.client.soak_frames import flood

GROWTH_BYTES_MAX = 32 * 1024 * 1024
"""Of the server's memory; a leak of 40 bytes a frame is more than that in a million."""
RATIO_MAX = 2.0
"""Of the good clients' P99 gap in the crowd to that when all others behave as well."""


def soak(
    frames: Annotated[int, typer.Option(min=0, help="Hostile messages to send.")] = 1_000_000,
    clients: Annotated[int, typer.Option(min=0, help="Connections of the crowd.")] = 1_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of each of the crowd's five rounds.")] = 40.0,
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="Also a crowd on the CPU device.")] = True,
) -> None:
    """Flood a server, then crowd it; exit code 1 when it grew, lost a page or let others wait."""
    faults = _flood(frames) if frames else []
    if clients:
        faults += _crowd("sim:8", Load(clients, seconds))
        if cpu:
            # What two cores can do: about 80 tokens/s of the embedded model.
            faults += _crowd("cpu", Load(clients, 1.5 * seconds, think_s=400.0, long_tokens=200))
    if faults:
        die("; ".join(faults))


def _flood(frames: int) -> list[str]:
    with ServerProcess("muxwise", device="sim") as server:
        result = flood(server, frames, int(time.time()), _say)
    grown = result.growth_bytes / 2**20
    _say(
        f"{result.messages} hostile messages in {result.seconds:.0f} s: {result.broken_frames} refused as "
        f"broken, memory {result.warm_bytes / 2**20:.0f} MiB after the first quarter and {grown:+.1f} MiB at "
        f"the end, {result.neighbour_tokens} tokens for the neighbour"
    )
    return [f"memory grew by {grown:.0f} MiB"] if result.growth_bytes > GROWTH_BYTES_MAX else []


def _crowd(device: str, load: Load) -> list[str]:
    _say(f"{load.clients} clients on {device}: a third alone, all well-behaved, then the crowd")
    with ServerProcess("muxwise", device=device) as server:
        result = crowd(server, load, _say)
    grown = result.growth_bytes / 2**20
    _say(f"P99 gap {result.p99_ratio:.2f} times the calm one; memory {grown:+.1f} MiB in the last crowd")
    faults = []
    if result.growth_bytes > GROWTH_BYTES_MAX:
        faults.append(f"{device}: memory grew by {grown:.0f} MiB")
    if result.p99_ratio > RATIO_MAX:
        faults.append(
            f"{device}: the good clients' P99 gap was {result.p99_ratio:.1f} times that of a calm crowd"
        )
    return faults


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(soak)
