"""One seed, one result: in another process, with other hashes of strings, and in another runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from muxk.client import Client, ServerProcess
from virtual_server import S, VirtualServer, expected_tokens

SIM = "import sys; from muxk.client.cli import main; sys.argv[0] = 'muxk'; main()"
WORKLOAD = ("--workload", "toolagent+sharegpt", "--rate", "12", "--requests", "6", "--seed", "7")


def figures_of(policy: str, path: Path, hash_seed: str) -> dict[str, Any]:
    """What a process of its own writes."""
    subprocess.run(
        [sys.executable, "-c", SIM, "sim", policy, *WORKLOAD, "--json", str(path)],
        check=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    made: dict[str, Any] = json.loads(path.read_bytes())
    return made


def test_two_processes_with_one_seed_write_the_same_bytes_but_for_the_wall_clock(tmp_path: Path) -> None:
    first, second = (figures_of("muxwise", tmp_path / name, name) for name in ("1", "4242"))
    assert first.pop("wall")["seconds"] > 0
    assert second.pop("wall")["seconds"] > 0
    assert json.dumps(first) == json.dumps(second)
    assert first["completed"] == 6
    assert first["idle"]["causes"]["unexplained"]["unit_seconds"] == 0


REQUESTS: tuple[dict[str, Any], ...] = tuple(
    {
        "prompt_token_ids": [97 + (7 * number + i) % 26 for i in range(20 + 37 * number)],
        "max_tokens": 30 + 5 * number,
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "ignore_eos": True,
    }
    for number in range(6)
)


def virtual_tokens() -> list[list[int]]:
    server = VirtualServer("muxwise")
    for number, fields in enumerate(REQUESTS):
        server.submit(20 * S, f"r{number}", **fields)
    server.run_until(40 * S)
    server.check_whole()
    return [server.outcome(f"r{number}").tokens for number in range(len(REQUESTS))]


@pytest.mark.alone
def test_a_server_in_real_time_says_what_the_same_server_says_in_virtual_time() -> None:
    with ServerProcess("muxwise", device="sim") as process, Client(process.wait_ready()) as client:
        streams = []
        for fields in REQUESTS:
            sampling = {name: value for name, value in fields.items() if name != "prompt_token_ids"}
            streams.append(client.submit(token_ids=fields["prompt_token_ids"], **sampling))
        real = [list(stream.result().token_ids) for stream in streams]
        told = client.state()["arbiter"]["idle"]
    assert real == virtual_tokens()
    assert real[1] == expected_tokens(
        REQUESTS[1]["prompt_token_ids"], REQUESTS[1]["max_tokens"], seed=1, temperature=0.8
    )
    causes = sum(cause["unit_seconds"] for cause in told["causes"].values())
    whole = causes + sum(told["busy_unit_seconds"].values()) + told["running_now_unit_seconds"]
    assert whole == pytest.approx(told["unit_seconds"])
    assert told["causes"]["unexplained"]["share"] < 0.01
    assert told["causes"]["launch"]["bubbles"] > 0
