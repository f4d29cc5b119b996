"""Random schedules: arrivals, aborts, short pools, slow items, policy swaps and shuffled ties, by seed.

50 schedules in a test run, half on the small simulated device and half on a simulated GPU; `make fuzz` runs
1,000. A failure names its seed, and `MUXK_SCHEDULE_SEED=<seed> MUXK_SCHEDULES=1` repeats it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from checked_pool import CheckedPool, checked_server
from muxk.actors import protocol as wire
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.bandwidth import Sharing
from muxk.kernel.devices.sim import END_EVERY, SimCosts, SimDevice
from muxk.kernel.devices.sim_gpu import HostTimes, SimGpu, SimGpuOptions
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.idle import Busy, Cause
from muxk.kernel.timeline import PhaseCost
from muxk.kernel.work import PAGE_SIZE, Item
from muxk.policies.engine import compile_policy
from virtual_server import MS, S, VirtualServer, expected_tokens

SCHEDULES = int(os.environ.get("MUXK_SCHEDULES", "50"))
FIRST_SEED = int(os.environ.get("MUXK_SCHEDULE_SEED", "0"))
MUST_HAPPEN = (
    *("recomputes", "aborts", "preemptions", "policy swaps", "fused steps", "split changes"),
    *("no work", "no pages", "launch", "drain", "merge wait", "over-reservation", "host"),
)
"""Or the schedules show nothing."""
POLICIES = ("muxwise", "chunked", "temporal", "inflight", "static_split")
PEERS = 4
UNEXPLAINED_MAX = 0.01
"""Share of the idle time that may have none of the ledger's causes."""
PARKING = (
    ", preempt: [{name: any, when: running.depth == 0, then: park}, {name: no, then: continue}]"
    ", form: {requests: 1, tokens: 4096}"
)
SHARED_PROMPT = [97 + i % 26 for i in range(48)]


class SlowSim(SimDevice):
    """Some items take up to 40 times as long."""

    def __init__(self, chance: Random, share: float, **more: Any) -> None:
        super().__init__(**more)
        self._chance, self._share = chance, share

    def _cost_ns(self, item: Item, units: int) -> int:
        return round(super()._cost_ns(item, units) * slowdown(self._chance, self._share))


class SlowCost:
    """Made-up times of a GPU, some of which are up to 40 times as long."""

    layers = 4

    def __init__(self, chance: Random, share: float, units: int) -> None:
        self.units = units
        self._chance, self._share = chance, share

    def phases(self, load: ItemLoad, units: int) -> Sequence[PhaseCost]:
        rows_ns = 2e3 * load.layers * (load.decode_rows + load.chunk_tokens) * self.units / units
        ns = (1e5 * load.layers + rows_ns) * slowdown(self._chance, self._share)
        return [PhaseCost(ns, ns * 0.4), PhaseCost(ns * 0.3, ns * 0.3 * self._chance.random())]


def slowdown(chance: Random, share: float) -> float:
    return chance.uniform(2, 40) if chance.random() < share else 1.0


@dataclass
class Sent:
    """A request and what its client may rely on."""

    peer: bytes
    fields: dict[str, Any]
    at_ns: int
    ended_by_client: bool = False
    leaves: bool = False


