"""Small versions of `make soak`, which is a million hostile frames and a thousand clients."""

from __future__ import annotations

import pytest
from muxk.client.hostile import messages
from muxk.client.server_process import ServerProcess
from muxk.client.soak_crowd import Load, crowd
from muxk.client.soak_frames import flood

MIB = 1024 * 1024


def test_hostile_messages_are_the_same_for_the_same_seed() -> None:
    one, two, other = messages(1), messages(1), messages(2)
    first = [next(one) for _ in range(500)]
    assert first == [next(two) for _ in range(500)]
    assert first != [next(other) for _ in range(500)]


@pytest.mark.slow
def test_twenty_thousand_hostile_messages_leave_the_server_as_it_was_and_others_served() -> None:
    with ServerProcess("muxwise", device="sim") as server:
        result = flood(server, 20_000, 1, print)
        assert result.broken_frames > 10_000
        assert result.neighbour_tokens >= 400
        assert (
            result.growth_bytes < 32 * MIB
        )  # a megabyte is 60 bytes a message: a leak of frames is far more
        assert server.alive


@pytest.mark.slow
def test_two_hundred_clients_a_third_killed_a_third_slow_leave_nothing_behind() -> None:
    with ServerProcess("muxwise", device="sim:8") as server:
        result = crowd(server, Load(clients=200, seconds=2.5, think_s=3.0), print)
    for each in result.crowded:
        assert each.good.failed == 0
        assert each.gaps.count > 100
        assert each.whole_s < 15
    assert result.growth_bytes < 24 * MIB
