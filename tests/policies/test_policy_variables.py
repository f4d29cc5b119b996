"""Variables, and who answers when a rule fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from muxk.kernel.estimates import Estimates
from muxk.kernel.view import AdmitView, KvView, PrefillView, QueueView, RequestView, View
from muxk.kernel.work import Split
from muxk.policies.engine import CompiledPolicy, compile_policy
from muxk.policies.problems import PolicyError, Problem

Text = Callable[[str], str]
MakeView = Callable[..., View]
MakeBatch = Callable[..., PrefillView]
MakeRequest = Callable[..., RequestView]
MS = 1_000_000


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(PolicyError) as raised:
        compile_policy(text, "p.yaml")
    return raised.value.problems


PRESSURE = """
params: {most: {type: percent, default: 50%}}
variables:
  pressure: kv.used / kv.total
  full: vars.pressure > params.most
  patience: 2 * slo.tbt
admit:
  - {name: full, when: vars.full, then: shed}
  - {name: otherwise, then: accept}
split:
  - {name: full, when: "vars.full or decode.idle > vars.patience", then: {decode: all}}
  - {name: otherwise, then: {prefill: all}}
"""


def test_a_variable_stands_for_its_expression_in_every_place(
    policy_text: Text, make_view: MakeView, make_request: MakeRequest
) -> None:
    policy = compile_policy(policy_text(PRESSURE))
    for free, rule in ((40, "full"), (60, "otherwise")):
        kv = KvView(100, free)
        assert policy.decide(make_view(kv=kv)).rules[0] == f"split/{rule}"
        view = AdmitView(0, make_request(), QueueView(0, 0), 10, kv, Estimates())
        assert policy.admit(view).rule == f"admit/{rule}"
    settled = compile_policy(policy_text(PRESSURE), settings={"most": "70%"})
    assert settled.decide(make_view(kv=KvView(100, 40))).rules[0] == "split/otherwise"


def test_a_rule_tells_the_variables_that_it_reads_and_what_they_mention(
    policy_text: Text, make_view: MakeView
) -> None:
    rule = compile_policy(policy_text(PRESSURE)).points["split"].rules[0]
    from muxk.policies.scopes import DecideScope

    scope = DecideScope(make_view(kv=KvView(100, 40)))
    read = {name: known.read(scope) for name, known in rule.when_reads.items()}
    assert read == {
        "kv.used": 60,
        "kv.total": 100,
        "params.most": 0.5,
        "vars.pressure": 0.6,
        "vars.full": True,
        "decode.idle": 0,
        "slo.tbt": 100 * MS,
        "vars.patience": 200 * MS,
    }
    assert rule.names == {"kv.used", "kv.total", "decode.idle"}
    assert rule.condition is not None
    assert rule.condition.tree.parts[0].text == "vars.full"
    assert rule.condition.tree.parts[0].parts[0].parts[0].text == "vars.pressure"


def test_variables_of_params_alone_are_constants(policy_text: Text) -> None:
    spec = (
        "params: {p: {type: duration, default: 20ms}}\nvariables: {floor: 3 * params.p, off: params.p > 1s}\n"
        "slo: {tbt: vars.floor}\nlimits: {decode_floor: vars.floor}\n"
        "preempt:\n  - {name: a, when: vars.off, then: park}\n  - {name: b, then: continue}\n"
    )
    policy = compile_policy(policy_text(spec))
    assert policy.tbt_slo_ns == policy.limits.decode_floor_ns == 60 * MS
    assert [rule.label for rule in policy.points["preempt"].rules] == ["preempt/b"]
    assert [rule.label for rule in policy.points["preempt"].written] == ["preempt/a", "preempt/b"]


@pytest.mark.parametrize(
    ("variables", "rule", "places", "message", "hint"),
    [
        ("{a: kv.free}", "vars.b > 1", [(7, 23)], "unknown variable 'vars.b'", "did you mean 'vars.a'?"),
        ("{pressure: kv.free}", "pressure > 1", [(7, 23)], "unknown name", "did you mean 'vars.pressure'?"),
        ("{a: vars.b, b: 1}", "true", [(5, 18)], "'vars.a' uses 'vars.b', which is not defined", "above"),
        ("{a: vars.a + 1}", "true", [(5, 18)], "'vars.a' uses 'vars.a', which is not defined before", ""),
        ("{a: kv.fre}", "true", [(5, 18)], "unknown name 'kv.fre' in a variable", "did you mean 'kv.free'?"),
        ("{a: kv.free + 1ms}", "true", [(5, 28)], "a number + a duration", "needs a unit"),
        ("{a: kv.free + (}", "true", [(5, 29)], "ends where a value is expected", ""),
        ("{a: units.total + request.pages}", "true", [(5, 18)], "no decision point knows all", "two"),
        ("{a: decode.batch}", "vars.a > 1", [(7, 23)], "'vars.a' uses 'decode.batch', which is not known in"
         " admit", "it is known in form"),
        ("{a: decode.batch, b: vars.a}", "vars.b > 1", [(7, 23)], "'vars.b' uses 'decode.batch'", "form"),
        ("{a: estimate.decode(8)}", "vars.a > 1ms", [(7, 23)], "'vars.a' uses 'estimate.decode'", "split"),
        ("{a: kv.free}", "vars.a", [(7, 23)], "must be true or false, not a number", ""),
        ("{a b: kv.free}", "true", [(5, 15)], "a variable's name must be letters", ""),
        ("{a: [1]}", "true", [(5, 18)], "variable 'a' must be an expression, not a list", ""),
        ("[a]", "true", [(5, 14)], "variables must be a mapping", ""),
        ("{a: ''}", "true", [(5, 18)], "an expression is missing", ""),
    ],
)  # fmt: skip
def test_a_mistake_in_a_variable_or_its_use_is_told_once_at_its_place(
    variables: str, rule: str, places: list[tuple[int, int]], message: str, hint: str, policy_text: Text
) -> None:
    spec = f"variables: {variables}\nadmit:\n  - {{name: a, when: {rule}, then: accept}}\n"
    last = "" if rule == "true" else "  - {name: b, then: accept}\n"
    found = problems(policy_text(spec + last))
    assert [(problem.line, problem.column) for problem in found] == places, found
    assert message in found[0].message
    assert hint in found[0].hint


def test_the_use_of_a_variable_in_two_places_tells_only_the_wrong_one(policy_text: Text) -> None:
    spec = (
        "variables: {busy: decode.batch > 3}\n"
        "form: {requests: 1 if vars.busy else 8, tokens: 512}\n"
        "order:\n  - {name: a, when: vars.busy, then: {by: request.arrival}}\n"
        "  - {name: b, then: {by: request.arrival}}\n"
    )
    (problem,) = problems(policy_text(spec))
    assert (problem.line, problem.message) == (
        8,
        "'vars.busy' uses 'decode.batch', which is not known in order",
    )


def test_the_cost_of_a_variable_counts_at_each_use(policy_text: Text) -> None:
    doubling = "\n".join(
        f"  v{index}: vars.v{index - 1} + vars.v{index - 1}" if index else "  v0: kv.free + 1"
        for index in range(60)
    )
    rules = "[{name: a, when: vars.v59 > 1, then: accept}, {name: b, then: accept}]"
    (problem,) = problems(policy_text(f"variables:\n{doubling}\nadmit: {rules}\n"))
    assert "the expression costs" in problem.message
    use = (
        "retain: keep\nadmit: [{name: a, when: " + " > 1 and ".join(["vars.v5"] * 4) + " > 1, then: accept},"
    )
    spec = "variables:\n" + "\n".join(doubling.splitlines()[:6]) + f"\n{use} {{name: b, then: accept}}]\n"
    (problem,) = problems(policy_text(spec))
    assert "more than 400 for admit" in problem.message


def test_variables_are_bounded_in_number_and_length(policy_text: Text) -> None:
    many = "\n".join(f"  v{index}: 1" for index in range(65))
    assert "more than 64 variables" in problems(policy_text(f"variables:\n{many}"))[0].message
    long = "\n".join(f"  v{index}: {' + '.join(['kv.free'] * 100)}" for index in range(11))
    assert "more than 10,000 characters" in problems(policy_text(f"variables:\n{long}"))[0].message


def test_the_rules_of_a_point_are_bounded_together(policy_text: Text) -> None:
    dear = " and ".join(["decode.batch > 3"] * 90)
    rules = "\n".join(f"  - {{name: r{index}, when: {dear}, then: park}}" for index in range(30))
    found = problems(policy_text(f"preempt:\n{rules}\n  - {{name: last, then: continue}}\n"))
    (problem,) = found
    assert "the rules of preempt up to here cost" in problem.message
    assert problem.line == 5 + 19


def test_a_policy_inherits_variables_and_may_change_one(policy_text: Text, make_view: MakeView) -> None:
    """As with params: what the base says with a variable follows what the policy says it is."""
    spec = (
        "variables: {a: kv.free > 5, b: 'not vars.a'}\n"
        "split:\n  - {name: a, when: vars.b, then: {decode: all}}\n  - {name: b, then: {prefill: all}}\n"
    )
    policy = compile_policy(policy_text(spec))
    assert policy.decide(make_view()).rules[0] == "split/b"
    assert policy.sha != compile_policy(policy_text(spec.replace("> 5", "> 6"))).sha


# --- on_error ---

FAILING = (
    "  - {name: bad, when: 1 / queue.requests > 1, then: {decode: all}}\n"
    "  - {name: good, then: {prefill: all}}\n"
)


def decided(spec: str, policy_text: Text, view: View) -> tuple[CompiledPolicy, str, Split, tuple[str, ...]]:
    policy = compile_policy(policy_text(spec))
    decision = policy.decide(view)
    errors = tuple(error for error in decision.errors if error.startswith("split/"))
    return policy, decision.rules[0], decision.split, errors


def test_the_rules_of_the_extended_policy_answer_where_one_fails(
    policy_text: Text, make_view: MakeView, make_batch: MakeBatch
) -> None:
    view = make_view(running=make_batch())
    told = ("split/bad: division by zero",)
    spec = f"split:\n{FAILING}"
    assert decided("extends: muxwise\n" + spec, policy_text, view)[1:] == (
        "split/default",
        Split(16, 16),
        told,
    )
    with_next = decided("extends: muxwise\non_error: next\n" + spec, policy_text, view)
    assert with_next[1:] == ("split/good", Split(0, 16), told)
    policy, rule, split, errors = decided("extends: muxwise\non_error: base\n" + spec, policy_text, view)
    assert (rule, split, errors) == ("split/base/best-fit", Split(8, 8), told)
    assert policy.decide(make_view(running=make_batch(), queue=QueueView(9, 9))).rules[0] == "split/good"
    base = policy.points["split"].base
    assert base is not None
    assert base.base is None, "muxwise itself says on_error: default"


def test_without_extends_the_base_is_the_defaults(policy_text: Text, make_view: MakeView) -> None:
    _, rule, split, errors = decided(f"on_error: base\nsplit:\n{FAILING}", policy_text, make_view())
    assert (rule, split, len(errors)) == ("split/base/always", Split(16, 16), 1)


def test_a_base_that_fails_too_leaves_the_built_in_answer(policy_text: Text, make_view: MakeView) -> None:
    spec = f"extends: temporal\nslo: {{tbt: 50ms}}\non_error: base\nslice:\n{FAILING}"
    spec = spec.replace("{decode: all}", "{layers: 2}").replace("{prefill: all}", "{layers: 3}")
    policy = compile_policy(policy_text(spec))
    point = policy.points["slice"]
    assert point.base is not None
    assert [rule.label for rule in point.base.rules][-1] == "slice/base/between-steps"
    assert policy.points["split"].base is None, "the policy's rules are the base's own"
    errors: list[str] = []
    assert point.ask(object(), errors) == ("slice/default", (1, None, False))
    assert [error.split(":")[0] for error in errors] == ["slice/bad", "slice/base/cold-start"]


def test_a_sort_key_that_fails_is_told_and_follows_on_error(
    policy_text: Text, make_request: MakeRequest
) -> None:
    requests = [
        make_request(arrival_ns=2, deadline_ns=1),
        make_request(arrival_ns=1, priority=5, deadline_ns=9),
    ]
    spec = "order:\n  - {name: bad, when: queue.requests > 1, then: {by: 1 / request.priority}}\n"
    spec += "  - {name: good, then: {by: -request.priority}}\n"
    told = ("order/bad: division by zero",)
    for head, order, rule in (
        ("", (1, 0), "order/default"),
        ("on_error: next\n", (1, 0), "order/good"),
        ("extends: muxwise\non_error: base\n", (0, 1), "order/base/always"),
    ):
        answer = compile_policy(policy_text(head + spec)).order(requests, 0, {})
        assert (answer.order, answer.rule, answer.errors) == (order, rule, told)


def test_an_old_policy_is_read_as_the_new_one_it_means_and_a_warning_says_so(policy_text: Text) -> None:
    new = policy_text(
        "params: {room: {type: number, default: 4Ki}}\nlimits: {queue: 1Ki}\n"
        "split: {decode: fewest where units >= 3, prefill: rest, otherwise: {decode: all}}\n"
    )
    old = policy_text(
        "params: {room: {type: size, default: 4KiB}}\nlimits: {queue: 1KiB}\n"
        "split: {decode: {fewest: units >= 3}, prefill: rest, otherwise: {decode: all}}\n"
    ).replace("v1beta1", "v1alpha1")
    policy = compile_policy(old)
    assert (policy.params, policy.limits.queue_bound) == ({"room": 4096}, 1024)
    assert policy.points["split"].rules[0].then_text == compile_policy(new).points["split"].rules[0].then_text
    (warning,) = policy.warnings
    assert (warning.line, warning.severity, warning.code) == (1, "warning", "old-api-version")
    assert compile_policy(new).warnings == ()


def test_a_version_of_a_policy_is_a_text_and_part_of_its_identity(policy_text: Text) -> None:
    def versioned(version: str) -> str:
        return policy_text("retain: free").replace("{name: test}", f"{{name: test, version: {version}}}")

    one, two = compile_policy(versioned("1.20")), compile_policy(versioned("'1.2'"))
    assert (one.version, two.version) == ("1.20", "1.2")
    assert one.sha != two.sha
    assert compile_policy(policy_text("retain: free")).version == ""
    assert "at most 64 characters" in problems(versioned("x" * 65))[0].message
    assert "a version is a text" in problems(versioned("[1]"))[0].message


def test_the_kernel_limits_of_preemption_are_read(policy_text: Text) -> None:
    limits = compile_policy(policy_text("limits: {preemptions: 3, parked: 64MiB}")).limits
    assert (limits.preemptions, limits.parked_bytes) == (3, 64 << 20)
    assert compile_policy(policy_text("limits: {preemptions: 0}")).limits.parked_bytes == 1 << 30
    for spec, message in (
        ("limits: {preemptions: -1}", "from 0 to 1,000"),
        ("limits: {parked: 5}", "must be a size, not a number"),
        ("limits: {parked: 0.5B}", "in whole bytes"),
        ("limits: {parked: 2TiB}", "in whole bytes from 0"),
    ):
        assert message in problems(policy_text(spec))[0].message, spec
