"""Runs of policy tests: the same each time, bounded, and clear about what did not hold."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from muxk.actors.policy_tests import Outcome, run_test, simulate
from muxk.actors.simulation import DeviceSetup, PlannedRequest, Simulation
from muxk.client.test_report import failure_text
from muxk.policies.engine import load_policy
from muxk.policies.policy_test import read_tests
from muxk.policies.policy_test_spec import PolicyTest
from muxk.policies.run_records import End

HEAD = "apiVersion: muxk/v1beta1\nkind: PolicyTest\nmetadata: {name: it}\nspec:\n"
SMALL = "device: {units: 4, layers: 4, kv_tokens: 4k}"


def read(text: str, policy: str = "") -> PolicyTest:
    """A test from the sections of its spec, flush left, and maybe the spec of a policy."""
    head = ""
    if policy:
        sections = "".join(f"  {line}\n" for line in policy.strip("\n").splitlines())
        head = HEAD.replace("PolicyTest", "SchedulingPolicy").replace("it", "mine") + sections + "---\n"
    body = "".join(f"  {line}\n" for line in text.strip("\n").splitlines())
    (test,) = read_tests(f"{head}{HEAD}{body}", "a.test.yaml")
    return test


def run(text: str, policy: str = "") -> Outcome:
    return run_test(read(text, policy))


def reasons(outcome: Outcome) -> list[str]:
    return [failure.reason for failure in outcome.failures]


LOAD = f"""
policy: muxwise
{SMALL}
arrivals:
  - {{name: chat, count: 6, every: 10ms to 50ms, prompt: 20 to 200, output: 5 to 30, prefix: 64 of system}}
  - {{name: long, at: 100ms, prompt: 2k, output: 10, priority: -2, deadline: 5s}}
"""


def test_the_same_test_gives_the_same_run_and_another_seed_another_one() -> None:
    test = read(LOAD + "expect: [finished == 7]")
    first, again = simulate(test), simulate(test)
    assert first == again
    other = simulate(read(LOAD + "seed: 2\nexpect: [finished == 7]"))
    assert [request.arrival_ns for request in other.requests] != [
        request.arrival_ns for request in first.requests
    ]


def test_lengths_and_times_are_within_their_ranges_and_requests_get_what_they_asked_for() -> None:
    record = simulate(read(LOAD + "expect: [finished == 7]"))
    chats = [request for request in record.requests if request.group == "chat"]
    assert [request.name for request in chats] == [f"chat-{number}" for number in range(1, 7)]
    waits = [b.arrival_ns - a.arrival_ns for a, b in pairwise(chats)]
    assert all(10_000_000 <= wait <= 50_000_000 for wait in waits)
    assert len(dict.fromkeys(waits)) > 1
    assert all(84 <= request.prompt_tokens <= 264 and 5 <= request.tokens <= 30 for request in chats)
    assert all(request.end is End.FINISHED for request in record.requests)


def test_requests_that_name_the_same_prefix_share_its_pages() -> None:
    text = f"""
policy: muxwise
{SMALL}
arrivals:
  - {{name: a, prompt: 32, output: 4, prefix: 320 of tools}}
  - {{name: b, at: 2s, prompt: 32, output: 4, prefix: 160 of tools}}
  - {{name: c, at: 4s, prompt: 32, output: 4, prefix: 320 of other}}
expect:
  - {{for: a, that: prompt.cached == 0}}
  - {{for: b, that: prompt.cached == 160 and prompt.tokens == 192}}
  - {{for: c, that: prompt.cached == 0}}
"""
    assert run(text).failures == ()


def test_an_expectation_over_nothing_fails_and_says_so() -> None:
    outcome = run(f"""
policy: muxwise
{SMALL}
arrivals: [{{name: one, prompt: 20, output: 1}}, {{name: big, prompt: 5k, output: 1}}]
expect:
  - {{for: one, that: tbt.max <= 50ms}}
  - {{for: one, that: tbt.late == 0}}
  - {{for: big, that: ttft.max <= 50ms}}
  - {{for: big, that: latency.max <= 50ms}}
  - {{that: fused.steps == 0 and decode.units.max <= 4}}
""")
    assert reasons(outcome) == [
        "there is no gap between two tokens of requests of one",
        "there is no gap between two tokens of requests of one",
        "none of the requests of big got a token",
        "none of the requests of big finished",
        "no decode step ran",
    ]


def test_ends_of_requests_are_told_apart() -> None:
    text = f"""
{SMALL}
arrivals:
  - {{name: ok, prompt: 20, output: 40}}
  - {{name: huge, prompt: 5k, output: 1}}
  - {{name: gone, prompt: 20, output: 100, abort_after: 100ms}}
  - {{name: many, at: 1s, count: 8, prompt: 800, output: 2}}
expect:
  - {{for: ok, that: finished == 1}}
  - {{for: huge, that: refused == 1 and tokens == 0}}
  - {{for: gone, that: aborted == 1 and 0 < tokens < 100}}
  - {{for: many, that: shed > 0 and finished > 0 and shed + finished == requests}}
  - failed == 0
