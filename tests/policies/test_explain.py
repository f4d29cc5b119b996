"""Explanations: which rules were looked at, what they saw, and the answer in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muxk.kernel.decider import Decider
from muxk.kernel.policy import PolicyBook
from muxk.kernel.view import (
    AdmitView,
    DecodeView,
    FormView,
    KvView,
    QueueView,
    RequestView,
)
from muxk.policies.engine import CompiledPolicy, compile_policy
from muxk.policies.explain import Known, explain
from muxk.policies.explanation import Explanation, TriedRule
from muxk.policies.shown import duration, show

MS = 1_000_000
S = 1000 * MS
Text = Callable[[str], str]
Make = Callable[..., Any]

SPLIT = """
extends: muxwise
params:
  share: {type: percent, default: 50%}
split:
  - {name: idle, when: decode.batch == 0 and queue.tokens < 4k, then: {prefill: all}}
  - name: fit
    when: decode.batch * params.share > 1
    then: {decode: fit, prefill: rest, otherwise: {decode: most, prefill: rest}}
  - {name: other, then: {decode: all, prefill: all}}
"""
FAILING = """split:
  - {name: bad, when: 10 / queue.requests > 1, then: {decode: all}}
  - {name: rest, then: {decode: all, prefill: all}}"""
TWO_CLASSES = """
classes:
  - {name: chat, when: request.class == 'chat', slo: {ttft: 200ms}, share: 3}
  - {name: batch, share: 1, max_wait: 60s}
