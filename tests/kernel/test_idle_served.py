"""Idle time of whole servers in virtual time: each cause where it is known how much of it there must be."""

from __future__ import annotations

from typing import Any

import pytest
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.bandwidth import Sharing
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.devices.sim_gpu import HostTimes, SimGpu, SimGpuOptions
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.idle import Busy, Cause, IdleReport
from muxk.kernel.policy import Policy
from muxk.kernel.timeline import PhaseCost
from muxk.policies.engine import compile_policy
from virtual_server import MS, S, VirtualServer

UNITS = 8
HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: mine}\nspec:\n"
WAKEUP_NS = 70_000


def request(prompt: int, output: int, first: int = 0) -> dict[str, Any]:
    tokens = [97 + (first + i) % 26 for i in range(prompt)]
    return {"prompt_token_ids": tokens, "max_tokens": output, "temperature": 0.0, "ignore_eos": True}


def served(policy: str | Policy, *requests: tuple[int, dict[str, Any]], **more: Any) -> IdleReport:
    """(ms after 1 s, fields): all served, and the report at 10 s. Nothing is unexplained, and all adds up."""
    server = VirtualServer(policy, units=UNITS, calibrate=False, **more)
    for number, (at_ms, fields) in enumerate(requests):
        server.submit(S + at_ms * MS, f"r{number}", **fields)
    server.run_until(10 * S)
    server.check_whole()
    report = report_of(server)
    assert report.open_unit_ns == 0
    assert report.idle[Cause.UNEXPLAINED].total_unit_ns == 0
    return report


def report_of(server: VirtualServer) -> IdleReport:
    arbiter = server.runtime.actor("arbiter")
    assert isinstance(arbiter, Arbiter)
    report = arbiter.idle_report()
    assert report.booked_unit_ns == report.total_unit_ns
    assert report.units == server.device.units
    return report


def unit_ns(report: IdleReport, cause: Cause) -> int:
    return report.idle[cause].total_unit_ns


def mine(rules: str) -> Policy:
    return compile_policy(f"{HEAD}{rules}", "mine.yaml")


def test_a_lone_request_leaves_no_unit_idle_but_for_two_launches() -> None:
    costs = SimCosts(launch_ns=20_000)
    report = served("muxwise", (0, request(100, 20)), costs=costs)
    assert unit_ns(report, Cause.LAUNCH) == 2 * 20_000 * UNITS  # its prompt, and its first step
    assert report.idle[Cause.LAUNCH].count == 2
    with_work_ns = sum(report.busy.values()) + unit_ns(report, Cause.LAUNCH)
    assert report.worked_unit_ns == with_work_ns
    assert unit_ns(report, Cause.NO_WORK) == 10 * S * UNITS - with_work_ns


def test_half_a_device_that_a_fixed_split_keeps_for_prompts_is_over_reserved_while_nobody_sends_any() -> None:
    report = served("static_split", (0, request(16, 60)))
    assert report.busy[Busy.DECODE] > 50 * report.busy[Busy.PREFILL]
    both = report.busy[Busy.DECODE] + report.busy[Busy.PREFILL]
    assert unit_ns(report, Cause.OVER_RESERVED) == pytest.approx(both, rel=0.01)
    assert report.idle_share == pytest.approx(0.5, abs=0.01)


def test_layers_of_a_new_split_that_wait_for_those_of_the_old_one_drain_it() -> None:
    report = served("muxwise", *((30 * i, request(60 + 20 * i, 30, i)) for i in range(8)))
    assert report.idle[Cause.DRAIN].count > 0
    assert unit_ns(report, Cause.DRAIN) > 10 * unit_ns(report, Cause.LAUNCH)


def test_prompts_without_kv_pages_are_no_missing_work() -> None:
    requests = [(i, request(200 - 10 * i, 30, i)) for i in range(3)]
    report = served("static_split", *requests, kv_tokens=256)
    enough = served("static_split", *requests, kv_tokens=2048)
    assert unit_ns(report, Cause.NO_PAGES) > 0
    assert unit_ns(enough, Cause.NO_PAGES) == 0


def test_a_step_that_is_held_for_the_rows_of_a_prompt_is_a_wait_for_the_merge() -> None:
    rules = (
        "  split:\n"
        "    - {name: hold, when: prefill.pending or prefill.in_flight > 0, then: {decode: 0, prefill: 4}}\n"
        "    - {name: go, then: {decode: all}}\n"
        "  slice: {layers: all}\n"
    )
    report = served(mine(rules), (0, request(16, 40)), (50, request(400, 4, 3)))
    held = unit_ns(report, Cause.MERGE)
    assert held == pytest.approx(report.busy[Busy.PREFILL], rel=0.5)
    # While the first prompt ran, nobody decoded: the other half had nothing to wait for.
    assert unit_ns(report, Cause.UNASSIGNED) > 0


def test_a_batch_that_another_is_parked_for_starts_after_a_launch_which_the_preemption_costs() -> None:
    rules = (
        "  limits: {backlog: 1}\n"
        "  preempt:\n"
        "    - {name: shorter, when: candidate.new_tokens < 40 and running.depth == 0, then: park}\n"
        "    - {name: otherwise, then: continue}\n"
        "  slice: {layers: 1}\n"
        "  form: {requests: 1, tokens: 4096}\n"
    )
    costs = SimCosts(launch_ns=20_000, prefill_token_ns=100_000)
    report = served(mine(rules), (0, request(200, 2)), (5, request(20, 2, 5)), costs=costs)
    assert unit_ns(report, Cause.PREEMPTION) == 20_000 * UNITS


class FixedCost:
    """A layer takes 1 ms and moves nothing."""

    units = UNITS
    layers = 4

    def phases(self, load: ItemLoad, units: int) -> list[PhaseCost]:
        return [PhaseCost(1e6 * load.layers, 0.0)]


def test_between_steps_that_are_not_queued_ahead_the_host_has_to_notice() -> None:
    host = HostTimes(decode_launch_ns=500, prefill_layer_launch_ns=0, wakeup_ns=WAKEUP_NS, switch_ns=0)
    device = SimGpu(FixedCost(), SimGpuOptions("sim:test", 65, Sharing(1.0, 0.0, 0.3), host, granularity=4))
    policy = mine("  limits: {decode_ahead: 0}\n  slice: {layers: all}\n")
    report = served(policy, (0, request(32, 21)), device=device)
    assert report.idle[Cause.HOST].count == 21  # the prompt, and 20 steps
    assert unit_ns(report, Cause.HOST) == 21 * WAKEUP_NS * UNITS
    assert unit_ns(report, Cause.LAUNCH) == 20 * 500 * UNITS


def test_what_the_server_tells_of_itself_adds_up() -> None:
    server = VirtualServer("static_split", units=UNITS, calibrate=False)
    server.submit(S, "r", **request(16, 60))
    server.run_until(S + 100 * MS)
    told = server.describe("arbiter")["idle"]
    causes = sum(cause["unit_seconds"] for cause in told["causes"].values())
    busy = sum(told["busy_unit_seconds"].values())
    assert causes + busy + told["running_now_unit_seconds"] == pytest.approx(told["unit_seconds"])
    assert told["unit_seconds"] == pytest.approx(1.1 * UNITS)
    assert told["running_now_unit_seconds"] > 0
    assert told["causes"]["unexplained"]["unit_seconds"] == 0
