"""What policies answer: splits that the device offers, sort orders, fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from muxk.kernel.estimates import Estimates
from muxk.kernel.policy import Policy
from muxk.kernel.view import (
    AdmitView,
    DecodeView,
    FormView,
    KvView,
    PrefillView,
    QueueView,
    RequestView,
    View,
)
from muxk.kernel.work import Split
from muxk.policies.engine import CompiledPolicy, compile_policy, load_policy

MakeView = Callable[..., View]
MakeBatch = Callable[..., PrefillView]
MakeRequest = Callable[..., RequestView]
Text = Callable[[str], str]
MS = 1_000_000


def test_a_compiled_policy_is_what_the_kernel_asks_for(make_request: MakeRequest) -> None:
    policy: Policy = load_policy("muxwise")
    assert policy.name == "muxwise"
    assert policy.tbt_slo_ns == 100 * MS
    assert policy.classify(make_request(prompt_tokens=200)).chosen.ttft_slo_ns == 2000 * MS


CONDITION = "estimate.decode(units) <= 120ms"
FEWEST = f"{{decode: fewest where {CONDITION}, prefill: rest, otherwise: {{decode: most, prefill: rest}}}}"


@pytest.mark.parametrize(
    ("answer", "split"),
    [
        ("{decode: all}", (16, 0)),
        ("{prefill: all}", (0, 16)),
        ("{decode: all, prefill: all}", (16, 16)),
        ("{decode: all, prefill: rest}", (16, 0)),
        ("{decode: rest, prefill: all}", (0, 16)),
        ("{decode: most, prefill: rest}", (15, 1)),
        ("{decode: rest, prefill: most}", (1, 15)),
        ("{decode: 5, prefill: rest}", (5, 11)),
        ("{decode: rest, prefill: 5}", (11, 5)),
        ("{decode: units.total / 3, prefill: rest}", (6, 10)),
        ("{decode: 5, prefill: 11}", (5, 11)),
        ("{decode: 0, prefill: 3}", (0, 3)),
        ("{decode: 7, prefill: none}", (7, 0)),
        ("{decode: 99, prefill: rest}", (16, 0)),
        ("{decode: -3 + 1, prefill: rest}", (0, 16)),
        ("{decode: fastest}", (16, 0)),
        ("{decode: fastest, prefill: rest}", (15, 1)),
        (FEWEST, (7, 9)),
        (FEWEST.replace("120ms", "1ms"), (15, 1)),
        ("{prefill: fewest where units * 2 > 5, decode: rest, otherwise: {decode: all}}", (13, 3)),
        ("{decode: fewest where units > 99, otherwise: {prefill: all}}", (0, 16)),
        ("{decode: fit, prefill: rest, otherwise: {decode: all}}", (8, 8)),
        ("{decode: 50%, prefill: rest}", (8, 8)),
        ("{decode: rest, prefill: 30%}", (11, 5)),
        ("{decode: 0%, prefill: 10%}", (0, 2)),
        ("{decode: 200%, prefill: rest}", (16, 0)),
    ],
)
def test_a_split_answer_becomes_a_split_of_the_device(
    answer: str, split: tuple[int, int], policy_text: Text, make_view: MakeView
) -> None:
    policy = compile_policy(policy_text(f"split: {answer}"))
    decision = policy.decide(make_view())
    assert decision.errors == ()
    assert decision.split == Split(*split)


def test_numbers_are_rounded_up_to_a_split_that_is_offered(policy_text: Text, make_view: MakeView) -> None:
    view = make_view(132, splits=tuple(Split(units, 132 - units) for units in range(20, 132, 16)))
    for answer, split in (
        ("{decode: 1, prefill: rest}", (20, 112)),
        ("{decode: 21, prefill: rest}", (36, 96)),
        ("{decode: 120, prefill: rest}", (116, 16)),
        ("{decode: rest, prefill: 17}", (100, 32)),
        ("{decode: 120}", (132, 0)),
        ("{prefill: 1}", (0, 16)),
    ):
        assert compile_policy(policy_text(f"split: {answer}")).decide(view).split == Split(*split), answer


@pytest.mark.parametrize(
    "answer",
    [
        "{decode: most, prefill: rest}",
        "{decode: 1, prefill: rest}",
        "{decode: fastest, prefill: rest}",
        FEWEST,
    ],
)
def test_a_device_of_one_unit_is_shared_in_time(answer: str, policy_text: Text, make_view: MakeView) -> None:
    assert compile_policy(policy_text(f"split: {answer}")).decide(make_view(1)).split == Split(1, 1)


def test_a_failing_rule_is_told_and_the_default_answers(policy_text: Text, make_view: MakeView) -> None:
    spec = (
        "split:\n  - {name: bad, when: 1 / queue.requests > 1, then: {decode: all}}\n"
        "  - {name: good, then: {prefill: all}}\n"
    )
    decision = compile_policy(policy_text(spec)).decide(make_view())
    assert decision.split == Split(16, 16)
    assert decision.rules[0] == "split/default"
    assert decision.errors == ("split/bad: division by zero",)
    decision = compile_policy(policy_text("on_error: next\n" + spec)).decide(make_view())
    assert decision.split == Split(0, 16)
    assert decision.rules[0] == "split/good"
    assert decision.errors == ("split/bad: division by zero",)


def test_an_absent_batch_is_told_with_its_rule(policy_text: Text, make_view: MakeView) -> None:
    rule = "{name: bad, when: candidate.new_tokens > 1, then: {decode: all}}"
    spec = f"split:\n  - {rule}\n  - {{name: b, then: {{decode: all}}}}"
    (error,) = compile_policy(policy_text(spec)).decide(make_view()).errors
    assert error.startswith("split/bad: a value is absent (new_tokens)")
    assert "candidate.waiting" in error


def test_fewest_that_fails_leaves_no_trace_for_the_next_rule(
    policy_text: Text, make_view: MakeView, make_batch: MakeBatch
) -> None:
    spec = (
        "on_error: next\nsplit:\n"
        "  - {name: bad, when: true or 1 / decode.batch > 1, then: "
        "{decode: fewest where 1 / (units - 3) < -1, prefill: rest, otherwise: {decode: all}}}\n"
    )
    text = policy_text(spec.replace("true or 1 / decode.batch > 1", "decode.batch > 0") + _TIME_LEFT)
    decision = compile_policy(text).decide(make_view(running=make_batch(), estimates=make_view().estimates))
    assert decision.errors == ("split/bad: division by zero",)
    assert decision.rules[0] == "split/whole"


_TIME_LEFT = (
    "  - {name: whole, when: running.time_left == 32 * estimate.prefill_layer(16), then: {decode: all}}\n"
    "  - {name: other, then: {prefill: all}}\n"
)


def test_order_takes_keys_one_after_the_other(policy_text: Text, make_request: MakeRequest) -> None:
    requests = [
        make_request(request_id=1, priority=1, prompt_tokens=10),
        make_request(request_id=2, priority=0, prompt_tokens=10),
        make_request(request_id=3, priority=0, prompt_tokens=30),
        make_request(request_id=4, priority=1, prompt_tokens=10),
    ]
    policy = compile_policy(policy_text("order: {by: [request.priority, -request.prompt_tokens]}"))
    assert policy.order(requests, 0, {}).order == (2, 1, 0, 3)
    assert policy.order([], 0, {}).order == ()


def test_order_falls_back_to_arrival_when_a_key_fails(policy_text: Text, make_request: MakeRequest) -> None:
    requests = [make_request(arrival_ns=2), make_request(arrival_ns=1, priority=5)]
    policy = compile_policy(policy_text("order: {by: 1 / request.priority}"))
    assert policy.order(requests, 0, {}).order == (1, 0)


def test_sort_keys_know_the_time(policy_text: Text, make_request: MakeRequest) -> None:
    requests = [make_request(deadline_ns=3000 * MS), make_request(deadline_ns=1500 * MS)]
    key = "{by: ['request.slack if request.slack < 1s else 1s', -request.arrival]}"
    policy = compile_policy(policy_text(f"order: {key}"))
    assert policy.order(requests, 1000 * MS, {}).order == (1, 0)
    assert policy.order(requests, 0, {}).order == (0, 1)


def test_the_victim_came_last(make_request: MakeRequest) -> None:
    requests = [make_request(arrival_ns=arrival) for arrival in (5, 9, 7)]
    assert load_policy("muxwise").victim(requests, 10).index == 1


def admit(policy: CompiledPolicy, request: RequestView, queue: int = 0) -> tuple[str, str]:
    view = AdmitView(0, request, QueueView(queue, 0), 10, KvView(100, 50), Estimates())
    answer = policy.admit(view)
    assert answer.errors == ()
    return answer.action, answer.rule


def test_admission_refuses_what_never_fits_and_sheds_over_the_bound(make_request: MakeRequest) -> None:
    policy = load_policy("muxwise")
    assert admit(policy, make_request()) == ("accept", "admit/welcome")
    assert admit(policy, make_request(pages=101)) == ("refuse", "admit/never-fits")
    assert admit(policy, make_request(), queue=10) == ("shed", "admit/overload")


def test_admission_is_written_with_a_reason(policy_text: Text, make_request: MakeRequest) -> None:
    rule = "{name: a, when: request.priority > 3, then: {shed: come back at night}}"
    spec = f"admit:\n  - {rule}\n  - {{name: b, then: accept}}"
    policy = compile_policy(policy_text(spec))
    view = AdmitView(0, make_request(priority=4), QueueView(0, 0), 10, KvView(9, 9), Estimates())
    assert policy.admit(view).reason == "come back at night"


def test_admission_may_ask_how_long_the_queue_takes(
    policy_text: Text, make_view: MakeView, make_request: MakeRequest
) -> None:
    ahead = "queue.requests + 1, queue.tokens + request.prompt_tokens"
    late = f"estimate.prefill({ahead}) > request.slack"
    rules = f"[{{name: late, when: '{late}', then: shed}}, base]"
    policy = compile_policy(policy_text(f"admit: {rules}\n"))
    known = make_view().estimates  # 32 layers, 5 us a token on all 16 units
    request = make_request(prompt_tokens=1_000, deadline_ns=1_000_000_000)

    def rule(waiting: QueueView, estimates: Estimates = known) -> tuple[str, int]:
        answer = policy.admit(AdmitView(0, request, waiting, 10, KvView(100, 50), estimates))
        return answer.rule, len(answer.errors)

    assert rule(QueueView(0, 0)) == ("admit/welcome", 0)
    assert rule(QueueView(2, 5_200)) == ("admit/welcome", 0)
    assert rule(QueueView(2, 5_300)) == ("admit/late", 0)
    assert rule(QueueView(2, 5_300), Estimates()) == ("admit/default", 1)


def test_a_long_head_is_a_batch_of_its_own(make_request: MakeRequest) -> None:
    policy = load_policy("muxwise")

    def form(prompt_tokens: int) -> tuple[int, int]:
        head = make_request(prompt_tokens=prompt_tokens)
        view = FormView(
            0, head, QueueView(3, 9000), DecodeView(0, 0, False, False, 0), KvView(9, 9), Estimates()
        )
        answer = policy.form(view)
        return answer.max_requests, answer.max_tokens

    assert form(100) == (8, 512)
    assert form(8000) == (8, 8000)


def test_form_asks_an_estimate_and_what_waits_of_the_head_s_class(
    policy_text: Text, make_view: MakeView, make_request: MakeRequest
) -> None:
    tokens = "class.tokens if estimate.known and estimate.prefill(4, 4000) <= head.deadline - now else 512"
    policy = compile_policy(policy_text(f"form: {{requests: 1 + class.requests, tokens: '{tokens}'}}"))
    known = make_view().estimates  # 32 layers, 5 us a token on all 16 units: 640 ms

    def form(due_ms: int, estimates: Estimates = known) -> tuple[int, int]:
        head, waiting = make_request(deadline_ns=due_ms * 1_000_000), QueueView(30, 90_000)
        nobody = DecodeView(0, 0, False, False, 0)
        view = FormView(0, head, waiting, nobody, KvView(9, 9), estimates, QueueView(3, 3000))
        answer = policy.form(view)
        return answer.max_requests, answer.max_tokens

    assert form(641) == (4, 3000)
    assert form(639) == (4, 512)
    assert form(641, Estimates()) == (4, 512)


def test_retain_reads_the_request(policy_text: Text, make_request: MakeRequest) -> None:
    rule = "{name: long, when: request.prompt_tokens > 1k, then: keep}"
    spec = f"retain:\n  - {rule}\n  - {{name: short, then: free}}"
    policy = compile_policy(policy_text(spec))
    assert policy.retain(make_request(prompt_tokens=1001)).keep is True
    assert policy.retain(make_request(prompt_tokens=1000)).keep is False


def test_a_slice_is_rounded_up_and_at_least_one_layer(
    policy_text: Text, make_view: MakeView, make_batch: MakeBatch
) -> None:
    view = make_view(running=make_batch())
    for layers, expected in (("2.1", 3), ("0", 1), ("-5", 1), ("all", 32), ("1e15", 1 << 31)):
        policy = compile_policy(policy_text(f"slice: {{layers: {layers}}}"))
        decision: Any = policy.decide(view)
        assert decision.layers == expected, layers


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("{layers: 3}", (3, None, False)),
        ("{layers: all}", (32, None, False)),
        ("{tokens: 256}", (32, 256, False)),
        ("{tokens: all}", (32, None, False)),
        ("{tokens: 256, layers: all}", (32, 256, False)),
        ("{layers: 2.1, tokens: 10.9}", (3, 10, False)),
        ("{tokens: 64 - decode.batch, fuse: decode}", (32, 56, True)),
        ("{tokens: 7 - decode.batch, fuse: decode}", (32, 1, True)),
        ("{tokens: all, fuse: decode}", (32, None, True)),
        ("{tokens: 1e15}", (32, 1 << 31, False)),
    ],
)
def test_a_slice_answer_becomes_layers_a_chunk_and_whether_it_is_fused(
    answer: str,
    expected: tuple[int, int | None, bool],
    policy_text: Text,
    make_view: MakeView,
    make_batch: MakeBatch,
) -> None:
    decision = compile_policy(policy_text(f"slice: {answer}")).decide(make_view(running=make_batch()))
    assert decision.errors == ()
    assert (decision.layers, decision.tokens, decision.fuse) == expected


def test_a_slice_that_fails_launches_one_layer_unfused(
    policy_text: Text, make_view: MakeView, make_batch: MakeBatch
) -> None:
    policy = compile_policy(policy_text("slice: {tokens: 64 / queue.requests, fuse: decode}"))
    decision = policy.decide(make_view(running=make_batch()))
    assert (decision.layers, decision.tokens, decision.fuse) == (1, None, False)
    assert decision.errors == ("slice/always: division by zero",)


@pytest.mark.parametrize(
    ("spec", "reads"),
    [
        ("retain: keep", False),
        ("order: {by: [request.arrival, request.priority]}", True),
        ("victim: {by: -request.priority}", True),
        ("order: [{name: a, when: queue.requests > 9, then: {by: request.arrival - request.priority * 1s}},"
         " {name: b, then: {by: request.arrival}}]", True),
        ("admit: [{name: a, when: request.priority > 3, then: shed}, {name: b, then: accept}]", True),
        ("form: {requests: 8 if head.priority < 0 else 1, tokens: 512}", True),
        ("params: {p: {type: bool, default: false}}\n"
         "order: [{name: a, when: params.p, then: {by: request.priority}},"
         " {name: b, then: {by: request.arrival}}]", False),
    ],
)  # fmt: skip
def test_a_policy_tells_whether_priorities_have_an_effect(spec: str, reads: bool, policy_text: Text) -> None:
    policy: Policy = compile_policy(policy_text(spec))
    assert policy.reads_priority is reads
    assert policy.known_classes == ()


def test_a_param_can_switch_the_rule_that_reads_priorities_on(policy_text: Text) -> None:
    spec = (
        "params: {p: {type: bool, default: false}}\n"
        "order: [{name: a, when: params.p, then: {by: request.priority}},"
        " {name: b, then: {by: request.arrival}}]"
    )
    assert compile_policy(policy_text(spec), settings={"p": "true"}).reads_priority is True
