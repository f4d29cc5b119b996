"""Guards: which one makes the tables, what they learn, and what policies read."""

from __future__ import annotations

import msgspec
import pytest
from muxk.actors.estimator import Estimator
from muxk.actors.guards import GUARDS, QuantileGuard, WorstCaseGuard
from muxk.actors.refs import Refs
from muxk.kernel.actor import Message
from muxk.kernel.estimates import FACTOR_STEP, Contention, DecodeModel, Estimates, PrefillModel
from muxk.kernel.messages import EstimatesChanged, ItemMeasured, ItemsMeasured, PolicyChanged
from muxk.kernel.policy import GUARDS as NAMES
from muxk.kernel.policy import PolicyBook, guard_of
from muxk.kernel.work import Phase, PrefillShape
from muxk.policies.engine import compile_policy, load_policy
from muxk.policies.problems import PolicyError

TABLE = Contention((512, 2048), (0,), (8,), (4096,), (4, 12), 16, 2, bytes([8, 16, 8, 16]))
BASE = Estimates(
    8,
    tuple(DecodeModel(units, 1e6, 0.0, 0.0, 1.0) for units in (4, 12, 16)),
    tuple(PrefillModel(units, 1e5, 0.0, 0.0, 1.0) for units in (4, 12, 16)),
    TABLE,
)
SHORT, LONG = PrefillShape(100, 0), PrefillShape(2000, 0)


def step(units: int = 4, beside: PrefillShape | None = SHORT, ratio: float = 1.0) -> ItemMeasured:
    return ItemMeasured(Phase.DECODE, units, 4, 4, 0, 1000, 8, round(1e6 * ratio), beside is not None, beside)


def test_every_name_that_a_policy_can_choose_has_a_guard() -> None:
    assert tuple(GUARDS) == NAMES


def test_the_worst_case_is_that_of_the_prefill_beside_it() -> None:
    tables = WorstCaseGuard(TABLE).guarded(BASE)
    assert tables.decode_ns(4, 4, 1000, SHORT) == 1e6 * (1 + 8 * FACTOR_STEP)
    assert tables.decode_ns(4, 4, 1000, LONG) == 1e6 * (1 + 16 * FACTOR_STEP)
    assert tables.decode_ns(4, 4, 1000) == 1e6, "alone it is as predicted"
    assert tables.decode_ns(16, 4, 1000, LONG) == 1e6, "nothing runs beside the whole device"


def test_a_cell_is_raised_by_what_was_exceeded_twice_and_never_lowered() -> None:
    guard = WorstCaseGuard(TABLE)
    guard.learn(step(ratio=1.9), 1.9)
    assert guard.guarded(BASE).decode_ns(4, 4, 1000, SHORT) < 1.2e6, "one freak says nothing"
    guard.learn(step(ratio=1.4), 1.4)
    raised = guard.guarded(BASE)
    assert 1.4e6 <= raised.decode_ns(4, 4, 1000, SHORT) < 1.42e6
    assert raised.decode_ns(4, 4, 1000, LONG) == 1.25e6, "another cell"
    assert raised.decode_ns(12, 4, 1000, SHORT) == 1.125e6, "other units"
    for _ in range(100):
        guard.learn(step(ratio=0.8), 0.8)
    assert guard.guarded(BASE) == raised


def test_a_device_that_is_slower_than_its_profile_raises_all_cells_of_its_units_while_it_is() -> None:
    guard = WorstCaseGuard(TABLE)
    for _ in range(16):
        guard.learn(step(ratio=1.35), 1.35)
        guard.tick()
    raised = guard.guarded(BASE).decode_ns(4, 4, 1000, LONG)
    assert raised == pytest.approx(1.25e6 * 1.35 / 1.125, rel=0.05), "a cell that was never seen"
    assert guard.guarded(BASE).decode_ns(12, 4, 1000, LONG) == 1.25e6, "other units"
    for _ in range(200):
        guard.tick()
    assert guard.guarded(BASE).decode_ns(4, 4, 1000, LONG) == 1.25e6
    assert guard.guarded(BASE).decode_ns(4, 4, 1000, SHORT) >= 1.35e6, "what was seen of a cell stays"


