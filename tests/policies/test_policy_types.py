"""Types of expressions: sizes, percentages and names, beside numbers, durations and truth values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from muxk.kernel.view import PrefillView, View
from muxk.kernel.work import Split
from muxk.policies.engine import compile_policy
from muxk.policies.expressions import Expression, compile_expression
from muxk.policies.marks import whole
from muxk.policies.names import ASKED, PLACES, DecideScope, Often, vocabulary
from muxk.policies.problems import PolicyError, Problem, Report, Source
from muxk.policies.terms import Form, Term
from muxk.policies.units import Type
from muxk.policies.vocabulary import Constant

Text = Callable[[str], str]
MakeView = Callable[..., View]
MakeBatch = Callable[..., PrefillView]
CONSTANTS = {
    "slo.tbt": Constant(Type.DURATION, 100_000_000),
    "params.cap": Constant(Type.SIZE, 1 << 30),
    "params.share": Constant(Type.PERCENT, 0.25),
    "params.on": Constant(Type.BOOL, True),
}


def compiled(text: str, wanted: Type | tuple[Type, ...] = Type.ANY, place: str = "slice") -> Expression:
    report = Report()
    expression = compile_expression(
        whole(Source("p", text), text), wanted, vocabulary(place, CONSTANTS), report
    )
    report.raise_any()
    assert expression is not None
    return expression


def refusal(text: str, wanted: Type | tuple[Type, ...] = Type.ANY, place: str = "slice") -> Problem:
    with pytest.raises(PolicyError) as raised:
        compiled(text, wanted, place)
    return raised.value.problems[0]


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("4GiB", Type.SIZE, 4 << 30),
        ("512kB + 512kB", Type.SIZE, 1_024_000),
        ("0B", Type.SIZE, 0),
        ("2 * 1.5KiB", Type.SIZE, 3072),
        ("4GiB / 1MiB", Type.NUMBER, 4096),
        ("4GiB / 4", Type.SIZE, 1 << 30),
        ("5kB // 2kB", Type.NUMBER, 2),
        ("5kB % 2kB", Type.SIZE, 1000),
        ("50% * 4GiB", Type.SIZE, 2 << 30),
        ("max(1MiB, 2kB)", Type.SIZE, 1 << 20),
        ("abs(1kB - 3kB)", Type.SIZE, 2000),
        ("90%", Type.PERCENT, 0.9),
        ("90% + 5%", Type.PERCENT, 0.95),
        ("1 - 10%", Type.NUMBER, 0.9),
        ("90% * 100ms", Type.DURATION, 90_000_000),
        ("100ms / 50%", Type.DURATION, 200_000_000),
        ("50% * 50%", Type.PERCENT, 0.25),
        ("50% / 25%", Type.NUMBER, 2),
        ("min(50%, 0.2)", Type.NUMBER, 0.2),
        ("50% if params.on else 1", Type.NUMBER, 0.5),
        ("-5%", Type.PERCENT, -0.05),
        ("50% < 0.6 <= 60%", Type.BOOL, True),
        ("4Gi == 4294967296", Type.BOOL, True),
        ("params.cap > 512MiB", Type.BOOL, True),
        ("'a' == 'a'", Type.BOOL, True),
        ("""'a' != "a" or 'it is' == "it's" """, Type.BOOL, False),
        ("'a' if 1 > 2 else 'b'", Type.NAME, "b"),
    ],
)
def test_sizes_percentages_and_names_are_computed_with(text: str, type_: Type, value: object) -> None:
    expression = compiled(text)
    assert (expression.type, expression.constant) == (type_, pytest.approx(value))


@pytest.mark.parametrize(
    ("text", "column", "message", "hint"),
    [
        ("4GiB < 4", 8, "a size can not be compared with a number", "unit with B"),
        ("decode.batch > 4GiB", 16, "a number can not be compared with a size", "16k or 4Gi"),
        ("4GiB < 50ms", 8, "a size can not be compared with a duration", ""),
        ("4GiB + 50ms", 8, "a size + a duration has no meaning", ""),
        ("4GiB * 2kB", 8, "a size * a size has no meaning", ""),
        ("slo.tbt + 4", 11, "a duration + a number has no meaning", "a time needs a unit"),
        ("slo.tbt < 90%", 11, "a duration can not be compared with a percentage", ""),
        ("now < slo.tbt", 7, "a moment in time can not be compared with a duration", "now - request.arrival"),
        ("ceil(4kB)", 6, "must be a number", "unit with B"),
        ("4kb", 1, "unknown unit 'kb'", "did you mean 4kB?"),
        ("4KB", 1, "unknown unit 'KB'", "did you mean 4kB?"),
        ("4Ti", 1, "unknown unit 'Ti'", "TiB"),
        ("'a' < 'b'", 7, "names have no order for '<'", ""),
        ("'a' + 'b'", 7, "a name + a name has no meaning", ""),
        ("'a' * 10", 7, "a name * a number has no meaning", ""),
        ("'a' == 1", 8, "a name can not be compared with a number", ""),
        ("'a' and true", 1, "must be true or false, not a name", ""),
        ("min('a', 'b')", 5, "an argument of min must be", "names have no order"),
        ("'a", 1, "' is not part of the language", "ends with the quote"),
        ("'" + "a" * 65 + "' == 'a'", 1, "can not be a name", "64 characters"),
        ("'a' 'b'", 5, "an operator is missing before 'b'", ""),
        ("estimate.decode(50%)", 17, "'units' of estimate.decode must be a number", "50% * units.total"),
    ],
)
def test_types_that_do_not_mix_are_told_with_what_is_meant(
    text: str, column: int, message: str, hint: str
) -> None:
    problem = refusal(text)
    assert message in problem.message
    assert hint in problem.hint
    assert problem.column == column


def test_a_name_can_not_be_a_sort_key() -> None:
    sortable = (Type.NUMBER, Type.DURATION, Type.MOMENT, Type.SIZE, Type.PERCENT, Type.BOOL)
    assert "class.rank" in refusal("request.class", sortable, "a key of order").hint


@pytest.mark.parametrize(
    "spec",
    [
        "limits: {queue: 50%}", "limits: {backlog: 200%}", "form: {requests: 50%, tokens: 512}",
        "form: {requests: 8, tokens: 50%}", "slice: {layers: 50%}", "slice: {tokens: 10%}",
    ],
)  # fmt: skip
def test_a_percentage_is_no_count(spec: str, policy_text: Text) -> None:
    with pytest.raises(PolicyError) as raised:
        compile_policy(policy_text(spec))
    (problem,) = raised.value.problems
    assert problem.message == "this must be a number, not a percentage"
    assert "a product, such as 50% * units.total" in problem.hint


@pytest.mark.parametrize("spec", ["limits: {queue: 4GiB}", "form: {requests: 8, tokens: 16kB}"])
def test_a_size_is_no_count(spec: str, policy_text: Text) -> None:
    with pytest.raises(PolicyError) as raised:
        compile_policy(policy_text(spec))
    assert "a count has none, such as 16k or 4Gi" in raised.value.problems[0].hint


def test_a_share_of_the_units_is_rounded_up_to_a_split_but_not_by_floating_point(
    policy_text: Text, make_view: MakeView
) -> None:
    view = make_view(100)
    for share, units in (("7%", 7), ("29%", 29), ("55%", 55), ("6.1%", 7), ("0.1%", 1)):
        policy = compile_policy(policy_text(f"split: {{decode: {share}, prefill: rest}}"))
        assert policy.decide(view).split == Split(units, 100 - units), share
    policy = compile_policy(policy_text("split: {decode: units.total * 7%, prefill: rest}"))
    assert policy.decide(view).split == Split(7, 93)


def test_params_have_sizes_and_percentages(policy_text: Text, make_view: MakeView) -> None:
    spec = (
        "params:\n  room: {type: size, default: 2MiB, min: 1kB, max: 1GiB}\n"
        "  share: {type: percent, default: 25%, min: 0%, max: 100%}\n"
        "limits: {parked: 2 * params.room}\n"
        "split: {decode: params.share, prefill: rest}\n"
    )
    text = policy_text(spec)
    policy = compile_policy(text)
    assert policy.limits.parked_bytes == 4 << 20
    assert policy.decide(make_view()).split == Split(4, 12)
    assert compile_policy(text, settings={"room": "1GiB"}).limits.parked_bytes == 2 << 30
    for settings, message, hint in (
        ({"room": "5"}, "a size is expected, not '5'", "unit with B"),
        ({"room": "5s"}, "a size is expected, not '5s'", ""),
        ({"share": "5"}, "a percentage is expected, not '5'", "write 5%"),
        ({"room": "2GiB"}, "'2GiB' is above", ""),
    ):
        with pytest.raises(PolicyError) as raised:
            compile_policy(text, settings=settings)
        (problem,) = raised.value.problems
        assert message in problem.message
        assert hint in problem.hint


def test_the_bytes_of_a_batch_are_a_size(make_view: MakeView, make_batch: MakeBatch) -> None:
    scope = DecideScope(make_view(running=make_batch(parked_bytes=5000, class_rank=2)))
    assert compiled("running.bytes > 4kB and running.class_rank == 2")(scope) is True
    assert compiled("running.bytes / 1kB")(scope) == 5


def test_used_pages_are_those_that_are_not_free(make_view: MakeView) -> None:
    from muxk.kernel.view import KvView

    assert compiled("kv.used / kv.total")(DecideScope(make_view(kv=KvView(200, 150)))) == 0.25


def test_constants_that_decide_a_condition_leave_nothing_to_compute() -> None:
    for text, constant in (
        ("not params.on and decode.batch > 3", False),
        ("params.on or decode.batch > 3", True),
        ("params.on and (1 > 2 or 3 > 2)", True),
        ("4 if params.on else decode.batch", 4),
    ):
        assert compiled(text).constant == constant, text
    left = compiled("params.on and decode.batch > 3")
    assert left.constant is None
    assert left.run.__code__ is compiled("decode.batch > 3").run.__code__


def test_a_constant_later_in_a_condition_keeps_the_faults_before_it(make_view: MakeView) -> None:
    scope = DecideScope(make_view())
    assert compiled("decode.batch == 8 or 1 > 2")(scope) is True
    with pytest.raises(Exception, match="division by zero"):
        compiled("1 / queue.requests > 1 and 1 > 2")(scope)


def texts(term: Term) -> Any:
    return [term.text, *(texts(part) for part in term.parts)] if term.parts else term.text


def test_a_checked_expression_can_be_walked() -> None:
    tree = compiled("0 < decode.batch <= 8 and not estimate.decode(8) < slo.tbt * 2").tree
    assert texts(tree) == [
        "and",
        ["and", ["<", "0", "decode.batch"], ["<=", "decode.batch", "8"]],
        ["not", ["<", ["estimate.decode", "8"], ["*", "slo.tbt", "2"]]],
    ]
    comparison = tree.parts[1].parts[0]
    product = comparison.parts[1]
    assert (product.form, product.type, product.constant) == (Form.OPERATOR, Type.DURATION, 200_000_000)
    assert (comparison.parts[0].form, comparison.parts[0].offset) == (Form.CALL, 30)
    assert compiled("1 if params.on else decode.batch").tree.constant == 1


def test_what_an_expression_mentions_can_be_read_by_its_text(make_view: MakeView) -> None:
    expression = compiled("estimate.decode( decode.batch ) < slo.tbt and params.cap > 1kB")
    scope = DecideScope(make_view())
    read = {text: name.read(scope) for text, name in expression.reads.items()}
    assert read == {
        "decode.batch": 8,
        "estimate.decode( decode.batch )": 100_000_000,
        "slo.tbt": 100_000_000,
        "params.cap": 1 << 30,
    }
    assert expression.reads["estimate.decode( decode.batch )"].type is Type.DURATION


def test_every_place_says_how_often_it_is_asked_and_every_name_what_it_is() -> None:
    assert PLACES.keys() == ASKED.keys()
    for place, names in PLACES.items():
        assert ASKED[place].about
        for name, known in names.items():
            assert known.about, f"{name} of {place}"
            assert not known.needs or known.needs in names, f"{name} of {place}"
    step = {place for place, asked in ASKED.items() if asked.per is Often.STEP}
    assert step == {"split", "fewest", "preempt", "slice"}
    assert not [name for place in step for name in PLACES[place] if name.startswith(("request.", "class."))]


def test_a_sort_key_may_cost_less_than_a_condition() -> None:
    dear = " + ".join(["request.prompt_tokens"] * 60)
    assert compiled(dear, place="admit").cost > 100
    assert "for a key of order" in refusal(dear, place="a key of order").message
