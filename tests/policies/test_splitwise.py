"""splitwise.yaml: where requests go on devices with a given load."""

from __future__ import annotations

from typing import Any

import pytest
from muxk.kernel.journal import Record
from muxk.kernel.placing import Assign, PlaceAnswer, PlaceView
from muxk.policies.engine import CompiledPolicy, load_policy
from muxk.policies.explain import Known, explain
from place_views import PAGES, decoding, group, request, view

SPLITWISE = load_policy("splitwise")
STATIC = load_policy("splitwise", {"borrow": "false"})
BUSY = {"waiting": 2, "pending_tokens": 8000}


def pairs(answer: PlaceAnswer) -> list[tuple[int, int]]:
    """Where each request is computed and where it decodes."""
    assert answer.errors == ()
    assigned = [action for action in answer.actions if isinstance(action, Assign)]
    assert len(assigned) == len(answer.actions)
    return [(one.group, one.group if one.decode is None else one.decode) for one in assigned]


def rules(answer: PlaceAnswer) -> list[str]:
    return [rule.removeprefix("place/") for rule in answer.rules]


def four(**loads: dict[str, Any]) -> list[Any]:
    """Four devices, two of each pool, with loads by name: d0 to d3."""
    return [group(number, **loads.get(f"d{number}", {})) for number in range(4)]


def test_prompts_go_to_the_least_pending_device_of_one_pool_and_answers_to_the_emptiest_of_the_other() -> (
    None
):
    loads = four(d0={"waiting": 1, "pending_tokens": 500}, d2={"promised_pages": 10})
    answer = SPLITWISE.place(view(loads, [request(1)]))
    assert pairs(answer) == [(1, 3)]
    assert rules(answer) == ["least-pending", "least-memory"]


def test_requests_of_one_answer_are_spread_as_if_each_saw_the_one_before() -> None:
    answer = SPLITWISE.place(view(four(), [request(number) for number in range(4)]))
    assert pairs(answer) == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_a_long_prompt_goes_to_an_empty_queue_whatever_its_length() -> None:
    assert pairs(SPLITWISE.place(view(four(d0=BUSY), [request(1, 9000)]))) == [(1, 2)]


def test_over_the_bound_of_waiting_tokens_a_mixed_device_is_used_before_another_one_is_borrowed() -> None:
    mixed = {"waiting": 1, "pending_tokens": 100, "promised_pages": 50}
    answer = SPLITWISE.place(view(four(d0=BUSY, d1=BUSY, d3=mixed), [request(1, 300)]))
    assert pairs(answer) == [(3, 2)]
    assert rules(answer) == ["on-a-mixed-one", "least-memory"]


def test_without_a_mixed_device_the_least_loaded_of_the_decode_pool_is_borrowed_and_mixed_for_the_next() -> (
    None
):
    queue = [request(1, 300), request(2, 300)]
    answer = SPLITWISE.place(view(four(d0=BUSY, d1=BUSY, d2={"promised_pages": 5}), queue))
    assert pairs(answer) == [(3, 3), (3, 2)]
    assert rules(answer) == ["borrow-from-decode", "least-memory", "on-a-mixed-one", "least-memory"]


def test_a_borrowed_device_is_back_in_its_pool_when_the_foreign_work_is_done() -> None:
    prefilling, done = decoding(3, 2, waiting=1, pending_tokens=10), decoding(3, 2)
    crowded = decoding(2, 60)
    assert pairs(SPLITWISE.place(view([group(0), group(1), crowded, prefilling], [request(1)]))) == [(0, 2)]
    assert pairs(SPLITWISE.place(view([group(0), group(1), crowded, done], [request(1)]))) == [(0, 3)]


def test_answers_that_would_overflow_the_decode_pool_go_to_the_other_one() -> None:
    full = {"decoding": 9, "promised_pages": PAGES - 5}
    answer = SPLITWISE.place(view(four(d2=full, d3=full), [request(1)]))
    assert pairs(answer) == [(0, 0)]
    assert rules(answer) == ["least-pending", "borrow-from-prefill"]


def test_when_no_device_has_room_the_least_loaded_one_does_both() -> None:
    full = {"decoding": 9, "promised_pages": PAGES - 5}
    loads = four(d0={**full, "waiting": 1, "pending_tokens": 9}, d1=full, d2=full, d3=full)
    answer = SPLITWISE.place(view(loads, [request(1)]))
    assert pairs(answer) == [(1, 1)]
    assert rules(answer) == ["least-loaded"]


@pytest.mark.parametrize("load", [{}, BUSY, {"waiting": 90, "pending_tokens": 10**6}])
def test_static_disaggregation_never_borrows(load: dict[str, Any]) -> None:
    full = {"decoding": 9, "promised_pages": PAGES}
    answer = STATIC.place(view(four(d0=load, d1=load, d2=full, d3=full), [request(1, 5000)]))
    assert pairs(answer) == [(0, 2)]


@pytest.mark.parametrize(("share", "expected"), [("1%", (0, 1)), ("50%", (0, 2)), ("99%", (0, 3))])
def test_the_share_of_prefill_leaves_each_pool_one_device_at_least(
    share: str, expected: tuple[int, int]
) -> None:
    policy = load_policy("splitwise", {"prefill_share": share})
    assert pairs(policy.place(view(four(), [request(1)]))) == [expected]


def test_it_needs_two_devices_and_fetches_prefixes_from_where_a_request_decodes() -> None:
    assert (SPLITWISE.places, SPLITWISE.devices_min, SPLITWISE.fetches_prefix) == (True, 2, True)
    muxwise = load_policy("muxwise")
    assert (muxwise.places, muxwise.devices_min, muxwise.fetches_prefix) == (False, 1, False)


def told(policy: CompiledPolicy, seen: PlaceView) -> list[tuple[str, list[tuple[str, str]]]]:
    answer = policy.place(seen)
    record = Record(seen.now_ns, "placement", "place", policy.sha, seen, answer, seen.now_ns, seen)
    known = Known(lambda sha: policy, {1: "chat-1"})
    explanation = explain(record, known)
    assert explanation.note == ""
    return [
        (point.answer, [(rule.rule, rule.outcome) for rule in point.rules]) for point in explanation.points
    ]


def test_explain_tells_which_rules_placed_a_request_and_what_they_saw() -> None:
    seen = view(four(d0=BUSY, d1=BUSY), [request(1, 300)])
    [(answer, tried)] = told(SPLITWISE, seen)
    assert answer == "request chat-1 goes to device 2"
    assert tried == [
        ("place/least-pending", "not matched"),
        ("place/on-a-mixed-one", "not matched"),
        ("place/borrow-from-decode", "matched"),
        ("place/least-memory", "matched"),
    ]
    record = Record(0, "placement", "place", "", seen, SPLITWISE.place(seen), 0, seen)
    rule = explain(record, Known(lambda sha: SPLITWISE)).points[0].rules[0]
    values = [(value.name, value.value) for value in rule.values]
    assert ("device 0: pending_tokens", "8000") in values
    assert ("request.prompt_tokens", "300") in values
