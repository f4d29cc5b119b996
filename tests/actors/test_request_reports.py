"""Why each request is where it is: at any moment every live request has a reason, and it is the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from muxk.actors.gateway import Gateway
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.messages import ReportRequests, RequestsReported
from muxk.kernel.statuses import STATUSES_MAX, Reason, RequestStatus, strongest
from muxk.kernel.work import Split
from muxk.policies.engine import load_policy
from python_policies import MS, Fixed, Random
from virtual_server import S, VirtualServer

SLOW_PREFILL = SimCosts(prefill_token_ns=20_000)
REPORTING = ("tokenizer", "admission", "prefill", "decode", "arbiter")


def reports(server: VirtualServer, *asked: int) -> dict[str, RequestsReported]:
    """What the actors say when they are asked between two events: nothing of the run changes by it."""
    found: dict[str, RequestsReported] = {}
    for name in REPORTING:
        actor: Any = server.runtime.actor(name)
        actor.send = lambda ref, message, name=name: found.update({name: message})
        actor.on_report_requests(ReportRequests(1, asked))
        del actor.send
    return found


def reasons(server: VirtualServer) -> dict[int, RequestStatus]:
    found = reports(server)
    return strongest(status for report in found.values() for status in report.statuses)


def live(server: VirtualServer) -> set[int]:
    gateway = server.runtime.actor("gateway")
    assert isinstance(gateway, Gateway)
    return set(gateway.state.live)


def submit(
    server: VirtualServer, at_ns: int, name: str, tokens: int, max_tokens: int = 3, **more: Any
) -> None:
    letter = 97 + len(server.outcomes) % 26
    server.outcome(name)
    fields = {"prompt_token_ids": [letter] * tokens, "max_tokens": max_tokens, "ignore_eos": True} | more
    server.submit(at_ns, name, **fields)


POLICIES = ["muxwise", "chunked", "temporal", "inflight", "static_split", "random"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_live_request_has_a_reason_at_any_moment(name: str) -> None:
    policy = Random(3, decode_floor_ns=30 * MS) if name == "random" else load_policy(name)
    server = VirtualServer(policy, calibrate=False, kv_tokens=512, costs=SLOW_PREFILL)
    for index in range(16):
        submit(server, S + index * 5 * MS, f"r{index}", 20 + 60 * (index % 4), 5 + 30 * (index % 3))
    submit(server, S + 30 * MS, "text", 1, prompt="a text " * 50, prompt_token_ids=None)
    seen: set[Reason] = set()
    for step in range(700):
        server.run_until(S + step * MS)
        found = reasons(server)
        assert set(found) == live(server), f"{step} ms"
        seen |= {status.code for status in found.values()}
    assert {Reason.QUEUED, Reason.DECODING, Reason.PREFILLING} <= seen


def test_the_head_waits_for_the_batch_that_runs_and_those_behind_it_for_the_order() -> None:
    server = VirtualServer("muxwise", calibrate=False, costs=SLOW_PREFILL, layers=8)
    for index, tokens in enumerate((2000, 300, 400, 500)):
        submit(server, S + index * MS, f"r{index}", tokens)
    server.run_until(S + 30 * MS)
    found = reasons(server)
    assert [found[request_id].code for request_id in (1, 2, 3, 4)] == [
        Reason.PREFILLING,
        Reason.LANE_BUSY,
        Reason.QUEUED,
        Reason.QUEUED,
    ]
    assert found[2].rule == "preempt/no-preemption"
    assert found[2].detail == "batch 1 (1 request) runs first: layer 2 of 8 is next for 2000 tokens"
    assert found[4].detail == "2 of 3 waiting requests go first"
    assert str(found[4].rule).startswith("order/")
    assert found[1].rule == "slice/cold-start"


def test_a_parked_batch_names_the_rule_that_parked_it() -> None:
    policy = Fixed(preempt=True, layers=1, fuse=False, preemptions=1)
    server = VirtualServer(policy, calibrate=False, costs=SLOW_PREFILL, layers=8)
    submit(server, S, "long", 1000)
    submit(server, S + MS, "short", 1000)
    server.run_until(S + 50 * MS)
    found = reasons(server)
    assert found[1].code is Reason.PARKED
    assert found[1].rule is not None
    assert found[1].rule.startswith("preempt/")
    assert found[1].detail.startswith("batch 1 (1 request) was parked 1 time: layer ")
    submit(server, S + 50 * MS, "third", 1000)
    server.run_until(S + 60 * MS)
    assert reasons(server)[3].detail.endswith("another batch is parked already")
    server.run_until(S + 250 * MS)
    last = reasons(server)[3]
    assert last.code is Reason.LANE_BUSY
    assert last.detail.endswith("preemptions over the limit: it runs to its end")
    assert last.rule is None


def test_a_batch_is_not_parked_for_its_own_requests() -> None:
    server = VirtualServer(Fixed(preempt=True, fuse=False), calibrate=False, costs=SLOW_PREFILL)
    submit(server, S, "alone", 1000)
    server.run_until(S + 10 * MS)
    assert server.runtime.actor("arbiter").state.counts["preemptions"] == 0  # type: ignore[attr-defined]


def test_a_split_without_units_is_the_reason_of_the_phase_that_it_holds() -> None:
    held_decode = VirtualServer(
        Fixed(split=Split(0, 8), fuse=False, layers=1), calibrate=False, costs=SLOW_PREFILL, layers=8
    )
    submit(held_decode, S, "row", 20, 50)
    submit(held_decode, S + 20 * MS, "long", 2000)
    held_decode.run_until(S + 60 * MS)
    found = reasons(held_decode)
    assert found[1].code is Reason.DECODE_HELD
    assert found[1].detail.startswith("the decode step has been held for ")
    assert str(found[1].rule).startswith("split/")
    held_prefill = VirtualServer(Fixed(split=Split(8, 0), fuse=False), calibrate=False)
    submit(held_prefill, S, "row", 20, 50)
    submit(held_prefill, S + 50 * MS, "next", 20)
    held_prefill.run_until(S + 60 * MS)
    found = reasons(held_prefill)
    assert found[1].code is Reason.DECODING
    assert found[2].code is Reason.PREFILL_HELD
    assert str(found[2].rule).startswith("split/")


@pytest.mark.parametrize("waits", [True, False], ids=["the policy waits for pages", "the pool denies them"])
def test_want_of_pages_is_told_with_the_figures(waits: bool) -> None:
    policy = load_policy("inflight") if waits else Fixed(split=Split(8, 8), fuse=False)
    server = VirtualServer(policy, calibrate=False, kv_tokens=512)
    submit(server, S, "row", 300, 100)
    submit(server, S + 50 * MS, "next", 400)
    submit(server, S + 51 * MS, "behind", 20)
    server.run_until(S + 60 * MS)
    found = reasons(server)
    assert found[2].code is Reason.NO_PAGES
    assert "needs up to 26 pages" in found[2].detail
    assert "of 32 are free" in found[2].detail
    assert found[2].rule == ("split/decode" if waits else "order/always")
    assert found[3].code is Reason.QUEUED
    assert found[3].detail.endswith("requests go first" if waits else "the first of them waits for pages")


def test_a_row_without_a_page_and_one_that_was_evicted_say_so() -> None:
    server = VirtualServer("inflight", calibrate=False, kv_tokens=256)
    for index in range(6):
        submit(server, S + index * MS, f"r{index}", 30, 120)
    evicted: dict[str, str | None] = {}
    details = set()
    for step in range(3000):
        server.run_until(S + step * MS)
        for status in reasons(server).values():
            details.add(status.code)
            if status.code is Reason.EVICTED:
                evicted[status.where] = status.rule
    assert {Reason.EVICTED, Reason.NO_PAGES} <= details
    assert evicted["admission"] is not None
    server.run_until(60 * S)
    server.check_whole()


SHARES = """
apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: shares}
spec:
  extends: muxwise
  classes: [{name: a, when: request.class == 'a', share: 1}, {name: b, share: 1}]
  order: {by: request.arrival}
  form: {requests: 1, tokens: 1}
