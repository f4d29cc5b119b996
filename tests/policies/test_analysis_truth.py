"""Warnings of policies: nothing is told that is not so."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, View
from muxk.kernel.work import Split
from muxk.policies.checking import CheckedPolicy, check_policy
from muxk.policies.engine import compile_policy
from muxk.policies.formulas import Budget, Numbers, Words, contradictory
from policy_texts import split

MS = 1_000_000
NAMES = ("decode.batch", "queue.requests", "kv.free", "kv.total", "prefill.in_flight", "units.total")
FLAGS = ("decode.waiting", "running.active", "candidate.waiting", "candidate.fits", "prefill.pending")
small = st.integers(0, 4).map(str)
values = st.one_of(
    st.sampled_from(NAMES),
    st.builds("{} + {}".format, st.sampled_from(NAMES), small),
    st.builds("{} - {}".format, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.builds("{} * {}".format, small, st.sampled_from(NAMES)),
    st.builds("min({}, {})".format, st.sampled_from(NAMES), small),
    st.builds("clamp({}, 1, {})".format, st.sampled_from(NAMES), small),
    st.builds("({} if {} else {})".format, small, st.sampled_from(FLAGS), st.sampled_from(NAMES)),
    st.just("10 / queue.requests"),
    st.just("params.n"),
    st.just("vars.two"),
)
SHARES = st.sampled_from(["50% * kv.total", "kv.total * 0.25"])
signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
batches = st.builds("running.depth {} {}".format, signs, small)
atoms = st.one_of(
    st.builds("{} {} {}".format, values, signs, small),
    st.builds("{} {} {}".format, values, signs, values),
    st.builds(
        "{} {} {}".format,
        st.sampled_from(NAMES),
        signs,
        SHARES,
    ),
    st.builds("{} <= {} < {}".format, small, st.sampled_from(NAMES), small),
    st.sampled_from(FLAGS),
    st.builds("{} {} {}ms".format, st.just("decode.idle"), signs, small),
    batches,
)
conditions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + " and ".join(parts) + ")"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + " or ".join(parts) + ")"),
        inner.map("not ({})".format),
        st.builds("({}) == ({})".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, st.sampled_from(FLAGS), inner),
    ),
    max_leaves=6,
)
MORE = "params: {n: {type: number, default: 2, min: 1, max: 3}}\nvariables: {two: 2 * decode.batch}"


def batch(dice: random.Random) -> PrefillView:
    return PrefillView(1, 1, dice.randint(0, 40), 0, 10, 3, 0, 10 * MS, dice.randint(0, 2), 0)


def some_views(count: int, seed: int) -> list[View]:
    """Views with small numbers, so that comparisons hit their edges."""
    dice = random.Random(seed)
    estimates = Estimates(4, (DecodeModel(1, 1e6, 1.0, 1.0, 1.0),), (PrefillModel(1, 1e5, 1.0, 1.0, 1.0),))
    found = []
    for _ in range(count):
        total = dice.randint(1, 4)
        units = dice.randint(1, 4)
        decode = DecodeView(dice.randint(0, 4), 4, dice.random() < 0.5, False, dice.randint(0, 4) * MS)
        batches = [batch(dice) if dice.random() < 0.5 else None for _ in range(3)]
        found.append(
            View(
                100 * MS, units, tuple(Split(n, units - n) for n in range(1, units)), Split(units, units), 4,
                decode, *batches, dice.randint(0, 4), QueueView(dice.randint(0, 4), dice.randint(0, 40)),
                KvView(total, dice.randint(0, total)), estimates,
            )
        )  # fmt: skip
    return found


VIEWS = some_views(100, 7)


def fired(checked: CheckedPolicy) -> list[str]:
    """The rule of split that answers each view."""
    assert checked.policy is not None
    return [checked.policy.decide(view).rules[0] for view in VIEWS]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(conditions, min_size=1, max_size=4), st.sampled_from(["default", "next", "base"]), st.booleans()
)
def test_a_rule_that_is_told_never_to_match_never_answers(
    rules: list[str], on_error: str, extends: bool
) -> None:
    more = f"{MORE}\non_error: {on_error}" + ("\nextends: muxwise" if extends else "")
    for n in ("1", "3"):
        checked = check_policy(split(*rules, more=more), settings={"n": n})
        answers = fired(checked)
        for problem in checked.problems:
            rule = "last" if problem.line == 6 + len(rules) else f"r{problem.line - 6}"
            if problem.code in ("never-true", "unreachable-rule", "switched-off"):
                assert f"split/{rule}" not in answers, problem
            if problem.code == "always-true":
                later = [f"split/r{i}" for i in range(problem.line - 5, len(rules))]
                assert not any(answer in [*later, "split/last"] for answer in answers), problem


def answers_of(condition: str) -> list[Any]:
    compiled = compile_policy(split(condition, more=MORE))
    return [compiled.decide(view).rules[0] for view in VIEWS]


@settings(max_examples=60, deadline=None)
@given(st.lists(atoms.filter(lambda atom: atom.count("<") < 2), min_size=2, max_size=4), st.booleans())
def test_a_part_that_is_told_never_to_matter_can_go(parts: list[str], is_and: bool) -> None:
    word = " and " if is_and else " or "
    offsets = [len(word.join([*parts[:i], ""])) for i in range(len(parts))]
    whole = word.join(parts)
    found = check_policy(split(whole, more=MORE)).problems
    idle = [problem.column for problem in found if problem.code == "redundant-condition"]
    kept = [part for part, offset in zip(parts, offsets, strict=True) if offset + 25 not in idle]
    pairs = zip(answers_of(whole), answers_of(word.join(kept)), strict=True)
    assert all(a == b for a, b in pairs if "split/default" not in (a, b))


@settings(max_examples=60, deadline=None)
@given(conditions)
def test_a_batch_without_a_warning_is_never_absent(condition: str) -> None:
    checked = check_policy(split(condition, more=MORE))
    if "unguarded-batch" not in [problem.code for problem in checked.problems]:
        assert checked.policy is not None
        errors = [error for view in VIEWS for error in checked.policy.decide(view).errors]
        assert not any("absent" in error for error in errors)


def test_the_views_reach_the_edges() -> None:
    hit: Callable[[str], bool] = lambda when: "split/r0" in fired(check_policy(split(when)))  # noqa: E731
    assert all(hit(f"{name} == {value}") for name in NAMES[:3] for value in (0, 1, 3))
    assert hit("running.active and running.depth == 2")
    assert len({msgspec.json.encode(view) for view in VIEWS}) > 60


def test_domains_know_their_ends() -> None:
    whole = Numbers(low=0, whole=True)
    assert whole.meet("<", 1) == Numbers(0, 0, whole=True)
    assert whole.meet("!=", 0).meet("<=", 1).meet("!=", 1) is None  # type: ignore[union-attr]
    assert Numbers(low=0).meet("<", 1) is not None
    assert Numbers().meet(">=", 3).meet("<=", 3).meet("!=", 3) is None  # type: ignore[union-attr]
    assert Words(("a", "b")).meet("!=", "a").meet("!=", "b") is None  # type: ignore[union-attr]
    assert Words().meet("!=", "a") is not None


def test_a_question_that_takes_too_long_counts_as_possible() -> None:
    budget = Budget(0)
    assert not contradictory([], budget)


def test_every_code_is_documented() -> None:
    root = Path(__file__).parents[2]
    sources = [
        (root / "policies" / f"{name}.py").read_text("utf-8") for name in ("analysis", "rule_analysis")
    ]
    found = {code for source in sources for code in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', source)}
    text = (root / "docs" / "warnings.md").read_text(encoding="utf-8")
    assert len(found) > 8
    assert [code for code in sorted(found) if f"`{code}`" not in text] == []
