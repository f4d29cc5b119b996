"""Random schedules on several devices, by seed: policies that place, swaps between them, aborts and crashes.

Devices are lent and come back, KV moves both ways, pools are short, ties are shuffled. A few schedules in a
test run; `make fuzz` runs as many as MUXK_SCHEDULES says. A failure names its seed, and
`MUXK_SCHEDULE_SEED=<seed> MUXK_SCHEDULES=1` repeats it.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from checked_pool import CheckedPool
from cluster import RandomPlaces, cluster_server, gpu_tokens
from muxk.actors import engine
from muxk.actors import protocol as wire
from muxk.actors.placement import Placement
from muxk.kernel.actor import Ref
from muxk.kernel.devices.sim_gpu import SimGpu
from muxk.kernel.link import MigrationDone
from muxk.kernel.messages import PrefillDone
from muxk.policies.shipped_files import shipped_text
from virtual_server import MS, S

SCHEDULES = int(os.environ.get("MUXK_SCHEDULES", "10"))
FIRST_SEED = int(os.environ.get("MUXK_SCHEDULE_SEED", "38"))
"""From there on ten schedules have all that must happen."""
POLICIES = ("splitwise", "loongserve", "muxwise")
MUST_HAPPEN = ("moved", "fetched", "lent", "swaps", "crashes", "aborts", "recomputes", "stopped", "spread")
"""Or the schedules show nothing."""
SHARED = [97 + i * 7 % 26 for i in range(96)]
PEERS = 3
MIGRATION: Ref[Any] = Ref("migration")
LATE_NS, LAST_SWAP_NS = 10 * S, 20 * S
"""After all crashes and aborts, requests that have to be served."""
END_NS = 80 * S


@dataclass
class Sent:
    """A request and what its client may rely on."""

    peer: bytes
    prompt: list[int]
    max_tokens: int
    at_ns: int
    stop: str | None = None
    ended_by_client: bool = False


@dataclass
class Schedule:
    """One seed."""

    seed: int
    sent: dict[str, Sent] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.draw = draw = Random(self.seed)
        self.devices = draw.choice([2, 2, 3, 4])
        self.kv_tokens = draw.choice([320, 480, 1600])
        # Contexts longer than one pool, under policies that spread them most of the time.
        self.spreads = self.kv_tokens < 1000 and draw.random() < 0.6
        named = "loongserve" if self.spreads else draw.choice(POLICIES)
        self.crash_ns: int | None = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "KvPool", CheckedPool)
            self.server = cluster_server(
                RandomPlaces(self.seed, fetches=True) if draw.random() < 0.5 else named,
                devices=self.devices,
                kv_tokens=self.kv_tokens,
                seed=self.seed,
                jitter=draw.random() < 0.7,
            )
            self._let_happen()
            # Within the patch: a crash builds new pools.
            self.server.run_until(END_NS)

    # --- what happens ---

    def _let_happen(self) -> None:
        draw, at_ns = self.draw, S
        for number in range(draw.randrange(8, 20)):
            at_ns += draw.choice([0, 0, 1, 5, 30]) * MS
            self._submit(f"r{number}", at_ns)
            if draw.random() < (0.05 if self.spreads else 0.2):
                self._swap(at_ns + draw.randrange(40) * MS, draw.choice(POLICIES))
        for name, one in self.sent.items():
            if draw.random() < 0.25:
                one.ended_by_client = True
                for _ in range(draw.choice([1, 1, 2])):
                    self.server.abort(one.at_ns + draw.randrange(150) * MS, name, one.peer)
        if draw.random() < 0.3:
            self._crash(S + draw.randrange(200) * MS)
        if draw.random() < 0.3:
            self.server.leave(S + draw.randrange(200) * MS, b"p0")
            for one in self.sent.values():
                one.ended_by_client = one.ended_by_client or one.peer == b"p0"
        self._swap(LAST_SWAP_NS, "muxwise")
        for number in range(3):
            self._submit(f"late{number}", LATE_NS + number * MS)

    def _submit(self, name: str, at_ns: int) -> None:
        draw = self.draw
        longest = draw.choice([20, 60, 220])
        if self.spreads and draw.random() < 0.4:
            longest = (self.devices + 1) * self.kv_tokens
        own = [97 + draw.randrange(26) for _ in range(draw.randrange(1, longest))]
        prompt = SHARED[: draw.choice([0, 16, 50, 96])] + own
        one = Sent(b"p%d" % draw.randrange(PEERS), prompt, draw.choice([1, 2, 8, 40, 140]), at_ns)
        if draw.random() < 0.3:
            one.stop = chr(97 + draw.randrange(26))
        self.sent[name] = one
        self.server.submit(
            at_ns,
            name,
            one.peer,
            prompt_token_ids=prompt,
            max_tokens=one.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            stop=[] if one.stop is None else [one.stop],
            detokenize=one.stop is not None or draw.random() < 0.5,
            n=draw.choice([1, 1, 1, 2]),
        )

    def _swap(self, at_ns: int, policy: str) -> None:
        self.happened["swaps"] += 1
        self.server.send(at_ns, wire.SwapPolicy(shipped_text(policy), f"{policy}.yaml"))

    def _crash(self, at_ns: int) -> None:
        self.crash_ns = at_ns
        self.happened["crashes"] += 1
        group = self.draw.randrange(self.devices)
        victim: Ref[Any] = Ref(f"prefill@{group}")
        self.server.runtime.inject(victim, PrefillDone(999, b"", 0, False), at_ns)
        late = MigrationDone(self.draw.randrange(1, 30), 0, 1)
        self.server.runtime.inject(MIGRATION, late, at_ns + self.draw.randrange(1, 10) * MS)

    # --- what must hold ---

    def check(self) -> None:
        self.server.check_whole()
        for _, _, event in self.server.events:
            assert not isinstance(event, wire.PolicySwapped) or event.accepted, event.report
        for name, one in self.sent.items():
            self._check_request(name, one)
        self._check_devices()
        self._count()

    def _check_request(self, name: str, one: Sent) -> None:
        """One terminal event, and its own tokens: all, the first of them, or those up to its stop string."""
        outcome = self.server.outcome(name, one.peer)
        gone = one.peer == b"p0" and not outcome.terminal
        assert len(outcome.terminal) == 1 or gone, (name, outcome.terminal)
        wanted = gpu_tokens(one.prompt, one.max_tokens)
        assert outcome.tokens == wanted[: len(outcome.tokens)], name
        if gone:
            return
        [end] = outcome.terminal
        if isinstance(end, wire.Finished) and end.finish_reason != "abort":
            stops = one.stop is not None and ord(one.stop) in wanted
            assert end.finish_reason == ("stop" if stops else "length"), name
            length = wanted.index(ord(one.stop)) + 1 if stops and one.stop else one.max_tokens
            assert len(outcome.tokens) == length, name
            return
        crashed = self.crash_ns is not None and one.at_ns <= self.crash_ns
        # Longer than one pool, it is served or refused as the policies have it that are in force meanwhile.
        refused = isinstance(end, wire.Failed) and end.code in ("never_fits", "invalid")
        assert one.ended_by_client or crashed or (refused and self._is_long(one)), (name, end)

    def _is_long(self, one: Sent) -> bool:
        return len(one.prompt) + one.max_tokens > self.kv_tokens

    def _check_devices(self) -> None:
        """Whoever was lent is back: each device is a group of its own again, and as wide as one."""
        groups = self.server.describe("placement")["groups"]
        assert [group["devices"] for group in groups] == [[number] for number in range(self.devices)]
        assert self.server.backend.cluster is not None
        for number, device in enumerate(self.server.backend.cluster.devices):
            assert isinstance(device, SimGpu)
            assert device.width == 1, number
            pool = self.server.runtime.actor(f"kv_pool@{number}")
            assert isinstance(pool, CheckedPool)
            assert pool.state.pool.total == self.kv_tokens // 16
            assert pool.state.pool.expected == 0, "a prefix is kept for a request that has ended"

    def _count(self) -> None:
        migration = self.server.describe("migration")
        placement = self.server.runtime.actor("placement")
        assert isinstance(placement, Placement)
        self.happened["moved"] += migration["requests"]
        self.happened["fetched"] += migration["fetches"]
        self.happened["lent"] += placement.state.counts["grow"]
        self.happened["aborts"] += self.server.describe("gateway")["aborts"]
        for group in range(self.devices):
            self.happened["recomputes"] += self.server.describe(f"decode@{group}")["recomputes"]
        self.happened["spread"] += sum(
            self._is_long(one) and len(self.server.outcome(name, one.peer).tokens) == one.max_tokens
            for name, one in self.sent.items()
        )
        ends = [outcome.terminal for outcome in self.server.outcomes.values()]
        self.happened["stopped"] += sum(
            isinstance(end, wire.Finished) and end.finish_reason == "stop" for [end] in filter(None, ends)
        )


def run_schedules(seeds: range) -> tuple[dict[int, str], Counter[str]]:
    """What went wrong, by seed, and what happened in all of them."""
    wrong: dict[int, str] = {}
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            schedule = Schedule(seed)
            schedule.check()
        except Exception as error:
            wrong[seed] = f"{type(error).__name__}: {error}"
        else:
            happened += schedule.happened
    return wrong, happened


def test_random_schedules_on_several_devices_keep_pages_tokens_ends_and_devices() -> None:
    wrong, happened = run_schedules(range(FIRST_SEED, FIRST_SEED + SCHEDULES))
    assert wrong == {}
    if SCHEDULES >= 10:
        assert [what for what in MUST_HAPPEN if not happened[what]] == []