"""


def test_a_class_that_got_more_than_its_share_is_told_to_wait_for_it(tmp_path: Path) -> None:
    file = tmp_path / "shares.yaml"
    file.write_text(SHARES, encoding="utf-8")
    server = VirtualServer(load_policy(file), calibrate=False, costs=SLOW_PREFILL, layers=8)
    submit(server, S, "b0", 500, request_class="b")
    for index in range(3):
        submit(server, S + 10 * MS + index, f"b{index + 1}", 100, request_class="b")
    for index in range(3):
        submit(server, S + 20 * MS + index, f"a{index}", 300, request_class="a")
    server.run_until(S + 30 * MS)
    assert reasons(server)[5].code is Reason.LANE_BUSY, "a0 is first though b1, b2 and b3 came before it"
    while reasons(server)[5].code in (Reason.LANE_BUSY, Reason.FORMING):
        server.run_until(server.runtime.now_ns() + MS)
    # Class a has got 300 tokens more than b: all of b goes first, where the order by itself has a1 second.
    found = reasons(server)
    assert [found[request_id].code for request_id in (2, 3, 4, 6)] == [
        Reason.LANE_BUSY,
        Reason.QUEUED,
        Reason.QUEUED,
        Reason.CLASS_SHARE,
    ]
    assert found[6].detail == "class a got more than its share so far; 3 of 5 waiting requests go first"


def test_a_prompt_that_is_being_encoded_says_so() -> None:
    server = VirtualServer("inflight", calibrate=False)
    server.submit(S, "long", prompt="word " * 400, max_tokens=1)
    server.submit(S, "next", prompt="word " * 400, max_tokens=1)
    server.run_until(S + 10_000)
    found = reasons(server)
    assert [status.code for status in found.values()] == [Reason.ENCODING] * 2
    assert [found[1].detail, found[2].detail] == [
        "its prompt is being encoded",
        "prompts of others are encoded first",
    ]


def test_a_report_is_bounded_and_tells_of_those_that_were_asked_for() -> None:
    server = VirtualServer("inflight", calibrate=False, costs=SLOW_PREFILL, layers=16)
    submit(server, S, "long", 3000)
    for index in range(STATUSES_MAX + 50):
        submit(server, S + MS + index, f"r{index}", 5)
    server.run_until(S + 20 * MS)
    last = STATUSES_MAX + 51
    report = reports(server)["admission"]
    assert len(report.statuses) == STATUSES_MAX
    assert report.total == server.describe("admission")["waiting"] > STATUSES_MAX
    assert last not in {status.request_id for status in report.statuses}
    asked = reports(server, last)["admission"]
    assert asked.statuses[-1].request_id == last
    assert len(asked.statuses) == STATUSES_MAX + 1


def test_of_two_reasons_the_later_stage_counts() -> None:
    statuses = [
        RequestStatus(1, "arbiter", Reason.PREFILLING, ""),
        RequestStatus(1, "admission", Reason.QUEUED, ""),
        RequestStatus(1, "decode", Reason.DECODING, ""),
    ]
    assert strongest(statuses)[1].where == "decode"
    assert strongest(reversed(statuses))[1].where == "decode"