"""
    outcome = run(text, "extends: muxwise\nlimits: {queue: 2}")
    assert outcome.failures == (), "\n".join(map(failure_text, outcome.failures))


def test_a_failure_names_the_worst_request_its_time_and_the_rules_that_fired() -> None:
    outcome = run("""
policy: inflight
arrivals:
  - {name: chat, count: 2, prompt: 50, output: 100}
  - {name: long, at: 300ms, prompt: 8k, output: 2}
expect:
  - {for: chat, that: tbt.max <= 50ms, because: people read along}
""")
    text = failure_text(outcome.failures[0]).splitlines()
    assert text[0] == "a.test.yaml:10:25: expected tbt.max <= 50ms for chat"
    assert text[1].endswith("- {for: chat, that: tbt.max <= 50ms, because: people read along}")
    assert text[3].strip().startswith("tbt.max = 8")
    assert text[4].strip().startswith("longest gap: chat-1 waited 8")
    assert "from 0.3" in text[4]
    assert "prefill of long-1" in text[5]
    assert "8,000 tokens and 32 layers, on 16 units" in text[5]
    assert "decode: 6.1ms in 1 step of up to 2 rows" in text[6]
    assert "split/prefill-first" in text[7]
    assert text[8].strip() == "because: people read along"


def test_a_count_that_is_wrong_names_some_of_what_was_counted() -> None:
    outcome = run(f"""
policy: muxwise
{SMALL}
arrivals: [{{name: huge, count: 5, prompt: 5k, output: 1}}]
expect: [refused == 0]
""")
    (failure,) = outcome.failures
    assert failure.values == (("refused", "5"),)
    assert failure.worst[0].startswith("huge-1 refused at 0.0")
    assert "has 5000 tokens; with one more it exceeds the limit" in failure.worst[0]
    assert failure.worst[-1] == "and 2 more"


def test_a_run_that_does_not_end_is_a_failure_with_who_hangs() -> None:
    outcome = run(f"""
policy: muxwise
{SMALL}
timeout: 500ms
arrivals: [{{name: slow, count: 2, prompt: 100, output: 1000}}, {{name: quick, prompt: 20, output: 2}}]
expect: [finished == 3]
""")
    (failure,) = outcome.failures
    assert failure.reason.startswith(
        "2 of 3 requests did not end within 0.5s: slow-1, slow-2 (queue 0, decode"
    )
    assert "the last decision: split/" in failure.reason
    assert (failure.file, failure.line) == ("a.test.yaml", 3)


def test_events_of_a_run_are_bounded() -> None:
    simulation = Simulation(load_policy("muxwise"), DeviceSetup(4, 4, kv_tokens=4096), events_max=5_000)
    requests = [PlannedRequest("a-1", "a", 0, [97] * 20, 4000)]
    (fault, hanging) = simulation.run(requests).faults
    assert fault == "it still was not over after 5,000 events"
    assert "1 of 1 requests did not end" in hanging


def test_a_swap_takes_effect_in_the_middle_of_a_run_and_both_policies_are_counted() -> None:
    test = read(f"""
policy: static_split
set: {{decode_share: 25%}}
{SMALL}
arrivals: [{{name: chat, count: 2, prompt: 20, output: 200}}]
actions: [{{at: 500ms, swap: static_split, set: {{decode_share: 75%}}}}]
expect:
  - {{at: 400ms, that: split.decode == 1 and split.prefill == 3}}
  - {{at: 600ms, that: split.decode == 3 and split.prefill == 1}}
  - {{at: 600ms, that: decode.batch == 2 and live == 2 and not parked}}
  - finished == 2
""")
    outcome = run_test(test)
    assert outcome.failures == ()
    first, second = test.choice.policy.sha, test.swaps[0].choice.policy.sha
    assert first != second
    assert outcome.hits_of[first]["split/always"] > 0
    assert outcome.hits_of[second]["split/always"] > 0
    assert outcome.hits_of[first]["admit/welcome"] == 2
    assert outcome.hits_of[second]["admit/welcome"] == 0


def test_hits_of_rules_are_those_of_the_run() -> None:
    outcome = run(f"""
policy: muxwise
{SMALL}
arrivals: [{{name: a, count: 3, every: 1s, prompt: 20, output: 4}}]
expect:
  - {{rule: admit/welcome, that: hits == 3}}
  - {{rule: admit/overload, that: hits == 0 and errors == 0}}
  - {{rule: retain/always, that: hits == 4}}
""")
    (failure,) = outcome.failures
    assert failure.values == (("hits", "3"),)
    assert failure.worst == ("answers of retain: retain/always 3 times",)


def test_rules_that_fail_are_warned_of_though_nothing_expects_them() -> None:
    text = f"""
{SMALL}
arrivals: [{{name: a, prompt: 20, output: 4}}]
expect: [finished == 1, errors > 0, {{rule: slice/always, that: errors > 0}}]
"""
    outcome = run(text, 'extends: muxwise\nslice: {layers: "1 / (queue.requests - queue.requests)"}')
    assert outcome.failures == ()
    assert "a rule failed: slice/always: division by zero" in outcome.warnings[0]


def test_a_policy_without_estimates_can_be_tried() -> None:
    text = """
