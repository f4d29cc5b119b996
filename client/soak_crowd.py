"""A crowd on one server: a third that behaves, a third that reads nothing, a third that is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import msgspec
from muxk.client.client import Client
from muxk.client.memory import rss_bytes
from muxk.client.server_process import ServerProcess
from muxk.client.soak_clients import Role, Seen, Work

PROCESS_CLIENTS = 350
"""Connections of one client process: each is a descriptor there, and one in the server."""
CROWDS = 3
WHOLE_S = 60.0
"""Within this the server has let go of everything after its clients left."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Gaps:
    """Between two frames of one answer, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    count: int


@dataclass(frozen=True)
class Round:
    """What one round did to the server."""

    good: Seen
    gaps: Gaps
    rss_bytes: int
    """When all clients are gone and every page is free again."""
    whole_s: float
    """How long that took."""
    aborts: int
    slow_peers: int


@dataclass(frozen=True)
class Crowd:
    """The same load of the good third: alone, among others who behave as well, in three crowds."""

    clients: int
    alone: Round
    calm: Round
    crowded: tuple[Round, ...]
    """The first of them makes the server's memory as large as such a crowd needs it."""

    @property
    def p99_ratio(self) -> float:
        """How much longer the good third waits when as many others are killed or do not read.

        Of the middle one of the rounds. Alone it waits less, for a policy such as muxwise gives decode no
        more of the device than its SLO takes as soon as prompts wait.
        """
        return median(each.gaps.p99_ms for each in self.crowded) / self.calm.gaps.p99_ms

    @property
    def growth_bytes(self) -> int:
        """Of the server's memory in the last crowd."""
        return self.crowded[-1].rss_bytes - self.crowded[-2].rss_bytes


@dataclass(frozen=True)
class Load:
    """How hard the crowd works; to be below what the device can do."""

    clients: int
    seconds: float
    """Of each of the rounds."""
    think_s: float = 30.0
    long_tokens: int = 6_000


def crowd(server: ServerProcess, load: Load, say: Say) -> Crowd:
    """The good third alone, then all of them good, then CROWDS rounds of a crowd.

    Raises ClientError, or AssertionError when pages or requests are left.
    """
    third = load.clients // 3
    good = [(Role.GOOD, third)]
    with Client(server.wait_ready()) as observer:
        alone = _round(server, observer, load, good, 0, say)
        calm = _round(server, observer, load, [(Role.GOOD, load.clients)], 0, say)
        roles = [*good, (Role.SLOW, load.clients - 2 * third)]
        crowded = tuple(_round(server, observer, load, roles, third, say) for _ in range(CROWDS))
    return Crowd(load.clients, alone, calm, crowded)


def _round(
    server: ServerProcess,
    observer: Client,
    load: Load,
    roles: Sequence[tuple[Role, int]],
    killed: int,
    say: Say,
) -> Round:
    """Start the processes, kill some of them half way, and wait until the server is whole again."""
    endpoint, seconds = server.wait_ready(), load.seconds
    with ExitStack() as stack:
        workers = [
            (work.role, _start(stack, endpoint, work))
            for role in roles
            for work in _works(load, *role, seconds)
        ]
        victims = [_start(stack, endpoint, work) for work in _works(load, Role.GOOD, killed, 10 * seconds)]
        for process in (*(process for _, process in workers), *victims):
            _line(process)
        time.sleep(seconds / 2)
        for victim in victims:
            victim.kill()
        seen = [(role, msgspec.json.decode(_line(process), type=Seen)) for role, process in workers]
    good = Seen()
    for role, part in seen:
        if role is Role.GOOD:
            _add(good, part)
    whole_s = _wait_whole(observer)
    state = observer.state()["server"]
    result = Round(
        good, _gaps(good.gaps_us), rss_bytes(server.pid), whole_s, state["aborts"], state["slow_peers"]
    )
    say(_describe(result, sum(count for _, count in roles) + killed))
    return result


def _works(load: Load, role: Role, count: int, seconds: float) -> list[Work]:
    """At most PROCESS_CLIENTS a process."""
    full, rest = divmod(count, PROCESS_CLIENTS)
    counts = [PROCESS_CLIENTS] * full + [rest] * bool(rest)
    return [Work(role, clients, seconds, load.think_s, load.long_tokens) for clients in counts]


def _start(stack: ExitStack, endpoint: str, work: Work) -> subprocess.Popen[bytes]:
    text = msgspec.json.encode(work).decode()
    command = [sys.executable, "-m", "muxk.client.soak_clients", endpoint, text]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    return process


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a client process ended early"
    return line


def _add(total: Seen, part: Seen) -> None:
    total.requests += part.requests
    total.finished += part.finished
    total.failed += part.failed
    total.tokens += part.tokens
    total.gaps_us += part.gaps_us
    total.reasons |= part.reasons


def _wait_whole(observer: Client) -> float:
    """Seconds until no request is live and no page is in use."""
    started = time.monotonic()
    while True:
        state = observer.state()
        live, used = state["server"]["live"], state["kv_pool"]["pages_used"]
        waited = time.monotonic() - started
        if live == 0 and used == 0:
            return waited
        assert waited < WHOLE_S, f"{live} requests are live and {used} pages in use after {WHOLE_S:g} s"
        time.sleep(0.05)


def _gaps(gaps_us: list[int]) -> Gaps:
    ordered = sorted(gaps_us)
    assert ordered, "the good clients were not answered"

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1000

    return Gaps(at(0.5), at(0.99), ordered[-1] / 1000, len(ordered))


def _reasons(seen: Seen) -> str:
    return "".join(f" ({count} {reason})" for reason, count in seen.reasons.items())


def _describe(result: Round, clients: int) -> str:
    gaps, good = result.gaps, result.good
    return (
        f"{clients} clients: {good.finished} of {good.requests} good requests done, "
        f"{good.failed} failed{_reasons(good)}; "
        f"gaps P50 {gaps.p50_ms:.1f} P99 {gaps.p99_ms:.1f} max {gaps.max_ms:.1f} ms; aborts {result.aborts}, "
        f"slow readers {result.slow_peers}; whole after {result.whole_s:.1f} s, "
        f"{result.rss_bytes / 2**20:.0f} MiB"
    )
