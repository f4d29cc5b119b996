"""The plan `loongserve`: its dynamic programme against enumeration, and its decisions on views by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from muxk.kernel.estimates import Estimates
from muxk.kernel.placing import Assign, GroupView, Grow, Move, PlaceAnswer, PlaceView, Shrink
from muxk.policies.engine import compile_policy, load_policy
from muxk.policies.loongserve_batching import Batch, PrefillTimes, Prompt, batches
from muxk.policies.problems import PolicyError
from place_views import MS, NOW_NS, PAGES, STEP_NS, decoding, group, request, view

LOONGSERVE = load_policy("loongserve")


def idle(count: int) -> list[GroupView]:
    return [group(number) for number in range(count)]


def asleep(number: int) -> GroupView:
    return group(number, ())


def place(groups: Sequence[GroupView], *prompts: int, **changes: Any) -> PlaceAnswer:
    queue = [request(number, prompt) for number, prompt in enumerate(prompts)]
    answer = LOONGSERVE.place(view(groups, queue, **changes))
    assert answer.errors == ()
    return answer


# --- batching ---


def cost(found: Sequence[Batch], times: PrefillTimes) -> float:
    return sum(
        times.of(one.width, one.prompts) * sum(1 / prompt.tokens for prompt in one.prompts) for one in found
    )


def every_way(prompts: Sequence[Prompt], devices: int, width: int) -> Iterator[list[Batch]]:
    """All cuts of a row of prompts into batches, with all widths."""
    if not prompts:
        yield []
    for count in range(1, len(prompts) + 1):
        for own in range(1, min(width, devices) + 1):
            for rest in every_way(prompts[count:], devices - own, width):
                yield [Batch(tuple(prompts[:count]), own), *rest]


@pytest.mark.parametrize("seed", range(60))
def test_the_programme_finds_the_cheapest_of_all_ways_to_cut(seed: int) -> None:
    draw = Random(seed)
    devices, width, pages = draw.randint(1, 4), draw.randint(1, 4), draw.choice([40, 100, 1000])
    factors = tuple(draw.uniform(0.9, 1.8) for _ in range(4))
    times = PrefillTimes(view(idle(devices), width_factors=factors))
    prompts = [
        Prompt(number, tokens, tokens // 16 + 1)
        for number, tokens in enumerate(draw.choices((10, 100, 400, 2000), k=draw.randint(1, 5)))
    ]
    ordered = sorted(prompts, key=lambda one: (-one.tokens, one.request_id))
    fitting = [
        way
        for way in every_way(ordered, devices, width)
        if all(sum(prompt.pages for prompt in one.prompts) <= pages * one.width for one in way)
    ]
    found = batches(prompts, devices, width, pages, times)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert [prompt for one in found for prompt in one.prompts] == ordered
    assert sum(one.width for one in found) <= devices
    assert max(one.width for one in found) <= width
    assert cost(found, times) == pytest.approx(min(cost(way, times) for way in fitting))


def test_a_short_prompt_does_not_share_the_time_of_a_long_one() -> None:
    times = PrefillTimes(view(idle(4)))
    found = batches([Prompt(0, 8000, 10), Prompt(1, 50, 10)], 4, 4, PAGES, times)
    assert found is not None
    assert [(len(one.prompts), one.width) for one in found] == [(1, 2), (1, 2)]
    assert len(place(idle(2), 4000, 50).actions) == 2


# --- dispatch ---


def test_a_prompt_on_an_idle_server_gets_all_devices_and_keeps_what_decode_needs() -> None:
    assert place(idle(4), 4000).actions == (Assign((0,), 0, (1, 2, 3), keep=1),)


def test_it_keeps_the_devices_that_hold_its_pages() -> None:
    prompt = 16 * (2 * PAGES - 10)
    assert place(idle(4), prompt).actions == (Assign((0,), 0, (1, 2, 3), keep=2),)


def test_it_keeps_the_devices_that_its_rows_need_to_stay_bound_by_memory() -> None:
    policy = load_policy("loongserve", {"decode_batch": "2", "max_prefill": "60s"})
    answer = policy.place(view(idle(4), [request(number, 500) for number in range(5)]))
    kept = [action.keep or len(action.devices) for action in answer.actions if isinstance(action, Assign)]
    assert sum(kept) >= 3


def test_a_batch_is_bounded_in_time_and_a_single_request_is_not() -> None:
    [first] = place(idle(2), 30_000 // 2, 10_000).actions
    assert isinstance(first, Assign)
    assert first.requests == (0,)


def test_a_request_that_is_too_long_is_passed_over_unless_order_is_strict() -> None:
    groups = [decoding(0, 5), group(1)]
    long, short = 16 * PAGES + 1, 60
    [answer] = place(groups, long, *[short] * 3).actions
    assert isinstance(answer, Assign)
    assert answer.requests == (1, 2, 3)
    strict = load_policy("loongserve", {"max_out_of_order": "0"})
    queue = [request(0, long), request(1, short)]
    assert strict.place(view(groups, queue)).actions == ()


def test_idle_devices_are_refused_where_waiting_for_all_of_them_is_faster() -> None:
    soon = decoding(0, 1, (0, 1, 2))
    groups = [soon, asleep(1), asleep(2), group(3)]
    short, long = place(groups, 200, answer_tokens=100.0), place(groups, 90_000 // 8, answer_tokens=2.0)
    assert short.actions == (Assign((0,), 3, decode=0),)
    assert not any(isinstance(action, Assign) for action in long.actions)


def test_before_anything_was_measured_the_first_of_the_queue_gets_what_is_idle() -> None:
    answer = place(idle(2), 100, 100, estimates=Estimates())
    assert answer.actions == (Assign((0,), 0, (1,), keep=1),)


def test_devices_that_can_not_form_groups_are_used_one_by_one() -> None:
    answer = place(idle(3), 100, 400, elastic=False)
    assert answer.actions == (Assign((1,), 0), Assign((0,), 1))


def test_a_group_that_is_done_gives_its_devices_back_and_asks_once() -> None:
    groups = [group(0, (0, 1)), asleep(1)]
    assert place(groups, 4000, 50).actions == (Shrink(0, (1,)),)
    assert place([group(0, (0, 1), leaving=(1,)), asleep(1), decoding(2, 1)], 4000).actions == ()


def test_a_group_with_pages_on_their_way_out_is_not_idle_and_worth_waiting_for() -> None:
    assert place([group(0, promised_pages=3), group(1)], 100).actions == ()


def test_devices_on_their_way_between_groups_are_waited_for() -> None:
    assert place([decoding(0, 1), group(1), asleep(2), asleep(3)], 4000).actions == ()
    assert place([decoding(0, 1), group(1), group(2), group(3)], 4000).actions == (
        Assign((0,), 1, (2, 3), keep=1, decode=0),
    )


# --- pausing ---


def test_a_group_pauses_for_a_short_prompt_and_not_for_a_long_one() -> None:
    groups = [decoding(0, 5), decoding(1, 4)]
    assert place(groups, 50, link_bytes_per_ns=0.0).actions == (Assign((0,), 1),)
    assert place(groups, 16_000, link_bytes_per_ns=0.0).actions == ()


def test_a_group_that_changed_just_now_is_left_alone_for_some_steps() -> None:
    other = decoding(1, 4, since_ns=NOW_NS)
    groups = [decoding(0, 5, since_ns=NOW_NS - 199 * MS), other]
    assert place(groups, 50, link_bytes_per_ns=0.0).actions == ()
    groups = [decoding(0, 5, since_ns=NOW_NS - 201 * MS), other]
    assert place(groups, 50, link_bytes_per_ns=0.0).actions == (Assign((0,), 0),)


def test_several_groups_pause_at_once_each_for_prompts_of_its_own() -> None:
    groups = [decoding(0, 5, promised_pages=PAGES - 10), decoding(1, 4, promised_pages=PAGES - 10)]
    assert place(groups, 50, 60, link_bytes_per_ns=0.0).actions == (Assign((0,), 1), Assign((1,), 0))


def test_to_pause_costs_more_the_less_the_rows_have_said() -> None:
    young = {"answers_since_ns": NOW_NS - 2 * STEP_NS, "newest_since_ns": NOW_NS - 2 * STEP_NS}
    assert place([decoding(0, 5), decoding(1, 4)], 300, link_bytes_per_ns=0.0).actions == (Assign((0,), 1),)
    groups = [decoding(0, 5, **young), decoding(1, 4, **young)]
    assert place(groups, 300, link_bytes_per_ns=0.0).actions == ()


def test_the_devices_of_a_group_join_where_that_saves_more_than_its_pause_costs() -> None:
    old = decoding(0, 1, answers_since_ns=NOW_NS - 500 * STEP_NS)
    assert place([old, group(1)], 300).actions == (Assign((0,), 0, (1,), keep=1),)
    assert place([decoding(0, 5), group(1)], 500).actions == (Assign((0,), 1, decode=0),)


# --- macro-iterations ---


def computing(left: int) -> GroupView:
    """A group that has been computing a prompt of 501 ms for all but so many ms."""
    return group(0, waiting=1, pending_tokens=5000, prefill_since_ns=NOW_NS - (501 - left) * MS)


def test_while_a_prompt_is_computed_only_what_ends_before_it_is_begun() -> None:
    assert place([computing(60), group(1)], 500, 100).actions == (Assign((0,), 1),)
    assert place([computing(40), group(1)], 500, 100).actions == (Assign((1,), 1),)
    assert place([computing(5), group(1)], 500, 100).actions == ()


def test_nobody_pauses_or_moves_while_a_prompt_is_computed() -> None:
    assert place([computing(5), decoding(1, 5), decoding(2, 4)], 50).actions == ()


def test_after_so_many_dispatches_that_overtook_somebody_requests_go_in_order() -> None:
    groups, long = [decoding(0, 5), group(1)], 16 * PAGES + 1
    assert place(groups, long, 60, overtaken=9).actions != ()
    assert not any(isinstance(one, Assign) for one in place(groups, long, 60, overtaken=10).actions)


def test_nobody_pauses_before_an_answer_has_ended() -> None:
    assert place([decoding(0, 5), decoding(1, 4)], 50, answer_tokens=0.0, link_bytes_per_ns=0.0).actions == ()


def test_a_prompt_waits_for_a_device_that_is_between_two_groups() -> None:
    assert place([group(0), asleep(1)], 4000).actions == ()
    assert place(idle(2), 4000).actions == (Assign((0,), 0, (1,), keep=1),)


# --- allocation and scaling ---


def test_groups_that_decode_move_together_where_that_takes_less_than_it_saves() -> None:
    groups = [decoding(0, 5), decoding(1, 4), group(2), group(3)]
    assert place(groups, 9000).actions == (Move(1, 0),)
    [slow] = place(groups, 9000, link_bytes_per_ns=1e-3).actions
    assert isinstance(slow, Assign)


def test_while_they_move_nothing_else_is_begun() -> None:
    moving = group(1, promised_pages=40, pages_free=PAGES - 40)
    assert place([decoding(0, 5, incoming=4), moving, group(2)], 9000).actions == ()


def test_what_is_computed_beside_a_group_that_decodes_joins_it_where_there_is_room() -> None:
    assert place([decoding(0, 5), group(1)], 500).actions == (Assign((0,), 1, decode=0),)
    full = decoding(0, 5, promised_pages=PAGES - 20)
    assert place([full, group(1)], 500).actions == (Assign((0,), 1),)
    crowded = decoding(0, 60, incoming=40)
    assert place([crowded, group(1)], 500).actions == (Assign((0,), 1),)


def test_a_group_with_no_page_for_its_next_steps_gets_a_device_or_moves() -> None:
    short = decoding(0, 90, pages_free=20, promised_pages=980)
    assert place([short, group(1)]).actions == (Grow(0, (1,)),)
    groups = [decoding(0, 20, pages_free=10, promised_pages=300), decoding(1, 5)]
    groups[0] = decoding(0, 20, pages_free=10, pages_total=300, promised_pages=300)
    assert place(groups).actions == (Move(0, 1),)


def test_a_group_with_more_rows_than_decode_takes_for_the_same_time_gets_what_is_left() -> None:
    roomy = decoding(0, 99, promised_pages=900, pages_free=500)
    assert place([roomy, group(1)]).actions == ()
    crowded = decoding(0, 101, promised_pages=900, pages_free=500)
    assert place([crowded, group(1)]).actions == (Grow(0, (1,)),)


def test_a_group_gives_up_what_it_does_not_need_while_somebody_waits() -> None:
    wide = decoding(0, 2, (0, 1, 2), since_ns=10**10)
    groups = [wide, asleep(1), asleep(2)]
    assert place(groups, 9000).actions == (Shrink(0, (1, 2)),)
    assert place(groups).actions == ()


# --- the policy ---


def test_it_keeps_no_prefixes_and_needs_two_devices() -> None:
    assert LOONGSERVE.devices_min == 2
    assert not LOONGSERVE.retain(request(1)).keep
    assert not LOONGSERVE.fetches_prefix


def test_params_of_the_policy_reach_the_plan() -> None:
    wide = load_policy("loongserve", {"decode_width": "2"})
    assert wide.place(view(idle(4), [request(0, 4000)])).actions == (Assign((0,), 0, (1, 2, 3), keep=2),)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{plan: loongserv}", "did you mean 'loongserve'"),
        ("{plan: loongserve, with: {max_prefil: 2s}}", "did you mean 'max_prefill'"),
        ("{plan: loongserve, with: {max_prefill: 2}}", "needs a unit"),
        ("{plan: loongserve, with: {max_width: 9}}", "a whole number from 1 to 8"),
        ("{plan: loongserve, with: {max_width: 1.5}}", "a whole number from 1 to 8"),
        ("{plan: loongserve, with: {max_width: queue.requests}}", "not known in"),
        ("{plan: loongserve, both: [{name: a}]}", "do not go together"),
        ("{with: {max_width: 2}, both: [{name: a}]}", "'with' needs 'plan'"),
        ("{plan: []}", "must be a word"),
    ],
)
def test_mistakes_of_a_plan_are_told_with_a_remedy(place: str, message: str) -> None:
    text = (
        f"apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {{name: p}}\nspec:\n  place: {place}\n"
    )
    with pytest.raises(PolicyError) as raised:
        compile_policy(text, "p.yaml")
    assert message in str(raised.value)
    assert all(problem.line == 5 for problem in raised.value.problems)


def test_times_scale_with_the_width_and_its_measured_factor() -> None:
    seen: PlaceView = view(idle(2), width_factors=(1.0, 1.25))
    times = PrefillTimes(seen)
    assert times.time_ns(2, 1000, 0) == pytest.approx(times.time_ns(1, 1000, 0) / 2 * 1.25)
    assert times.time_ns(3, 1000, 0) == pytest.approx(times.time_ns(1, 1000, 0) / 3 * 1.25)
    assert math.isinf(times.time_ns(0, 1000, 0))