policy: muxwise
device: {units: 4, layers: 4, kv_tokens: 4k, calibrate: false}
arrivals: [{name: a, prompt: 20, output: 20}, {name: b, at: 50ms, prompt: 500, output: 4}]
expect: [{rule: split/cold-start, that: hits > 0}]
"""
    assert run(text).failures == ()
    measured = run(text.replace("false", "true"))
    assert [failure.values for failure in measured.failures] == [(("hits", "0"),)]


def test_a_crash_is_a_failure_of_the_run() -> None:
    class Broken:
        def __init__(self) -> None:
            self._policy = load_policy("muxwise")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._policy, name)

        def form(self, view: Any) -> Any:
            raise LookupError("no form today")

    policy: Any = Broken()
    simulation = Simulation(policy, DeviceSetup(4, 4, kv_tokens=4096))
    record = simulation.run([PlannedRequest("a-1", "a", 0, [97] * 20, 4)])
    assert record.faults[0] == "admission crashed: LookupError: no form today"
    assert record.requests[0].end is End.FAILED


def test_an_slo_that_the_requests_do_not_share_is_no_value() -> None:
    outcome = run(f"""
policy: muxwise
{SMALL}
arrivals: [{{name: a, prompt: 20, output: 4}}, {{name: b, prompt: 40, output: 4}}]
expect: [ttft.max <= slo.ttft, tbt.max <= slo.tbt, ttft.late == 0]
""")
    (reason,) = reasons(outcome)
    assert reason.startswith("the requests have different SLOs, such as a-1 and b-1; ask ttft.late")


@pytest.mark.parametrize(("deadline", "late"), [("10ms", 1), ("10s", 0)])
def test_a_request_is_late_by_the_deadline_it_came_with(deadline: str, late: int) -> None:
    outcome = run(f"""
policy: muxwise
{SMALL}
arrivals: [{{name: a, prompt: 2k, output: 4, deadline: {deadline}}}]
expect: [ttft.late == {late}]
""")
    assert outcome.failures == ()


def test_thousands_of_requests_at_once_are_served_as_from_many_clients() -> None:
    requests = [PlannedRequest(f"a-{i}", "a", 0, [97] * 4, 1) for i in range(2_500)]
    record = Simulation(load_policy("chunked", {"budget": "4k"}), DeviceSetup(4, 2)).run(requests)
    ends = [request.end for request in record.requests]
    assert ends.count(End.FINISHED) >= 1_024
    assert {request.message for request in record.requests if request.end is End.SHED} <= {
        "too many requests wait; retry later"
    }


CLASSES = """
extends: muxwise
classes:
  - {name: interactive, when: request.class == 'interactive', slo: {tbt: 30ms, ttft: 300ms}}
  - {name: batch}
"""


def test_expectations_of_a_class_are_about_the_requests_that_the_policy_put_there() -> None:
    outcome = run(
        f"""
{SMALL}
arrivals:
  - {{name: chat, count: 3, prompt: 20, output: 4, class: interactive}}
  - {{name: other, count: 2, prompt: 30, output: 4, class: batch}}
  - {{name: typo, prompt: 40, output: 4, class: interactve}}
expect:
  - {{class: interactive, that: requests == 3 and slo.tbt == 30ms and slo.ttft == 300ms}}
  - {{class: batch, that: requests == 3 and slo.tbt == 100ms}}
  - {{class: batch, for: other, that: requests == 2}}
  - {{class: interactive, for: other, that: requests == 0}}
  - {{rule: classes/interactive, that: hits == 3}}
""",
        CLASSES,
    )
    assert reasons(outcome) == ["there are no requests of other of class interactive"]
    (warning,) = outcome.warnings
    assert warning.startswith("class 'interactve' has no effect")


def test_requests_that_lose_their_pages_are_counted() -> None:
    outcome = run("""
policy: muxwise
device: {units: 4, layers: 4, kv_tokens: 1k}
arrivals: [{name: chat, count: 6, every: 10ms, prompt: 100, output: 200}]
expect:
  - finished == 6
  - {at: 600ms, that: kv.free < 10 and kv.total >= 62}
  - {for: chat-1, that: recomputes == 0, because: who came last is the victim}
  - recomputes == 0
""")
    (failure,) = outcome.failures
    assert failure.text == "recomputes == 0"
    assert failure.worst[0].startswith("chat-")
    assert "lost its pages" in failure.worst[0]


def test_a_parked_prompt_is_seen_at_its_moment() -> None:
    outcome = run("""
policy: muxwise
arrivals: [{name: long, prompt: 16k, output: 2}, {name: short, at: 300ms, prompt: 4k, output: 2}]
expect:
  - {at: 200ms, that: not parked and prefill.batches == 1}
  - {at: 500ms, that: parked and prefill.batches == 2}
  - preemptions == 1
""")
    assert outcome.failures == (), "\n".join(map(failure_text, outcome.failures))
