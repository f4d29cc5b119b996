"""No answer of a policy in Python raises, breaks a bound or makes no sense, whatever the policy does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from muxk.kernel.policy import Policy
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    FormAnswer,
    FormView,
    Limits,
    OrderAnswer,
    RequestClass,
    RetainAnswer,
    VictimAnswer,
)
from muxk.kernel.work import Split
from muxk.policies.answer_checks import WrongAnswer
from muxk.policies.api import BasePolicy
from muxk.policies.guarded import ERRORS_MAX, LABELS_MAX, GuardedPolicy

QUESTIONS = ("classify", "admit", "order", "form", "decide", "victim", "retain")
SOME_CLASS = RequestClass("default", 0, 1, 1)
WHOLE = Split(16, 16)
BEST = Split(4, 12)
OVERLOADED = "too many requests wait; retry later"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Plain(BasePolicy):
    api_version = 1
    name = "plain"


def answering(answer: Any) -> Any:
    return lambda self, *arguments: answer(*arguments) if callable(answer) else answer


def guarded(**methods: Any) -> GuardedPolicy:
    """A guarded policy whose questions are answered by functions of the arguments, or by constants."""
    made = {name: answering(answer) for name, answer in methods.items()}
    policy = type("Made", (Plain,), made)()
    return GuardedPolicy(policy, policy.base, "made", "sha")


@pytest.fixture
def ask(make_view: Any, make_batch: Any, make_request: Any) -> Callable[[Policy, str], Any]:
    view = make_view(running=make_batch(), candidate=make_batch(batch_id=0))
    request = make_request()
    arguments: dict[str, tuple[Any, ...]] = {
        "classify": (request,),
        "admit": (AdmitView(0, request, view.queue, 8, view.kv, view.estimates),),
        "order": ([request, make_request(arrival_ns=5)], 9, {"default": 0.0}),
        "form": (FormView(0, request, view.queue, view.decode, view.kv, view.estimates),),
        "decide": (view,),
        "victim": ([request, make_request(arrival_ns=5)], 9),
        "retain": (request,),
    }
    return lambda policy, question: getattr(policy, question)(*arguments[question])


def same_but_errors(answer: Any, other: Any) -> bool:
    fields = [field for field in answer.__struct_fields__ if field != "errors"]
    return all(getattr(answer, field) == getattr(other, field) for field in fields)


FAILURES = (
    ZeroDivisionError("division by zero"), SystemExit(1), RecursionError("deep"), MemoryError(),
    Unprintable(), StopIteration(), AssertionError("x\ny" * 5000), KeyError("\x1b[31mred\u202e"),
)  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_an_exception_is_told_in_one_short_line_and_the_rules_answer(
    question: str, failure: BaseException, ask: Any
) -> None:
    def fail(*_: Any) -> Any:
        raise failure

    answer = ask(guarded(**{question: fail}), question)
    assert same_but_errors(answer, ask(Plain().base, question))
    [text] = answer.errors
    assert text.startswith(f"{question}/made: {type(failure).__name__}")
    assert text.isprintable()
    assert len(text) < 300


WRONG: tuple[tuple[str, Any, str], ...] = (
    *(
        (question, wrong, "the answer must be a")
        for question in QUESTIONS
        for wrong in (None, True, 7, {}, ())
    ),
    ("classify", ClassAnswer("default", "r"), "chosen must be a RequestClass"),
    ("classify", ClassAnswer(RequestClass("vip", 0, 1, 1), "r"), "no class 'vip'"),
    ("classify", ClassAnswer(RequestClass([], 0, 1, 1), "r"), "no class a list"),
    ("classify", ClassAnswer(RequestClass("default", 1, 1, 1), "r"), "rank of class 'default' is 0, not 1"),
    ("classify", ClassAnswer(RequestClass("default", 0, 0, 1), "r"), "tbt_slo_ns must be 1 to"),
    ("classify", ClassAnswer(RequestClass("default", 0, 1, 1e9), "r"), "ttft_slo_ns must be a whole number"),
    *(
        ("classify", ClassAnswer(RequestClass("default", 0, 1, 1, share), "r"), "a share must be more than 0")
        for share in (0, -1, math.nan, math.inf, "1", True, 10**400)
    ),
    ("classify", ClassAnswer(RequestClass("default", 0, 1, 1, 1.0, -1), "r"), "max_wait_ns must be 0 to"),
    ("classify", ClassAnswer(SOME_CLASS, ""), "rule must be a text"),
    ("admit", AdmitAnswer("drop", "", "r"), "accept, refuse or shed, not 'drop'"),
    ("admit", AdmitAnswer(["accept"], "", "r"), "accept, refuse or shed, not a list"),
    ("admit", AdmitAnswer("refuse", None, "r"), "reason must be a text"),
    ("order", OrderAnswer((0,), "r"), "each of 2 indices once, not 1 of them"),
    ("order", OrderAnswer((0, 0), "r"), "has one twice"),
    ("order", OrderAnswer((0, 2), "r"), "must be 0 to 1, not 2"),
    ("order", OrderAnswer((0, -1), "r"), "must be 0 to 1, not -1"),
    ("order", OrderAnswer((0, True), "r"), "must be a whole number, not True"),
    ("order", OrderAnswer((0, 1.0), "r"), "must be a whole number, not 1.0"),
    ("order", OrderAnswer({0, 1}, "r"), "not a set of them"),
    ("order", OrderAnswer((0, 1), "r", ("fine", 3)), "errors must be a tuple of texts"),
    ("order", OrderAnswer((0, 1), "r", "text"), "errors must be a tuple of texts"),
    ("form", FormAnswer(0, 1, "r"), "max_requests must be 1 to"),
    ("form", FormAnswer(1, 1 << 40, "r"), "max_tokens must be 1 to"),
    ("form", FormAnswer(1, math.inf, "r"), "max_tokens must be a whole number, not inf"),
    ("decide", Decision(None, 1, False, ("r",)), "split must be a Split, not None"),
    ("decide", Decision(Split(0, 0), 1, False, ("r",)), "offers no split 0+0"),
    ("decide", Decision(Split(9, 9), 1, False, ("r",)), "offers no split 9+9 of 16 units"),
    ("decide", Decision(Split(1, 16), 1, False, ("r",)), "offers no split 1+16"),
    ("decide", Decision(Split(1.5, 3), 1, False, ("r",)), "decode_units must be a whole number"),
    ("decide", Decision(Split(-1, 3), 1, False, ("r",)), "decode_units must be 0 to 16"),
    ("decide", Decision(WHOLE, 0, False, ("r",)), "layers must be 1 to"),
    (
        "decide",
        Decision(WHOLE, 10**5000, False, ("r",)),
        "layers must be 1 to 2147483648, not a huge integer",
    ),
    ("decide", Decision(WHOLE, 1, 1, ("r",)), "preempt must be True or False, not 1"),
    ("decide", Decision(WHOLE, 1, False, ("r",), (), 0), "tokens must be 1 to"),
    ("decide", Decision(WHOLE, 1, False, ("r",), (), 4, "yes"), "fuse must be True or False"),
    ("decide", Decision(WHOLE, 1, False, "abc"), "rules must be a tuple"),
    ("decide", Decision(WHOLE, 1, False, ("r",) * 9), "rules must be a tuple of at most 4"),
    ("decide", Decision(WHOLE, 1, False, (5,)), "rule must be a text, not 5"),
    ("victim", VictimAnswer(2, "r"), "index must be 0 to 1, not 2"),
    ("victim", VictimAnswer(None, "r"), "index must be a whole number"),
    ("retain", RetainAnswer("no", "r"), "keep must be True or False"),
    ("retain", RetainAnswer(np.True_, "r"), "keep must be True or False"),
)


@pytest.mark.parametrize(("question", "wrong", "complaint"), WRONG)
def test_a_senseless_answer_is_told_and_the_rules_answer(
    question: str, wrong: Any, complaint: str, ask: Any
) -> None:
    answer = ask(guarded(**{question: wrong}), question)
    assert same_but_errors(answer, ask(Plain().base, question))
    [text] = answer.errors
    assert text.startswith(f"{question}/made: ")
    assert complaint in text


RIGHT: tuple[tuple[str, Any, Any], ...] = (
    ("classify", ClassAnswer(SOME_CLASS, "mine"), ClassAnswer(SOME_CLASS, "classes/mine")),
    ("admit", AdmitAnswer("shed", "", "mine"), AdmitAnswer("shed", OVERLOADED, "admit/mine")),
    ("order", OrderAnswer([np.int64(1), 0], "order/mine"), OrderAnswer((1, 0), "order/mine")),
    ("form", FormAnswer(3, 4, "mine", ("told",)), FormAnswer(3, 4, "form/mine", ("told",))),
    ("victim", VictimAnswer(1, "mine"), VictimAnswer(1, "victim/mine")),
    ("retain", RetainAnswer(False, "mine"), RetainAnswer(False, "retain/mine")),
    ("decide", Decision(BEST, 2, True, ("split/a", "b")), Decision(BEST, 2, True, ("split/a", "decide/b"))),
    ("decide", Decision(Split(0, 12), 2, False, ()), Decision(Split(0, 12), 2, False, ("decide/made",))),
    ("decide", Decision(Split(16, 0), 2, False, ["x"]), Decision(Split(16, 0), 2, False, ("decide/x",))),
    (
        "decide",
        Decision(WHOLE, 1, False, ("x",), (), 64, True),
        Decision(WHOLE, 1, False, ("decide/x",), (), 64, True),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("question", "answer", "passed"), RIGHT)
def test_a_sensible_answer_goes_through_under_a_label_of_its_point(
    question: str, answer: Any, passed: Any, ask: Any
) -> None:
    assert ask(guarded(**{question: answer}), question) == passed


def test_labels_and_errors_without_end_are_counted_as_a_few(ask: Any) -> None:
    number = iter(range(10_000))
    labels = guarded(retain=lambda _: RetainAnswer(True, f"request-{next(number)}"))
    seen = {ask(labels, "retain").rule for _ in range(LABELS_MAX + 50)}
    assert len(seen) == LABELS_MAX + 1

    def fail(*_: Any) -> Any:
        raise ValueError(f"request {next(number)}")

    errors = guarded(retain=fail)
    texts = {ask(errors, "retain").errors for _ in range(ERRORS_MAX + 50)}
    assert len(texts) == ERRORS_MAX + 1
    assert ("made: errors with other texts",) in texts


def test_a_policy_can_not_change_what_it_is_given(ask: Any) -> None:
    def meddle(requests: Any, now_ns: int, service: Any) -> Any:
        service["default"] = 1e9
        return OrderAnswer((1, 0), "r")

    answer = ask(guarded(order=meddle), "order")
    assert answer.order == (0, 1)
    assert "TypeError" in answer.errors[0]


@pytest.mark.parametrize(
    ("fact", "value", "complaint"),
    [
        ("limits", Limits(0, 1, 1), "limits.backlog must be 1 to 4, not 0"),
        ("limits", Limits(1, 1, 1 << 60), "limits.queue_bound must be 1 to"),
        ("limits", Limits(1, 1, 1, 0, -1), "limits.preemptions must be 0 to"),
        ("limits", Limits(1, 1.5, 1), "limits.decode_floor_ns must be a whole number"),
        ("tbt_slo_ns", 0, "tbt_slo_ns must be 1 to"),
        ("reads_priority", None, "reads_priority must be True or False"),
        ("classes", ("a", "a"), "classes has a name twice"),
        ("classes", ("a b",), "classes must be names of"),
        ("classes", "default", "classes must be a tuple"),
        ("known_classes", (1,), "known_classes must be names of"),
    ],
)
def test_what_a_policy_says_of_itself_is_checked_before_it_is_asked_anything(
    fact: str, value: Any, complaint: str
) -> None:
    policy = type("Made", (Plain,), {fact: value})()
    with pytest.raises(WrongAnswer, match=complaint):
        GuardedPolicy(policy, policy.base, "made", "sha")


def test_when_classify_fails_a_class_of_the_policy_is_chosen(make_request: Any) -> None:
    class Classes(Plain):
        classes = ("gold", "rest")

        def classify(self, request: Any) -> Any:
            raise LookupError(request.request_class)

    policy = Classes()
    answer = GuardedPolicy(policy, policy.base, "made", "sha").classify(make_request())
    assert (answer.chosen.name, answer.chosen.rank, answer.rule) == ("rest", 1, "classes/rest")
    assert answer.chosen.ttft_slo_ns == policy.base.classify(make_request()).chosen.ttft_slo_ns
    assert answer.errors == ("classify/made: LookupError",)
