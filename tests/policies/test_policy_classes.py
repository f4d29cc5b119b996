"""Classes of requests: who is in which, what each is owed, and what shares and waits make of the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
from muxk.policies.problems import PolicyError, Problem

Text = Callable[[str], str]
MakeView = Callable[..., View]
MakeBatch = Callable[..., PrefillView]
MakeRequest = Callable[..., RequestView]
MS = 1_000_000
SECOND = 1_000 * MS

CLASSES = """
slo: {tbt: 100ms, ttft: 10ms/token}
params: {short: {type: number, default: 4k}}
classes:
  - name: chat
    when: request.class == 'chat' and request.prompt_tokens < params.short
    slo: {tbt: 30ms, ttft: 300ms}
    share: 3
  - {name: urgent, when: "request.priority < 0 or request.class == 'vip'", slo: {ttft: 1s}}
  - {name: batch, share: 1, max_wait: 60s}
"""


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(PolicyError) as raised:
        compile_policy(text, "p.yaml")
    return raised.value.problems


def test_a_request_is_in_the_first_class_whose_condition_holds(
    policy_text: Text, make_request: MakeRequest
) -> None:
    policy: Policy = compile_policy(policy_text(CLASSES))

    def class_of(**changes: Any) -> tuple[str, str]:
        answer = policy.classify(make_request(**changes))
        assert answer.errors == ()
        return answer.chosen.name, answer.rule

    assert class_of(request_class="chat") == ("chat", "classes/chat")
    assert class_of(request_class="chat", prompt_tokens=4000) == ("batch", "classes/batch")
    assert class_of(request_class="chat", prompt_tokens=4000, priority=-1) == ("urgent", "classes/urgent")
    assert class_of(request_class="vip") == ("urgent", "classes/urgent")
    assert class_of() == ("batch", "classes/batch")
    assert class_of(request_class="unheard-of") == ("batch", "classes/batch")
    assert policy.classes == ("chat", "urgent", "batch")
    assert policy.known_classes == ("chat", "vip")
    assert policy.reads_priority


def test_a_class_has_its_own_slos_and_those_of_the_policy_for_the_rest(
    policy_text: Text, make_request: MakeRequest
) -> None:
    policy = compile_policy(policy_text(CLASSES))
    chat = policy.classify(make_request(request_class="chat")).chosen
    assert (chat.rank, chat.tbt_slo_ns, chat.ttft_slo_ns, chat.share) == (0, 30 * MS, 300 * MS, 3)
    urgent = policy.classify(make_request(request_class="vip", prompt_tokens=200)).chosen
    assert (urgent.tbt_slo_ns, urgent.ttft_slo_ns, urgent.share) == (100 * MS, SECOND, 1)
    batch = policy.classify(make_request(prompt_tokens=200)).chosen
    assert (batch.tbt_slo_ns, batch.ttft_slo_ns, batch.max_wait_ns) == (100 * MS, 2 * SECOND, 60 * SECOND)


def test_a_policy_without_classes_has_one(make_request: MakeRequest) -> None:
    policy = load_policy("muxwise")
    answer = policy.classify(make_request(request_class="chat", prompt_tokens=100))
    assert (answer.rule, policy.classes, policy.known_classes) == ("classes/default", ("default",), ())
    assert (answer.chosen.tbt_slo_ns, answer.chosen.ttft_slo_ns) == (100 * MS, SECOND)
    assert (answer.chosen.rank, answer.chosen.share, answer.chosen.max_wait_ns) == (0, 1, None)


def test_a_class_whose_condition_fails_does_not_match_and_that_is_told(
    policy_text: Text, make_request: MakeRequest
) -> None:
    spec = "classes:\n  - {name: a, when: 1 / request.priority > 0}\n  - {name: b}\n"
    answer = compile_policy(policy_text(spec)).classify(make_request(priority=0))
    assert (answer.chosen.name, answer.rule) == ("b", "classes/b")
    assert answer.errors == ("classes/a: division by zero",)


@pytest.mark.parametrize(
    ("spec", "column", "message"),
    [
        ("classes: {name: a}", 12, "must be a list"),
        ("classes: []", 12, "1 to 32"),
        ("classes: [{name: a, when: request.priority > 1}]", 13, "catch-all"),
        ("classes: [{name: a}, {name: b}]", 24, "class 'b' can never be reached"),
        ("classes: [{name: a, when: request.priority > 1}, {name: a}]", 52, "two classes are named 'a'"),
        ("classes: [{when: request.priority > 1}, {name: a}]", 13, "needs a 'name'"),
        ("classes: [{name: a b}]", 20, "name must be a word"),
        ("classes: [{name: a, shares: 3}]", 23, "did you mean 'share'"),
        ("classes: [{name: a, share: 0}]", 30, "more than 0"),
        ("classes: [{name: a, share: -1}]", 30, "more than 0"),
        ("classes: [{name: a, share: 1e7}]", 30, "more than 0"),
        ("classes: [{name: a, share: 50%}]", 30, "must be a number, not a percentage"),
        ("classes: [{name: a, max_wait: 3}]", 33, "needs a unit"),
        ("classes: [{name: a, max_wait: 0s}]", 33, "more than 0"),
        ("classes: [{name: a, slo: {tbt: 5}}]", 34, "needs a unit"),
        ("classes: [{name: a, slo: {tbd: 5ms}}]", 29, "did you mean 'tbt'"),
        ("classes: [{name: a, slo: {tbt: 2 * decode.idle}}]", 38, "not known in slo"),
        ("classes: [{name: a, when: request.age > 1s}, {name: b}]", 29, "not known in classes"),
        ("classes: [{name: a, when: class.rank > 1}, {name: b}]", 29, "not known in classes"),
        ("classes: [{name: a, when: slo.tbt > 1s}, {name: b}]", 29, "not known in classes"),
        ("classes: [{name: a, when: request.class > 'b'}, {name: b}]", 45, "no order"),
        ("classes: [{name: a, when: request.class}, {name: b}]", 29, "must be true or false"),
        ("classes: [{name: a, when: [x]}, {name: b}]", 29, "must be an expression"),
    ],
)
def test_a_mistake_in_classes_is_told_at_its_place(
    spec: str, column: int, message: str, policy_text: Text
) -> None:
    found = problems(policy_text(spec))
    told = [problem for problem in found if message in problem.message + problem.hint]
    assert [(problem.line, problem.column) for problem in told] == [(5, column)], found


def test_a_class_that_is_none_is_refused_with_the_closest_one(policy_text: Text) -> None:
    rule = "- {name: a, when: request.class == 'chta', then: {refuse: no}}"
    (problem,) = problems(policy_text(f"{CLASSES}\nadmit:\n  {rule}\n  - {{name: b, then: accept}}\n"))
    assert problem.message == "'chta' is no class of this policy"
    assert problem.hint == "did you mean 'chat'?"
    (problem,) = problems(policy_text(f"admit:\n  {rule}\n  - {{name: b, then: accept}}\n"))
    assert problem.hint == "its classes: default"


def test_rules_know_the_class_that_a_request_is_in(policy_text: Text, make_request: MakeRequest) -> None:
    spec = (
        CLASSES + "admit:\n"
        "  - {name: full, when: class.requests >= 2 or class.tokens > 100, then: {shed: too many}}\n"
        "  - {name: no-batch, when: request.class == 'batch' and class.share == 1, then: refuse}\n"
        "  - {name: b, then: accept}\n"
        "order: {by: [class.rank, request.arrival]}\n"
        "form: {requests: 1 + class.rank + (5 if head.class == 'urgent' else 0), tokens: 1k}\n"
        "retain:\n  - {name: chats, when: request.class == 'chat', then: keep}\n  - {name: b, then: free}\n"
    )
    policy = compile_policy(policy_text(spec))

    def admit(name: str, requests: int = 0, tokens: int = 0) -> str:
        request = make_request(class_name=name)
        queue = QueueView(requests, tokens)
        return policy.admit(AdmitView(0, request, QueueView(9, 9), 10, KvView(9, 9), Estimates(), queue)).rule

    assert admit("chat") == "admit/b"
    assert admit("chat", requests=2) == admit("chat", tokens=101) == "admit/full"
    assert admit("batch") == "admit/no-batch"
    waiting = [
        make_request(class_name=name, arrival_ns=at) for at, name in enumerate(("batch", "urgent", "chat"))
    ]
    nobody = DecodeView(0, 0, False, False, 0)
    forms = [
        policy.form(FormView(0, head, QueueView(3, 9), nobody, KvView(9, 9), Estimates())) for head in waiting
    ]
    assert [form.max_requests for form in forms] == [3, 7, 1]
    assert [policy.retain(request).keep for request in waiting] == [False, False, True]


def test_a_request_of_no_class_is_like_one_of_the_last(policy_text: Text, make_request: MakeRequest) -> None:
    policy = compile_policy(policy_text(CLASSES + "order: {by: class.rank}"))
    requests = [make_request(class_name=name) for name in ("gone", "batch", "urgent")]
    assert policy.order(requests, 0, {"chat": 0, "urgent": 0, "batch": 0}).order == (2, 0, 1)


def test_the_slo_of_a_step_is_the_tightest_of_those_who_decode(
    policy_text: Text, make_view: MakeView, make_batch: MakeBatch
) -> None:
    text = policy_text("extends: muxwise\n" + CLASSES)
    policy = compile_policy(text)

    def units(tbt_slo_ns: int | None) -> int:
        decode = DecodeView(8, 800, True, False, 0, tbt_slo_ns)
        decision = policy.decide(make_view(running=make_batch(), decode=decode))
        assert decision.errors == ()
        return decision.split.decode_units

    assert units(100 * MS) == 8
    assert units(60 * MS) == 14
    assert units(None) == 8, "the policy's own where nobody says otherwise"
    plain = load_policy("muxwise")
    decode = DecodeView(8, 800, True, False, 0, 60 * MS)
    assert plain.decide(make_view(running=make_batch(), decode=decode)).split == Split(8, 8)
    assert plain.points["split"].rules[-1].reads["slo.tbt"].read(None) == 100 * MS


def test_classes_are_replaced_as_a_whole_and_change_the_sha(policy_text: Text) -> None:
    one = compile_policy(policy_text(CLASSES))
    other = compile_policy(policy_text(CLASSES.replace("share: 3", "share: 4")))
    assert one.sha != other.sha


# --- shares and waits ---


def ordered(
    policy: CompiledPolicy, requests: list[RequestView], service: Mapping[str, float], now_ns: int = 0
) -> list[str]:
    answer = policy.order(requests, now_ns, service)
    assert answer.errors == ()
    assert sorted(answer.order) == list(range(len(requests)))
    return [requests[index].class_name for index in answer.order]


def test_classes_take_turns_by_their_shares(policy_text: Text, make_request: MakeRequest) -> None:
    policy = compile_policy(policy_text(CLASSES))
    requests = [
        make_request(class_name=name, prompt_tokens=100) for name in ("batch", "chat") for _ in range(8)
    ]
    served = ordered(policy, requests, {"chat": 0, "batch": 0})
    assert Counter(served[:8]) == {"chat": 6, "batch": 2}
    assert served[-4:] == ["batch"] * 4, "who waits alone goes on"


def test_who_got_more_for_its_share_waits_until_the_others_have_caught_up(
    policy_text: Text, make_request: MakeRequest
) -> None:
    policy = compile_policy(policy_text(CLASSES))
    requests = [
        make_request(class_name=name, prompt_tokens=300) for name in ("chat", "batch") for _ in range(4)
    ]
    assert ordered(policy, requests, {"chat": 650, "batch": 0})[:4] == ["batch", "batch", "batch", "chat"]
    assert ordered(policy, requests, {"chat": 0, "batch": 10_000})[:4] == ["chat"] * 4


def test_long_prompts_count_by_their_tokens(policy_text: Text, make_request: MakeRequest) -> None:
    policy = compile_policy(
        policy_text("classes:\n  - {name: a, when: request.priority < 1, share: 1}\n  - {name: b}\n")
    )
    long = [make_request(class_name="a", prompt_tokens=900, generated_tokens=100) for _ in range(2)]
    short = [make_request(class_name="b", prompt_tokens=100) for _ in range(12)]
    served = ordered(policy, long + short, {"a": 0, "b": 0})
    assert served.index("a", 1) == 11, "ten short prompts, and one for the tie, before the second long one"


def test_sort_keys_hold_within_a_class(policy_text: Text, make_request: MakeRequest) -> None:
    policy = compile_policy(policy_text(CLASSES + "order: {by: -request.prompt_tokens}"))
    requests = [
        make_request(class_name=name, prompt_tokens=tokens)
        for name in ("batch", "chat")
        for tokens in (100, 300, 200)
    ]
    order = policy.order(requests, 0, {}).order
    assert [index for index in order if index < 3] == [1, 2, 0]
    assert [index for index in order if index >= 3] == [4, 5, 3]


def test_without_shares_the_keys_alone_say_who_goes_first(
    policy_text: Text, make_request: MakeRequest
) -> None:
    spec = "classes:\n  - {name: a, when: request.priority < 1}\n  - {name: b}\n"
    policy = compile_policy(policy_text(spec))
    requests = [make_request(class_name=name, arrival_ns=at) for at, name in enumerate("bbabb")]
    assert policy.order(requests, 0, {"a": 0, "b": 10**9}).order == (0, 1, 2, 3, 4)


def test_who_waited_longer_than_its_class_allows_goes_first_of_all(
    policy_text: Text, make_request: MakeRequest
) -> None:
    spec = (
        "classes:\n  - {name: a, when: request.priority < 1, share: 5, max_wait: 10s}\n"
        "  - {name: b, max_wait: 5s}\norder: {by: -request.arrival}\n"
    )
    policy = compile_policy(policy_text(spec))
    requests = [
        make_request(class_name="a", arrival_ns=2 * SECOND),
        make_request(class_name="b", arrival_ns=6 * SECOND),
        make_request(class_name="a", arrival_ns=0),
        make_request(class_name="b", arrival_ns=8 * SECOND),
    ]
    assert policy.order(requests, 4 * SECOND, {"a": 0, "b": 1}).order == (0, 3, 2, 1)
    assert policy.order(requests, 10 * SECOND, {"a": 9, "b": 1}).order[0] == 2, "at the moment it is due"
    assert policy.order(requests, 12 * SECOND, {"a": 9, "b": 1}).order == (2, 1, 0, 3)
    assert policy.order(requests, 99 * SECOND, {}).order == (2, 1, 0, 3), "by when they were due"


ORDERS = (
    "request.arrival",
    "-request.prompt_tokens",
    "[class.rank, request.deadline]",
    "request.slack if request.slack > 0s else 0s",
)
SECTIONS = (
    CLASSES,
    "classes:\n  - {name: chat, when: request.priority < 1, max_wait: 4s}\n  - {name: batch}\n",
    "classes:\n  - {name: chat, when: request.priority < 1, share: 0.3}\n"
    "  - {name: batch, max_wait: 1s, share: 7}\n",
    "retain: keep",
)


def _whole_policy(section: str, order: str) -> CompiledPolicy:
    head = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: test}\nspec:\n"
    lines = [
        *section.strip().splitlines(),
        f"order: {{by: {order}}}" if order[0] == "[" else f"order: {{by: '{order}'}}",
    ]
    return compile_policy(head + "".join(f"  {line}\n" for line in lines))


POLICIES = [_whole_policy(section, order) for section in SECTIONS for order in ORDERS]
times = st.integers(0, 8).map(lambda seconds: seconds * SECOND)
requests_given = st.lists(
    st.builds(
        RequestView,
        request_id=st.integers(0, 99),
        arrival_ns=times,
        deadline_ns=times,
        prompt_tokens=st.sampled_from([1, 10, 100, 1000]),
        generated_tokens=st.sampled_from([0, 50]),
        max_tokens=st.just(16),
        pages=st.just(1),
        priority=st.integers(-1, 1),
        recomputes=st.integers(0, 1),
        class_name=st.sampled_from(["chat", "urgent", "batch", "gone"]),
    ),
    min_size=1,
    max_size=12,
)
services = st.dictionaries(st.sampled_from(["chat", "urgent", "batch"]), st.floats(0, 1e6), max_size=3)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=requests_given, service=services, now_ns=times, policy=st.sampled_from(POLICIES))
def test_the_head_of_the_queue_goes_before_any_other_alone(
    requests: list[RequestView], service: dict[str, float], now_ns: int, policy: CompiledPolicy
) -> None:
    """Admission keeps the head by comparing a newcomer with it; it must be the one that all together give."""
    answer = policy.order(requests, now_ns, service)
    assert sorted(answer.order) == list(range(len(requests)))
    assert policy.order(requests, now_ns, service) == answer
    head = requests[answer.order[0]]
    for index in range(len(requests)):
        if index != answer.order[0]:
            first, pair = (0, [head, requests[index]])
            if index < answer.order[0]:
                first, pair = (1, [requests[index], head])
            assert policy.order(pair, now_ns, service).order[0] == first
    kept = 0
    for index in range(1, len(requests)):
        if policy.order([requests[kept], requests[index]], now_ns, service).order[0] == 1:
            kept = index
    assert requests[kept] == head


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=requests_given, service=services)
def test_what_a_class_gets_follows_its_share_to_within_its_largest_prompt(
    requests: list[RequestView], service: dict[str, float]
) -> None:
    """At every point of the order, no class that still waits is behind another by more than one prompt."""
    policy = POLICIES[0]
    requests = [
        msgspec.structs.replace(
            r, arrival_ns=0, class_name="batch" if r.class_name == "gone" else r.class_name
        )
        for r in requests
    ]
    rows = policy.class_rows.by_name
    least = min(service.values(), default=0.0)
    got = {name: service.get(name, least) for name in rows}
    order = policy.order(requests, 0, service).order
    for place, index in enumerate(order):
        waiting = {requests[later].class_name for later in order[place:]}
        chosen = requests[index].class_name
        assert all(got[chosen] <= got[name] for name in waiting)
        tokens = requests[index].prompt_tokens + requests[index].generated_tokens
        got[chosen] += tokens / rows[chosen].weight
