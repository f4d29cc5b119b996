"""A stop string that is found while its request is evicted: nobody computes what nobody reads."""

from __future__ import annotations

import pytest
from muxk.actors.messages import ReleasePages, Request
from muxk.kernel.work import int32_array
from virtual_server import MS, S, VirtualServer

REQUESTS = 4
STOP_BYTES = 12
# Orders of delivery in which the stop meets the request at decode (3) or finds it gone from there already.
SEEDS = [0, 1, 2, 3, 5, 10]


def evicting_server(seed: int, stops: dict[str, str]) -> VirtualServer:
    """Four streams in a pool that holds about half of their tokens."""
    server = VirtualServer(kv_tokens=240, seed=seed, jitter=True)
    for index in range(REQUESTS):
        name = f"r{index}"
        server.submit(
            2 * S + index * MS,
            name,
            prompt_token_ids=[97 + index] * (20 + seed % 13),
            max_tokens=120,
            temperature=0.0,
            ignore_eos=True,
            stop=stops.get(name),
        )
    return server


def first_evicted(seed: int) -> Request:
    """The request, with all that was generated, that is the first to be computed again."""
    server = evicting_server(seed, {})
    for at_ns in range(2 * S, 10 * S, 50 * MS):
        server.run_until(at_ns)
        for record in server.trace.recent(1000):
            release = record.detail
            if record.kind == "handled" and isinstance(release, ReleasePages) and release.recompute:
                return release.recompute
    raise AssertionError("the pool is large enough: nobody was evicted")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_whose_stop_crosses_its_eviction_is_not_computed_on(seed: int) -> None:
    victim = first_evicted(seed)
    name = f"r{victim.request_id - 1}"
    stop = bytes(int32_array(victim.generated).tolist())[-STOP_BYTES:].decode()
    server = evicting_server(seed, {name: stop})
    server.run_until(60 * S)
    [finished] = server.outcome(name).terminal
    assert (finished.finish_reason, finished.stop_reason) == ("stop", stop)
    seen = sum(len(server.outcome(f"r{index}").tokens) for index in range(REQUESTS))
    # One step may end while the stop is on its way.
    assert server.describe("decode")["tokens"] - seen <= 1
    server.check_whole()
