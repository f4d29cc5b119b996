"""The section `place`: how it is read, what its rules answer, and that nothing stops on it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from muxk.kernel.decider import Decider
from muxk.kernel.placing import Assign, Grow, Move, PlaceAnswer, PlaceView, Shrink
from muxk.kernel.policy import PolicyBook
from muxk.kernel.record_reader import read_recording
from muxk.kernel.recording import Recorder
from muxk.kernel.sane import ACTIONS_MAX, sane_place
from muxk.policies import placing
from muxk.policies.api import BasePolicy
from muxk.policies.engine import CompiledPolicy, compile_policy, load_policy
from muxk.policies.guarded import GuardedPolicy
from muxk.policies.problems import PolicyError
from place_views import decoding, group, request, view
from policy_views import ViewMaker

HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: p}\nspec:\n"


def policy(place: str, more: str = "") -> CompiledPolicy:
    lines = "".join(f"  {line}\n" for line in (more + f"place:\n{place}").strip().splitlines())
    return compile_policy(HEAD + lines, "p.yaml")


def where(answer: PlaceAnswer) -> list[tuple[int, int | None]]:
    return [(action.group, action.decode) for action in answer.actions if isinstance(action, Assign)]


# --- mistakes ---

RULE = "[{name: a}]"


@pytest.mark.parametrize(
    ("place", "column", "message", "hint"),
    [
        ("{}", 10, "place needs rules", "write prefill:"),
        ("[]", 10, "place must be a mapping", ""),
        ("{prefil: [{name: a}]}", 11, "unknown key 'prefil'", "did you mean 'prefill'"),
        ("{decode: [{name: a}]}", 10, "place needs rules", "write prefill:"),
        ("{decode: [{name: a}], both: [{name: b}]}", 19, "'decode' needs 'prefill'", "use both:"),
        ("{both: []}", 17, "a list of 1 to 32 rules", "write [{name: least"),
        ("{both: [{among: all}]}", 18, "a rule of both needs 'name'", ""),
        ("{both: [{name: a, among: same}]}", 35, "among must be", "'same'"),
        ("{both: [{name: a, among: decod}]}", 35, "among must be", "did you mean 'decode'"),
        ("{both: [{name: a, among: mixed}]}", 35, "among: mixed needs pools", "write pools:"),
        (
            "{both: [{name: a, where: device.wating > 0}]}",
            35,
            "'device.wating'",
            "did you mean 'device.waiting'",
        ),
        ("{both: [{name: a, where: device.waiting}]}", 35, "must be true or false", ""),
        ("{both: [{name: a, where: kv.free > 0}]}", 35, "'kv.free' is not known in place", "it is known in"),
        ("{both: [{name: a, by: []}]}", 32, "1 to 8 sort keys", ""),
        ("{both: [{name: a, by: request.class}]}", 32, "must be", "names have no order"),
        ("{both: [{name: a}, {name: a}]}", 29, "two rules named 'a'", "line 5"),
        ("{pools: {prefill: 1}, both: [{name: a}]}", 18, "pools needs 'prefill' and 'decode'", "rest"),
        ("{pools: {prefill: 1, decode: 1}, both: [{name: a}]}", 18, "must have the rest", "decode: rest"),
        ("{pools: {prefill: rest, decode: rest}, both: [{name: a}]}", 18, "must have the rest", ""),
        ("{pools: {prefill: 1.5, decode: rest}, both: [{name: a}]}", 28, "a whole number of devices", ""),
        ("{pools: {prefill: 100%, decode: rest}, both: [{name: a}]}", 28, "below 100%", ""),
        (
            "{pools: {prefill: 2s, decode: rest}, both: [{name: a}]}",
            28,
            "must be a number or a percentage",
            "",
        ),
        ("{reuse: everywhere, both: [{name: a}]}", 18, "reuse must be own or decode", ""),
    ],
)
def test_a_mistake_is_told_with_its_place_and_a_remedy(
    place: str, column: int, message: str, hint: str
) -> None:
    with pytest.raises(PolicyError) as raised:
        compile_policy(f"{HEAD}  place: {place}\n", "p.yaml")
    problem = raised.value.problems[0]
    assert (problem.file, problem.line) == ("p.yaml", 5)
    assert problem.column == column
    assert message in problem.message
    assert hint in problem.hint or hint in problem.message


def test_what_all_rules_may_cost_is_bounded() -> None:
    many = ", ".join(f"{{name: r{n}, where: device.waiting + {' + '.join('1' * 40)} > 0}}" for n in range(20))
    with pytest.raises(PolicyError, match="more than 500"):
        compile_policy(f"{HEAD}  place: {{both: [{many}]}}\n")


# --- answers ---


def test_equal_devices_are_taken_by_their_number_and_a_minus_sorts_the_other_way() -> None:
    seen = view([group(0), group(1, waiting=1), group(2, waiting=1)], [request(1)])
    assert where(policy("  both: [{name: a, by: device.waiting}]").place(seen)) == [(0, None)]
    assert where(policy("  both: [{name: a, by: -device.waiting}]").place(seen)) == [(1, None)]
    assert where(policy("  both: [{name: a, by: [-device.waiting, -device.number]}]").place(seen)) == [
        (2, None)
    ]


def test_who_has_no_device_waits_and_nobody_passes_it() -> None:
    place = "  both: [{name: short, where: request.prompt_tokens < 200, by: device.waiting}]"
    queue = [request(1, 100), request(2, 500), request(3, 100)]
    answer = policy(place).place(view([decoding(0, 1), group(1)], queue))
    assert where(answer) == [(0, None)]


def test_on_an_idle_server_the_first_goes_somewhere_whatever_the_rules_say() -> None:
    never = policy("  both: [{name: never, where: request.prompt_tokens > 10k}]")
    idle, busy = [group(0), group(1)], [decoding(0, 1), group(1)]
    assert never.place(view(idle, [request(1), request(2)])).actions == (Assign((1,), 0),)
    assert never.place(view(idle, [request(1)])).rules == ("place/default",)
    assert never.place(view(busy, [request(1)])).actions == ()


def test_a_rule_that_fails_is_told_once_and_does_not_stop_anything() -> None:
    odd, rest = "{name: odd, where: 1 / device.waiting > 0}", "{name: rest, where: device.waiting > 5}"
    place = f"  both: [{odd}, {rest}]"
    answer = policy(place).place(view([decoding(0, 1), group(1)], [request(1), request(2)]))
    assert answer.actions == (Assign((1,), 1),)
    assert answer.errors == ("place/odd: division by zero",)
    busy = [decoding(0, 1, waiting=1), group(1)]
    assert where(policy(place).place(view(busy, [request(1)]))) == [(0, None)]


def test_a_plan_that_raises_is_told_and_the_built_in_answer_is_used() -> None:
    def broken(_: PlaceView) -> PlaceAnswer:
        raise ZeroDivisionError

    plan = placing.PlanPlacing("broken", broken, load_policy("muxwise").points["split"].rules[0].mark)
    answer = plan.place(view([decoding(0, 1), group(1)], [request(1)]))
    assert answer.actions == (Assign((1,), 1),)
    assert answer.errors == ("place/broken: division by zero",)


def test_devices_that_sleep_are_no_choice() -> None:
    seen = view([group(0, ()), group(1, (0, 1))], [request(1)])
    assert where(policy("  both: [{name: a}]").place(seen)) == [(1, None)]


def test_a_policy_that_extends_one_with_a_place_has_it_until_it_says_its_own() -> None:
    extended = compile_policy(f"{HEAD}  extends: splitwise\n")
    assert (extended.devices_min, extended.fetches_prefix) == (2, True)
    own = compile_policy(f"{HEAD}  extends: splitwise\n  place: {{both: [{{name: a}}]}}\n")
    assert (own.devices_min, own.fetches_prefix) == (1, False)
    assert own.sha != extended.sha


def test_priorities_and_deadlines_that_a_rule_of_place_reads_count_as_read() -> None:
    text = "  both: [{name: a, where: request.priority < 1, by: device.waiting}]"
    assert policy(text, "order: {by: request.arrival}\n").reads_priority
    assert not policy("  both: [{name: a}]", "order: {by: request.arrival}\n").reads_priority


@pytest.mark.parametrize(
    ("pools", "least"), [("{prefill: 3, decode: rest}", 4), ("{prefill: rest, decode: 20%}", 2)]
)
def test_pools_say_how_many_devices_are_needed(pools: str, least: int) -> None:
    assert policy(f"  pools: {pools}\n  both: [{{name: a}}]").devices_min == least


# --- python ---


class Placer(BasePolicy):
    api_version = 1
    name = "placer"
    answer: Any = PlaceAnswer(())

    def place(self, view: PlaceView) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def guarded(answer: Any) -> GuardedPolicy:
    made = Placer()
    made.answer = answer
    return GuardedPolicy(made, made.base, "placer", "sha")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ValueError("no"), "ValueError: no"),
        (None, "must be a PlaceAnswer"),
        (PlaceAnswer((Assign((1,), "x"),)), "group must be a whole number"),  # type: ignore[arg-type]
        (PlaceAnswer((Assign(1, 0),)), "requests must be a tuple"),  # type: ignore[arg-type]
        (PlaceAnswer((Assign((1,), 0, keep=0),)), "keep must be 1 to"),
        (PlaceAnswer((7,)), "an action must be Assign"),  # type: ignore[arg-type]
        (PlaceAnswer(7), "actions must be a tuple"),  # type: ignore[arg-type]
        (PlaceAnswer((), 7), "rules must be a tuple"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_answer_in_python_is_told_and_the_rules_answer(answer: Any, told: str) -> None:
    seen = view([group(0), group(1)], [request(1)])
    found = guarded(answer).place(seen)
    assert found.actions == (Assign((1,), 0),)
    assert told in found.errors[0]


def test_a_python_policy_places_when_it_has_the_method_and_its_labels_are_of_place() -> None:
    right = guarded(PlaceAnswer((Assign((1,), 1), Move(0, 1), Grow(0, (1,)), Shrink(1, (0,))), ("mine",)))
    assert right.places
    assert right.place(view([group(0), group(1)], [request(1)])).rules == ("place/mine",)

    class Silent(BasePolicy):
        api_version = 1
        name = "silent"

    made = Silent()
    silent = GuardedPolicy(made, made.base, "silent", "sha")
    assert (silent.places, silent.devices_min) == (False, 1)


# --- what the kernel takes ---


def test_what_names_nothing_that_is_there_is_dropped_and_told() -> None:
    seen = view([group(0), group(1)], [request(1), request(2)])
    actions = (
        Assign((1, 1, 9), 0, (1, 7, 1)),
        Assign((1,), 1),
        Assign((2,), 5),
        Assign((2,), 1, decode=9),
        Grow(0, (8,)),
        Shrink(-1, (0,)),
        Move(0, 0),
        Move(0, 1),
    )
    sane = sane_place(PlaceAnswer(actions), seen)
    assert sane.actions == (Assign((1,), 0, (1,)), Assign((2,), 1), Move(0, 1))
    assert sane.errors == ("place: the answer names what is not there",)
    assert len(sane_place(PlaceAnswer((Move(0, 1),) * 1000), seen).actions) == ACTIONS_MAX
    stiff = msgspec.structs.replace(seen, elastic=False)
    assert sane_place(PlaceAnswer((Grow(0, (1,)), Assign((1,), 0, (1,), keep=1))), stiff).actions == (
        Assign((1,), 0),
    )


@pytest.mark.parametrize("name", ["splitwise", "loongserve"])
def test_shipped_answers_are_always_taken_as_they_are(name: str) -> None:
    shipped = load_policy(name)
    for seed in range(150):
        seen = ViewMaker(Random(seed), calm=seed % 2 == 0).place_view()
        answer = shipped.place(seen)
        assert sane_place(answer, seen) == answer, seed
        assert shipped.place(seen) == answer, seed


def test_answers_are_counted_and_noted_and_read_back_from_a_recording(tmp_path: Path) -> None:
    splitwise = load_policy("splitwise")
    book = PolicyBook()
    recorder = Recorder(tmp_path / "run", book, "1")
    book.journal.sink = recorder
    decider = Decider(book, book.add(splitwise), "placement")
    seen = view([group(0), group(1)], [request(1), request(2)])
    answer = decider.place(seen)
    decider.place(view([group(0), group(1)]))
    assert decider.counts == {"place/least-pending": 2, "place/least-memory": 2}
    recorder.close()
    [noted] = book.journal.snapshot()
    assert (noted.point, noted.view, noted.answer) == ("place", seen, answer)
    [read] = read_recording(tmp_path / "run", 9).records
    assert (read.point, read.view, read.answer) == ("place", seen, answer)
