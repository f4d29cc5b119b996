"""Steps that are taken many at a time (`kernel/steady.py`) are the same steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from muxk.actors import protocol as wire
from muxk.client.cells import Cell, run_cell
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.steady import SteadyDecode
from muxk.kernel.steps_in_flight import StepsInFlight
from muxk.kernel.token_pool import FEW_ROWS
from muxk.kernel.token_steps import StepsOfMany

sys.path.append(str(Path(__file__).resolve().parent.parent / "faults"))
from test_schedule_fuzz import Schedule

SEEDS = {seed: seed % 10 == 9 for seed in range(1, 41, 2)}
"""Those of schedules on a simulated GPU, and whether some requests have a temperature."""
ONE, TWO, FOUR = "sim:a100", "sim:a100,tp=4,devices=2", "sim:a100,tp=2,devices=4"
CELLS = [
    Cell(policy="muxwise", device="sim:h200", model="qwen3-8b", workload="toolagent", requests=8, rate=2.0),
    Cell(policy="chunked", device=ONE, model="llama-3.1-8b", workload="sharegpt", requests=12, rate=4.0),
    Cell(policy="temporal", device=ONE, model="llama-3.1-8b", workload="sharegpt", requests=12, rate=4.0),
    Cell(policy="splitwise", device=TWO, model="llama-3.1-8b", workload="toolagent", requests=8, rate=2.0),
    Cell(policy="loongserve", device=FOUR, model="llama-3.1-8b", workload="toolagent", requests=8, rate=2.0),
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many steps were taken at a time, and how often."""
    counts: Counter[int] = Counter()
    commit = SteadyDecode._commit

    def counted(self: SteadyDecode, steps: StepsInFlight) -> None:
        counts[steps.ended] += 1
        commit(self, steps)

    monkeypatch.setattr(SteadyDecode, "_commit", counted)
    return counts


def one_at_a_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SteadyDecode, "run", lambda self, done, now_ns: False)


def seen(schedule: Schedule) -> dict[str, Any]:
    """All that a schedule shows, but for messages and how often somebody looked."""
    schedule.run()
    if not schedule.warm:
        schedule.check()
    server = schedule.server
    arbiter = server.runtime.actor("arbiter")
    assert isinstance(arbiter, Arbiter)
    requests = {
        name: (outcome.tokens, outcome.text, outcome.times_ns, outcome.terminal)
        for name in schedule.sent
        for outcome in [server.outcome(name, schedule.sent[name].peer)]
    }
    ends = [
        (at_ns, event)
        for at_ns, _, event in server.events
        if not isinstance(event, wire.Tokens | wire.TokenIds)
    ]
    decode, gateway = server.describe("decode"), server.describe("gateway")
    return {
        "requests": requests,
        "ends": ends,
        "idle": arbiter.idle_report(),
        "counts": server.describe("arbiter")["counts"],
        "decode": {key: decode[key] for key in ("steps", "tokens", "recomputes", "rules")},
        "gateway": gateway,
        "pool": server.describe("kv_pool"),
        "estimator": server.describe("estimator"),
    }


def schedule(seed: int, warm: bool) -> Schedule:
    return Schedule(seed, shuffled=False, as_ids=1.0, warm=warm)


def test_random_schedules_show_the_same_with_steps_taken_one_or_many_at_a_time(
    taken: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {seed: seen(schedule(seed, warm)) for seed, warm in SEEDS.items()}
    assert sum(count for steps, count in taken.items() if steps > 2) > 25, "or this shows nothing"
    with monkeypatch.context() as patch:
        one_at_a_time(patch)
        for seed, warm in SEEDS.items():
            one = seen(schedule(seed, warm))
            for what, shown in one.items():
                assert many[seed][what] == shown, (seed, what)


class Crowd(Schedule):
    """Batches that are computed as arrays, in pools that are short, full, or have plenty."""

    def _pages(self) -> int:
        return self.draw.choice([400, 900])

    def _requests(self) -> tuple[int, Sequence[int]]:
        return self.draw.randrange(30, 60), (0, 0, 0, 1)

    def _max_tokens(self) -> int:
        return self.draw.choice([100, 200, 300])


CROWDS = (3, 23, 35, 41, 55)


def test_large_batches_show_the_same_with_steps_taken_one_or_many_at_a_time(
    taken: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    step = StepsOfMany.step

    def counted(self: StepsOfMany) -> Sequence[int]:
        tokens = step(self)
        rows.append(len(tokens))
        return tokens

    monkeypatch.setattr(StepsOfMany, "step", counted)
    many = {seed: seen(Crowd(seed, shuffled=False, as_ids=1.0)) for seed in CROWDS}
    assert sum(many[seed]["decode"]["recomputes"] for seed in CROWDS) > 0, "no pool was full"
    assert len(rows) > 300, "or this shows nothing"
    assert min(rows) > FEW_ROWS
    with monkeypatch.context() as patch:
        one_at_a_time(patch)
        for seed in CROWDS:
            one = seen(Crowd(seed, shuffled=False, as_ids=1.0))
            for what, shown in one.items():
                assert many[seed][what] == shown, (seed, what)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.policy)
def test_a_study_has_the_same_figures_with_steps_taken_one_or_many_at_a_time(
    cell: Cell, taken: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = run_cell(cell)
    assert sum(steps * count for steps, count in taken.items()) > 100, "or this shows nothing"
    with monkeypatch.context() as patch:
        one_at_a_time(patch)
        one = run_cell(cell)
    assert not one.error
    assert (many.figures, many.ttft, many.tbt) == (one.figures, one.ttft, one.tbt)
