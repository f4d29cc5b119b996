"""A policy adds rules to a point of the one it extends without restating the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from muxk.kernel.view import PrefillView, View
from muxk.policies.engine import compile_policy, load_policy
from muxk.policies.json_schema import policy_schema
from muxk.policies.loader import load
from muxk.policies.marks import plain
from muxk.policies.policy_choice import choose
from muxk.policies.problems import PolicyError, Problem, Report

Text = Callable[[str], str]
MakeView = Callable[..., View]
MakeBatch = Callable[..., PrefillView]
HOLD = "{name: hold, when: decode.batch > 100, then: {decode: all}}"


def labels(text: str, point: str) -> list[str]:
    return [rule.label for rule in compile_policy(text).points[point].rules]


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(PolicyError) as raised:
        compile_policy(text, "p.yaml")
    return raised.value.problems


def test_base_at_the_end_goes_on_with_the_rules_of_the_extended_policy(policy_text: Text) -> None:
    text = policy_text(f"extends: muxwise\nsplit:\n  - {HOLD}\n  - base\n")
    inherited = [rule.label for rule in load_policy("muxwise").points["split"].rules]
    assert labels(text, "split") == ["split/hold", *inherited]


def test_base_stands_for_an_answer_without_a_list_too(policy_text: Text) -> None:
    few = "{name: few, when: queue.requests < 3, then: {by: request.arrival}}"
    text = policy_text(f"extends: muxwise\norder:\n  - {few}\n  - base\n")
    few_rule, rest = compile_policy(text).points["order"].rules
    assert (few_rule.label, rest.label, rest.then_text) == (
        "order/few",
        "order/always",
        "{by: request.deadline}",
    )


def test_without_extends_base_is_what_muxk_does_by_itself(policy_text: Text) -> None:
    busy = "{name: busy, when: queue.requests > 9, then: shed}"
    assert labels(policy_text(f"admit:\n  - {busy}\n  - base\n"), "admit") == [
        "admit/busy",
        "admit/never-fits",
        "admit/overload",
        "admit/welcome",
    ]


def test_inherited_rules_follow_the_params_of_the_policy(
    policy_text: Text, make_view: MakeView, make_batch: MakeBatch
) -> None:
    never = "{name: never, when: kv.free > 1G, then: {layers: 1}}"
    policy = compile_policy(
        policy_text(f"extends: chunked\nslice: [{never}, base]\n"), settings={"budget": "70"}
    )
    view = make_view(running=make_batch())
    assert policy.decide(view).tokens == 70 - view.decode.batch


@pytest.mark.parametrize(
    ("rules", "message", "hint"),
    [
        (
            "[base, {name: a, then: park}]",
            "'base', the rules of the extended policy, must be the last",
            "above it",
        ),
        (
            "[{name: no-preemption, when: kv.free > 1, then: park}, base]",
            "two rules named",
            "of muxwise.yaml",
        ),
        ("[{name: a, then: park}, base]", "can never be reached", "rule 'a' before it always matches"),
        ("[bas]", "a rule of preempt must be a mapping", ""),
    ],
)
def test_a_mistake_with_base_is_told_where_it_was_made(
    rules: str, message: str, hint: str, policy_text: Text
) -> None:
    (problem,) = problems(policy_text(f"extends: muxwise\npreempt: {rules}\n"))
    assert message in problem.message
    assert hint in problem.hint
    assert problem.file == "p.yaml"


def test_what_base_brings_is_not_counted_as_rules_of_the_file(policy_text: Text) -> None:
    text = policy_text(f"extends: muxwise\nsplit:\n  - {HOLD}\n  - base\n")
    assert choose(text, "p.yaml", "p.yaml", {}).own_rules == ("split/hold",)


def test_editors_know_base(policy_text: Text) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(policy_schema())

    def fits(text: str) -> bool:
        root = load(policy_text(text), "p.yaml", Report())
        assert root is not None
        return validator.is_valid(plain(root))

    assert fits(f"split: [{HOLD}, base]\n")
    assert not fits(f"split: [{HOLD}, bas]\n")


def test_muxwise_slices_prefill_where_a_policy_on_top_of_it_holds_decode(
    policy_text: Text, make_view: MakeView, make_batch: MakeBatch
) -> None:
    policy = compile_policy(policy_text("extends: muxwise\nsplit: {prefill: all}\n"))
    decision = policy.decide(make_view(running=make_batch()))
    assert decision.rule("slice") == "slice/alone"
    assert decision.errors == ()