def test_the_worst_case_takes_no_notice_of_steps_that_ran_alone_or_on_everything() -> None:
    guard = WorstCaseGuard(TABLE)
    for item in (step(beside=None), step(units=16, beside=LONG)):
        for _ in range(3):
            guard.learn(item, 3.0)
    assert guard.guarded(BASE).contention == TABLE


def test_the_quantile_follows_recent_steps_and_forgets_what_is_not_measured_any_more() -> None:
    guard = QuantileGuard(BASE)
    for _ in range(64):
        guard.learn(step(ratio=1.3), 1.3)
        guard.tick()
    assert guard.guarded(BASE).decode_ns(4, 4, 1000, LONG) == pytest.approx(1.3e6)
    assert guard.guarded(BASE).decode_ns(12, 4, 1000, LONG) == pytest.approx(1e6)
    for _ in range(200):
        guard.tick()
    assert guard.guarded(BASE).decode_ns(4, 4, 1000, LONG) == pytest.approx(1e6)


class _Context:
    """What an actor sends, and nothing else."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def now_ns(self) -> int:
        return 0

    def send(self, ref: object, message: Message) -> None:
        self.sent.append(message)

    @property
    def tables(self) -> Estimates:
        return [m for m in self.sent if isinstance(m, EstimatesChanged)][-1].estimates


def estimator_with(spec: str, base: Estimates) -> tuple[Estimator, _Context, PolicyBook]:
    book = PolicyBook()
    sha = book.add(policy(spec))
    actor = Estimator(Refs(), [], 8, book, sha, base)
    context = _Context()
    actor.context = context  # type: ignore[assignment]
    actor.started()
    return actor, context, book


HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: p}\n"


def policy(spec: str) -> object:
    return compile_policy(f"{HEAD}spec: {{{spec}}}\n")


WORST = "estimator: {guard: worst_case}"


def test_a_policy_chooses_the_guard_and_a_swap_changes_it_at_once() -> None:
    actor, context, book = estimator_with(WORST, BASE)
    assert context.tables.contention == TABLE
    sha = book.add(policy("estimator: {guard: quantile}"))
    actor.on_policy_changed(PolicyChanged(sha))
    assert context.tables.contention is None
    assert actor.describe()["guard"] == {"name": "quantile"}


def test_the_guard_that_is_swapped_in_has_learnt_meanwhile() -> None:
    actor, context, book = estimator_with("estimator: {guard: quantile}", BASE)
    for _ in range(16):
        actor.on_items_measured(ItemsMeasured((step(ratio=1.6),)))
    actor.on_policy_changed(PolicyChanged(book.add(policy(WORST))))
    assert context.tables.decode_ns(4, 4, 1000, SHORT) >= 1.6e6


def test_without_a_profile_the_worst_case_is_the_quantile_and_the_state_says_so() -> None:
    actor, context, _ = estimator_with(WORST, msgspec.structs.replace(BASE, contention=None))
    for _ in range(64):
        actor.on_items_measured(ItemsMeasured((step(ratio=1.5),)))
    assert context.tables.decode_ns(4, 4, 1000, SHORT) == pytest.approx(1.5e6)
    assert actor.describe()["guard"]["name"] == "quantile"
    assert "needs a profile" in actor.describe()["guard"]["wanted"]


def test_a_guard_that_does_not_exist_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(PolicyError, match="worst_case"):
        policy("estimator: {guard: worst_cse}")
    assert guard_of(load_policy("muxwise")) == "worst_case"
    assert guard_of(compile_policy(f"{HEAD}spec: {{extends: muxwise}}\n")) == "worst_case", "inherited"
    assert guard_of(compile_policy(f"{HEAD}spec: {{}}\n")) == "quantile"