order: {by: [-request.prompt_tokens, request.arrival]}
"""


def extending(name: str) -> str:
    head = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: a}\n"
    return f"{head}spec: {{extends: {name}}}\n"


def asked(policy: CompiledPolicy, ask: Callable[[Decider], Any]) -> tuple[Explanation, Known, PolicyBook]:
    """The explanation of one question."""
    book = PolicyBook()
    sha = book.add(policy)
    ask(Decider(book, sha, "somebody", lambda: 5 * S))
    known = Known(book.find, {1: "first", 2: "second"}, zero_ns=1 * S)
    return explain(book.journal.snapshot()[-1], known), known, book


def values(rule: TriedRule) -> dict[str, str]:
    return {value.name: value.value for value in rule.values}


def test_every_rule_up_to_the_one_that_answers_is_told_with_place_condition_and_values(
    policy_text: Text, make_view: Make
) -> None:
    policy = compile_policy(policy_text(SPLIT.strip()), "mine.yaml")
    told, _, _ = asked(policy, lambda decider: decider.decide(make_view()))
    (split,) = told.points
    idle, fit = split.rules
    assert (idle.rule, idle.outcome, idle.place) == ("split/idle", "not matched", "mine.yaml:9")
    assert idle.when == "decode.batch == 0 and queue.tokens < 4k"
    assert values(idle) == {"decode.batch": "8", "queue.tokens": "0"}
    assert (fit.rule, fit.outcome, fit.place) == ("split/fit", "matched", "mine.yaml:10")
    assert values(fit)["params.share"] == "50%"
    assert (told.at_ns, told.actor, told.policy) == (0, "somebody", "test")


def test_fewest_tells_what_it_saw_of_each_split_up_to_the_one_it_took(
    policy_text: Text, make_view: Make
) -> None:
    policy = compile_policy(policy_text(SPLIT.strip()))
    told, _, book = asked(policy, lambda decider: decider.decide(make_view()))
    seen = values(told.points[0].rules[-1])
    # A step takes 800 ms / units, and the SLO is 100 ms: 8 units are the fewest.
    assert [name for name in seen if name.startswith("estimate")] == [
        f"estimate.decode({units})" for units in range(1, 9)
    ]
    assert (seen["estimate.decode(7)"], seen["estimate.decode(8)"]) == ("114ms", "100ms")
    assert book.journal.snapshot()[0].answer.split.decode_units == 8
    assert told.points[0].answer == "of 16 units decode gets 8 and prefill 8"


def test_preemption_and_slice_are_told_as_they_were_asked_after_the_split(
    make_view: Make, make_batch: Make
) -> None:
    policy = compile_policy(extending("muxwise"))
    running = make_batch(layers_left=32, new_tokens=4000)
    candidate = make_batch(batch_id=0, new_tokens=10, arrival_ns=900 * MS)
    view = make_view(running=running, candidate=candidate)
    told, _, _ = asked(policy, lambda decider: decider.decide(view))
    assert [point.point for point in told.points] == ["split", "preempt", "slice"]
    preempt = told.points[1].rules[0]
    assert preempt.outcome == "matched"
    assert values(preempt)["running.time_left"] == "1.28s"
    assert told.points[1].answer == "the running batch is parked for the one that waits"
    # The slice is of the batch that goes on, which is the candidate now.
    seen = values(told.points[2].rules[-1])
    assert seen["prefill.units"] == "8"
    assert seen["estimate.prefill_layer(prefill.units)"] == "100us"
    assert told.points[2].answer.startswith("the next item runs")


def test_a_rule_that_fails_says_why_and_who_answered_instead(policy_text: Text, make_view: Make) -> None:
    policy = compile_policy(policy_text(FAILING))
    told, _, _ = asked(policy, lambda decider: decider.decide(make_view()))
    bad, default = told.points[0].rules
    assert (bad.outcome, bad.why) == ("failed", "division by zero")
    assert (default.rule, default.outcome) == ("split/default", "matched")
    assert told.errors == ("split/bad: division by zero",)


def test_with_on_error_next_and_base_the_rules_that_answer_instead_are_told(
    policy_text: Text, make_view: Make
) -> None:
    policy = compile_policy(policy_text(f"on_error: next\n{FAILING}"))
    told, _, _ = asked(policy, lambda decider: decider.decide(make_view()))
    assert [(rule.rule, rule.outcome) for rule in told.points[0].rules] == [
        ("split/bad", "failed"),
        ("split/rest", "matched"),
    ]
    policy = compile_policy(policy_text(f"extends: muxwise\non_error: base\n{FAILING}"))
    told, _, book = asked(policy, lambda decider: decider.decide(make_view()))
    last = told.points[0].rules[-1]
    assert last.outcome == "matched"
    assert last.rule == book.journal.snapshot()[0].answer.rules[0]
    assert last.place.startswith("muxwise.yaml:")


def test_an_order_tells_keys_class_service_and_who_waited_too_long(
    policy_text: Text, make_request: Make
) -> None:
    policy = compile_policy(policy_text(TWO_CLASSES.strip()))
    requests = [
        make_request(request_id=1, prompt_tokens=50, class_name="chat", arrival_ns=69 * S),
        make_request(request_id=2, prompt_tokens=100, class_name="batch", arrival_ns=1 * S),
        make_request(request_id=3, prompt_tokens=900, class_name="chat", arrival_ns=69 * S),
    ]
    service = {"chat": 120.0, "batch": 500.0}
    told, _, _ = asked(policy, lambda decider: decider.order(requests, 70 * S, service))
    assert [one.request for one in told.sorted] == ["second", "#3", "first"]
    late, long, _ = told.sorted
    assert (late.overdue, long.overdue) == (True, False)
    assert (late.class_name, late.service) == ("batch", "500 tokens")
    assert {key.name: key.value for key in long.keys} == {
        "request.prompt_tokens": "900",
        "request.arrival": "now - 1s",
    }
    assert told.answer == "first second, #3, first"


def test_a_request_that_was_asked_about_is_told_with_its_place_however_far_behind(
    policy_text: Text, make_request: Make
) -> None:
    policy = compile_policy(policy_text("order: {by: request.arrival}"))
    requests = [make_request(request_id=number, arrival_ns=number) for number in range(500)]
    _, _, book = asked(policy, lambda decider: decider.order(requests, 70 * S))
    told = explain(book.journal.snapshot()[0], Known(book.find, asked_about=frozenset({432})))
    assert [one.place for one in told.sorted] == [*range(1, 17), 433]
    assert told.sorted[-1].request == "#432"


def test_admission_class_form_victim_and_retention_are_told_in_words(
    policy_text: Text, make_request: Make
) -> None:
    policy = compile_policy(policy_text(TWO_CLASSES.strip()))
    chat: RequestView = make_request(request_class="chat")
    told, _, _ = asked(policy, lambda decider: decider.classify(chat))
    assert told.answer == "class chat: TBT 100ms, TTFT 200ms, share 3"
    assert values(told.points[0].rules[0]) == {"request.class": "'chat'"}

    kv, queue = KvView(4, 4), QueueView(0, 0)
    admit = AdmitView(5 * S, make_request(pages=7), queue, 10, kv, None, queue)  # type: ignore[arg-type]
    told, _, _ = asked(policy, lambda decider: decider.admit(admit))
    assert told.answer == "refuse: the request can never fit into the KV pool"
    assert values(told.points[0].rules[0]) == {"request.pages": "7", "kv.total": "4"}

    form = FormView(5 * S, chat, queue, DecodeView(0, 0, False, False, 0), kv, None)  # type: ignore[arg-type]
    told, _, _ = asked(policy, lambda decider: decider.form(form))
    assert told.answer == "at most 8 requests and 2048 tokens"

    several = [make_request(request_id=1, arrival_ns=0), make_request(request_id=2, arrival_ns=9)]
    told, _, _ = asked(policy, lambda decider: decider.victim(several, 5 * S))
    assert told.answer == "request second is computed again later"
    assert told.sorted[0].request == "second"

    told, _, _ = asked(policy, lambda decider: decider.retain(chat))
    assert told.answer == "its pages are kept for reuse"


def test_the_rule_that_matches_in_an_explanation_is_the_one_that_answered(
    make_view: Make, make_batch: Make
) -> None:
    for name in ("muxwise", "temporal", "chunked", "inflight", "static_split"):
        policy = compile_policy(extending(name))
        for running in (None, make_batch(), make_batch(layers_left=3)):
            for candidate in (None, make_batch(batch_id=0, new_tokens=5)):
                view = make_view(running=running, candidate=candidate)
                told, _, book = asked(policy, lambda decider, view=view: decider.decide(view))
                matched = [point.rules[-1].rule for point in told.points]
                assert tuple(matched) == book.journal.snapshot()[0].answer.rules


def test_of_a_policy_that_is_gone_or_not_in_the_language_the_answer_is_told(make_view: Make) -> None:
    policy = compile_policy(extending("muxwise"))
    _, _, book = asked(policy, lambda decider: decider.decide(make_view()))
    told = explain(book.journal.snapshot()[0], Known(lambda sha: None))
    assert told.answer == "decode gets 16 of 16 units, prefill none"
    assert told.note == "its policy is not kept any more"

    class Other:
        name = "python"

    told = explain(book.journal.snapshot()[0], Known(lambda sha: Other()))  # type: ignore[arg-type,return-value]
    assert "not written in the language" in told.note
    assert told.points == ()


def test_values_are_shown_as_policies_write_them() -> None:
    assert show(12.3e6, "duration", 0) == "12.3ms"
    assert show(4 << 30, "size", 0) == "4GiB"
    assert show(0.905, "percent", 0) == "90.5%"
    assert show(5 * S, "moment", 7 * S) == "now - 2s"
    assert show(9 * S, "moment", 7 * S) == "now + 2s"
    assert show(True, "bool", 0) == "true"
    assert show("chat", "name", 0) == "'chat'"
    assert show(2048, "number", 0) == "2048"
    assert show(0.33333, "number", 0) == "0.3333"
    assert (duration(0), duration(-5e6), duration(90e9), duration(999)) == ("0ms", "-5ms", "1.5min", "999ns")
