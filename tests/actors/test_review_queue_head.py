"""The head of the queue was denied pages: that says nothing about those who come after it."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_server import MS, S, VirtualServer

FIELDS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SMALL_NS = 2 * S + 700 * MS


def server_with_a_denied_head(policy: str) -> VirtualServer:
    """`long` holds pages for about nine seconds, `big` waits for most of them."""
    server = VirtualServer(policy, kv_tokens=2048)
    server.submit(2 * S, "long", prompt_token_ids=[65] * 200, max_tokens=1500, **FIELDS)
    server.submit(2 * S + 500 * MS, "big", prompt_token_ids=[66] * 1900, max_tokens=10, **FIELDS)
    return server


def submit_small(server: VirtualServer, at_ns: int = SMALL_NS) -> None:
    server.submit(at_ns, "small", prompt_token_ids=[67] * 20, max_tokens=5, **FIELDS)


def first_ms(server: VirtualServer, since_ns: int = SMALL_NS) -> float:
    assert server.outcome("long").times_ns[-1] > 10 * S, "nobody else holds pages any more"
    return (server.outcome("small").times_ns[0] - since_ns) / MS


def test_the_big_request_is_really_denied_and_served_once_there_are_pages() -> None:
    server = server_with_a_denied_head("muxwise")
    server.run_until(3 * S)
    assert server.describe("admission")["short_of_pages"]
    server.run_until(60 * S)
    assert server.outcome("big").times_ns[0] > server.outcome("long").times_ns[-1]
    server.check_whole()


@pytest.mark.parametrize("abort_ms", [600, 800], ids=["aborted before it", "aborted after it"])
def test_who_stands_behind_a_denied_head_that_is_aborted_is_tried_at_once(abort_ms: int) -> None:
    server = server_with_a_denied_head("inflight")  # in order of arrival
    aborted_ns = 2 * S + abort_ms * MS
    server.abort(aborted_ns, "big")
    submit_small(server)
    server.run_until(aborted_ns)
    assert server.outcome("small").tokens == []
    server.run_until(60 * S)
    assert first_ms(server, max(SMALL_NS, aborted_ns)) < 50
    server.check_whole()


def test_a_client_that_leaves_with_the_head_and_more_lets_the_next_be_tried_at_once() -> None:
    server = server_with_a_denied_head("inflight")
    for index in range(20):
        at_ns = 2 * S + 100 * MS + index * MS
        server.submit(at_ns, f"r{index}", b"leaver", prompt_token_ids=[68] * 1900, max_tokens=2, **FIELDS)
    submit_small(server)
    server.abort(SMALL_NS + 100 * MS, "big")
    server.leave(SMALL_NS + 100 * MS, b"leaver")
    server.run_until(SMALL_NS + 100 * MS)
    assert server.outcome("small").tokens == []
    server.run_until(60 * S)
    assert first_ms(server, SMALL_NS + 100 * MS) < 50
    server.check_whole()


def test_a_more_urgent_request_is_tried_at_once_though_the_head_was_denied() -> None:
    # Its deadline is 0.2 s after its arrival, that of the big one 19 s.
    server = server_with_a_denied_head("muxwise")
    submit_small(server)
    server.run_until(60 * S)
    assert first_ms(server) < 50
    assert len(server.outcome("big").tokens) == 10
    server.check_whole()
