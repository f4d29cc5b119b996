"""Thousands of requests with aborts and dying clients against a pool that is too small for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from storm import run_storm, wrong_outcomes

STORM = Path(__file__).parent.parent / "storm.py"


@pytest.mark.parametrize("policy", ["muxwise", "inflight"])
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_any_order_of_simultaneous_messages_gives_the_right_tokens_and_a_whole_pool(
    policy: str, seed: int
) -> None:
    server, planned = run_storm(150, seed, policy, jitter=True)
    assert wrong_outcomes(server, planned) == []
    assert server.describe("decode")["recomputes"] > 0, "the pool was not short: the storm shows nothing"
    server.check_whole()


@pytest.mark.slow
def test_5000_requests_give_the_same_trace_in_two_processes() -> None:
    processes = [_start_storm(hash_seed) for hash_seed in ("1", "77")]
    first, second = (_report(process) for process in processes)
    assert first["hash"] == second["hash"]
    assert first == second
    assert first["wrong"] == []
    assert first["recomputes"] > 50
    assert first["aborts"] > 300
    assert first["kv"]["pages_used"] == 0


def test_another_seed_gives_another_trace() -> None:
    hashes = {run_storm(20, seed)[0].trace.hash for seed in (1, 2)}
    assert len(hashes) == 2


def _start_storm(hash_seed: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, str(STORM), "5000", "3", "muxwise"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _report(process: subprocess.Popen[str]) -> dict[str, object]:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    report: dict[str, object] = json.loads(output)
    return report