@dataclass
class Schedule:
    """One seed."""

    seed: int
    shuffled: bool = True
    """Now and then the ties of one moment are."""
    as_ids: float = 0.7
    """Share of the requests on a GPU without text: their steps are taken many at a time."""
    warm: bool = False
    """Tokens of some requests on a GPU are drawn; what they are to be is not known then."""
    sent: dict[str, Sent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = Random(self.seed)
        self.on_gpu = self.seed % 2 == 1
        self.server, self.pool = self._open()

    def _open(self) -> tuple[VirtualServer, CheckedPool]:
        draw = self.draw
        pages = self._pages()
        slow = draw.choice([0.0, 0.02, 0.2])
        chance = Random(self.seed + 1)
        device = self._gpu(chance, slow, pages) if self.on_gpu else self._sim(chance, slow, pages)
        return checked_server(
            compile_policy(self._policy("first")),
            device=device,
            kv_tokens=pages * PAGE_SIZE,
            seed=self.seed,
            jitter=draw.random() < 0.7 and self.shuffled,
            calibrate=draw.random() < 0.1,
        )

    def _pages(self) -> int:
        """A pool in which one request at a time fits, some do, or all."""
        return self.draw.choice([8, 12, 20, 128])

    def _sim(self, chance: Random, slow: float, pages: int) -> SimDevice:
        costs = SimCosts(launch_ns=20_000, decode_base_ns=800_000, decode_row_ns=20_000)
        units = self.draw.choice([1, 2, 8, 13])
        return SlowSim(chance, slow, units=units, layers=4, pages=pages + 1, costs=costs)

    def _gpu(self, chance: Random, slow: float, pages: int) -> SimGpu:
        host = HostTimes(self.draw.choice([0, 500_000]), self.draw.choice([0, 20_000]), 15_000, 10_000)
        sharing = Sharing(bandwidth=0.8, interference=0.1, slowdown_max=0.3)
        options = SimGpuOptions(
            "sim:fuzz", pages + 1, sharing, host, noise=0.05, seed=self.seed, end_every=END_EVERY
        )
        return SimGpu(SlowCost(chance, slow, self.draw.choice([32, 132])), options)

    # --- what happens ---

    def run(self) -> None:
        at_ns = S
        count, apart = self._requests()
        for number in range(count):
            at_ns += self.draw.choice(apart) * MS // 2
            self._submit(f"r{number}", at_ns)
            if self.draw.random() < 0.15:
                self._swap(at_ns + self.draw.randrange(40) * MS)
        self._end_some()
        self.server.run_until(at_ns + 400 * S)

    def _requests(self) -> tuple[int, Sequence[int]]:
        """How many, and half milliseconds between two, of which one is drawn each time."""
        return self.draw.randrange(8, 18), (0, 0, 1, 1, 2, 60)

    def _max_tokens(self) -> int:
        return self.draw.choice([1, 2, 5, 20, 40])

    def _submit(self, name: str, at_ns: int) -> None:
        draw = self.draw
        shared = SHARED_PROMPT[: draw.choice([0, 0, 16, 33, 48])]
        fields = {
            "prompt_token_ids": shared + [97 + draw.randrange(26) for _ in range(draw.randrange(1, 40))],
            "max_tokens": self._max_tokens(),
            "temperature": 0.0 if self.on_gpu and not self.warm else draw.choice([0.0, 0.8]),
            "seed": draw.randrange(1000),
            "ignore_eos": True,
            "detokenize": not (self.on_gpu and draw.random() < self.as_ids),
        }
        peer = b"p%d" % draw.randrange(PEERS)
        self.sent[name] = Sent(peer, fields, at_ns)
        self.server.submit(at_ns, name, peer, **fields)

    def _swap(self, at_ns: int) -> None:
        self.server.send(at_ns, wire.SwapPolicy(self._policy(f"at-{at_ns}"), "fuzz.yaml"))

    def _policy(self, name: str) -> str:
        """A shipped one with other limits, and now and then one that parks whatever it can."""
        draw = self.draw
        limits = f"backlog: {draw.randrange(1, 5)}, decode_ahead: {draw.randrange(2)}"
        rules = draw.choice(["", "", PARKING])
        return (
            f"{{apiVersion: muxk/v1beta1, kind: SchedulingPolicy, metadata: {{name: {name}}}, "
            f"spec: {{extends: {draw.choice(POLICIES)}, limits: {{{limits}}}{rules}}}}}"
        )

    def _end_some(self) -> None:
        """Aborts, some of them twice, and a client that vanishes."""
        for name, one in self.sent.items():
            if self.draw.random() < 0.25:
                one.ended_by_client = True
                at_ns = one.at_ns + self.draw.randrange(120) * MS
                for _ in range(self.draw.choice([1, 1, 2])):
                    self.server.abort(at_ns, name, one.peer)
        if self.draw.random() < 0.3:
            at_ns = max(one.at_ns for one in self.sent.values()) + self.draw.randrange(60) * MS
            self.server.leave(at_ns, b"p0")
            for one in self.sent.values():
                one.leaves = one.peer == b"p0"

    # --- what must hold ---

    def check(self) -> None:
        server = self.server
        server.check_whole()
        assert server.runtime.actor("kv_pool") is self.pool, "the engine was rebuilt"
        assert self.pool.checks > 0
        for name, one in self.sent.items():
            self._check_request(name, one)
        for _, _, event in server.events:
            assert not isinstance(event, wire.PolicySwapped) or event.accepted, event.report
        self._check_time()

    def _check_request(self, name: str, one: Sent) -> None:
        """One terminal event, and the tokens that a schedule can not change, all or the first of them."""
        outcome, fields = self.server.outcome(name, one.peer), one.fields
        assert len(outcome.terminal) == 1 or (one.leaves and not outcome.terminal), (name, outcome.terminal)
        wanted = expected_tokens(
            fields["prompt_token_ids"],
            fields["max_tokens"],
            seed=fields["seed"],
            temperature=fields["temperature"],
        )
        assert outcome.tokens == wanted[: len(outcome.tokens)], name
        if not outcome.terminal:
            return
        [end] = outcome.terminal
        if isinstance(end, wire.Finished) and end.finish_reason != "abort":
            assert outcome.tokens == wanted, name
            return
        assert one.ended_by_client or self._never_fits(fields), (name, end)

    def _never_fits(self, fields: dict[str, Any]) -> bool:
        return len(fields["prompt_token_ids"]) + fields["max_tokens"] > self.pool.state.pool.total * PAGE_SIZE

    def happened(self) -> Counter[str]:
        """How often what the schedules are for came about."""
        described = {actor: self.server.describe(actor) for actor in ("arbiter", "decode", "gateway")}
        idle = self.server.runtime.actor("arbiter")
        assert isinstance(idle, Arbiter)
        return Counter(
            described["arbiter"]["counts"]
            | {"recomputes": described["decode"]["recomputes"], "aborts": described["gateway"]["aborts"]}
            | {cause.value: bubbles.count for cause, bubbles in idle.idle_report().idle.items()}
        )

    def _check_time(self) -> None:
        arbiter = self.server.runtime.actor("arbiter")
        assert isinstance(arbiter, Arbiter)
        report = arbiter.idle_report()
        assert report.booked_unit_ns == report.total_unit_ns
        assert report.total_unit_ns == self.server.runtime.now_ns() * self.server.device.units
        assert report.open_unit_ns == 0
        assert report.busy[Busy.PREFILL] + report.busy[Busy.FUSED] > 0
        idle = [bubbles.total_unit_ns for cause, bubbles in report.idle.items() if cause is not Cause.NO_WORK]
        assert min(idle) >= 0
        assert report.idle[Cause.UNEXPLAINED].total_unit_ns <= UNEXPLAINED_MAX * sum(idle)


def run_schedules(seeds: range) -> tuple[dict[int, str], Counter[str]]:
    """What went wrong, by seed, and what happened in all of them."""
    wrong: dict[int, str] = {}
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            schedule = Schedule(seed)
            schedule.run()
            schedule.check()
        except Exception as error:
            wrong[seed] = f"{type(error).__name__}: {error}"
        else:
            happened += schedule.happened()
        if (seed + 1 - seeds.start) % 100 == 0:
            print(f"{seed + 1 - seeds.start:,} schedules, {len(wrong)} wrong", flush=True)
    return wrong, happened


def test_random_schedules_keep_pages_tokens_ends_and_the_account_of_time() -> None:
    wrong, happened = run_schedules(range(FIRST_SEED, FIRST_SEED + SCHEDULES))
    assert wrong == {}
    if SCHEDULES >= 50:
        assert [what for what in MUST_HAPPEN if not happened[what]] == []
