"""Prefixes live on devices that decode (`reuse: decode`): the one of a prompt fetches them and keeps none."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import cluster_server, gpu_tokens, prompt_of
from muxk.actors import protocol as wire
from muxk.actors.kv_pool import KvPool
from muxk.kernel.link import LinkTimes, Migration, MigrationFailed, SimLink
from muxk.kernel.messages import ReportRequests, RequestsReported
from muxk.kernel.policy import Policy
from muxk.kernel.statuses import Reason
from muxk.policies.engine import load_policy
from virtual_server import MS, S, VirtualServer

FIRST = prompt_of(300, 1)
ANSWER = gpu_tokens(FIRST, 20)
TURN = [*FIRST, *ANSWER, *prompt_of(40, 2)]
PREFIX = 304
"""Tokens of full pages of the first turn whose KV was written: all but its last token's."""
TURN_NS = 10 * S
COPY_MS = 50
SLOW = LinkTimes(bytes_per_ns=1e3, latency_ns=COPY_MS * MS)


def link_of(server: VirtualServer) -> SimLink:
    assert server.backend.cluster is not None
    link = server.backend.cluster.link
    assert isinstance(link, SimLink)
    return link


def ask(server: VirtualServer, at_ns: int, name: str, prompt: list[int], **more: Any) -> None:
    fields = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True} | more
    server.submit(at_ns, name, prompt_token_ids=prompt, **fields)


def two_turns(policy: str | Policy = "splitwise", **more: Any) -> VirtualServer:
    server = cluster_server(policy, devices=2, **more)
    ask(server, S, "first", FIRST)
    ask(server, TURN_NS, "second", TURN)
    return server


def cached_tokens(server: VirtualServer, name: str) -> int:
    [end] = server.outcome(name).terminal
    assert isinstance(end, wire.Finished)
    return end.cached_tokens


def check_nothing_is_kept(server: VirtualServer, group: int = 0) -> None:
    pool = server.runtime.actor(f"kv_pool@{group}")
    assert isinstance(pool, KvPool)
    assert (pool.state.pool.cached, pool.state.pool.used, pool.state.pool.expected) == (0, 0, 0)


def test_a_second_turn_computes_its_new_tokens_only_and_leaves_nothing_behind() -> None:
    server = two_turns()
    server.run_until(20 * S)
    assert server.outcome("second").tokens == gpu_tokens(TURN, 20)
    assert cached_tokens(server, "second") == PREFIX
    prefills, decodes = server.describe("kv_pool@0"), server.describe("kv_pool@1")
    assert prefills["prompt_tokens"] - prefills["reused_tokens"] == len(FIRST) + len(TURN) - PREFIX
    assert (prefills["pages_cached"], decodes["pages_cached"]) == (0, (len(TURN) + 19) // 16)
    migration = server.describe("migration")
    # What the device of the answers has is not copied back to it.
    assert (migration["fetched_pages"], migration["reused_pages"]) == (PREFIX // 16, PREFIX // 16)
    assert migration["pages"] == -(-len(FIRST) // 16) + -(-len(TURN) // 16) - PREFIX // 16
    server.check_whole()


def test_a_policy_that_does_not_fetch_computes_the_prompt_anew_on_the_other_device() -> None:
    server = two_turns("muxwise")
    server.run_until(20 * S)
    assert server.describe("migration")["fetches"] == 0
    assert server.outcome("second").tokens == gpu_tokens(TURN, 20)


def test_while_a_prefix_is_copied_its_request_says_so() -> None:
    server = two_turns()
    link_of(server)._times = SLOW
    server.run_until(TURN_NS + COPY_MS // 2 * MS)
    migration: Any = server.runtime.actor("migration")
    told: list[RequestsReported] = []
    migration.send = lambda ref, message: told.append(message)
    migration.on_report_requests(ReportRequests(1, ()))
    del migration.send
    [status] = told[0].statuses
    assert status.code == Reason.MIGRATING
    assert status.detail == "the prefix that it shares moves from device 1 to 0"


@pytest.mark.parametrize(
    "after_ms", [COPY_MS // 2, COPY_MS, COPY_MS + 3, COPY_MS + 15, 2 * COPY_MS, 3 * COPY_MS]
)
def test_an_abort_finds_a_request_at_any_point_of_its_way(after_ms: int) -> None:
    server = two_turns()
    link_of(server)._times = SLOW
    ask(server, TURN_NS, "beside", prompt_of(800, 9))
    server.abort(TURN_NS + after_ms * MS, "second")
    server.run_until(20 * S)
    [end] = server.outcome("second").terminal
    assert isinstance(end, wire.Finished)
    assert end.finish_reason == "abort"
    assert server.outcome("beside").tokens == gpu_tokens(prompt_of(800, 9), 20)
    check_nothing_is_kept(server)
    server.check_whole()


def test_requests_that_share_a_fetched_prefix_keep_it_until_the_last_is_computed() -> None:
    server = two_turns()
    turns = [[*FIRST, *ANSWER, *prompt_of(30 + index, 50 + index)] for index in range(6)]
    for index, turn in enumerate(turns):
        ask(server, TURN_NS + index * 3 * MS, f"branch{index}", turn)
    server.run_until(30 * S)
    for index, turn in enumerate(turns):
        assert server.outcome(f"branch{index}").tokens == gpu_tokens(turn, 20)
        assert cached_tokens(server, f"branch{index}") >= PREFIX
    check_nothing_is_kept(server)


def test_a_copy_that_fails_costs_the_reuse_and_nothing_else() -> None:
    server = two_turns()
    link = link_of(server)
    launch = link.launch

    def broken(migration: Migration) -> None:
        if migration.source == 1:
            server.runtime.port("migration").post(MigrationFailed(migration.migration_id, "the link is down"))
        else:
            launch(migration)

    link.launch = broken  # type: ignore[method-assign]
    server.run_until(20 * S)
    assert server.outcome("second").tokens == gpu_tokens(TURN, 20)
    assert cached_tokens(server, "second") == 0
    check_nothing_is_kept(server)
    server.check_whole()


def test_without_room_for_the_prefix_a_prompt_is_computed_whole() -> None:
    # Pools of 30 pages: while the other prompt is computed on device 0 there is no room for 19 pages more.
    server = two_turns(load_policy("splitwise", {"borrow": "false"}), kv_tokens=480)
    long = prompt_of(400, 3)
    ask(server, TURN_NS - MS, "before", long)
    server.run_until(30 * S)
    assert server.describe("migration")["fetches_denied"] == 1
    assert server.outcome("second").tokens == gpu_tokens(TURN, 20)
    assert server.outcome("before").tokens == gpu_tokens(long, 20)
    check_nothing_is_kept(server)
    server.check_whole()
