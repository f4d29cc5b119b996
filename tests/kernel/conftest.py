"""Runs one set of actors on either runtime, so that one test asserts the same of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from muxk.kernel.actor import ActorSpec
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.supervisor import CrashReport
from muxk.kernel.trace import Trace
from muxk.kernel.virtual import VirtualRuntime

SECONDS_MAX = 20
EVENTS_MAX = 200_000

AnyRuntime = RealtimeRuntime | VirtualRuntime


@dataclass
class Outcome:
    """What is left of a run."""

    reason: str
    runtime: AnyRuntime
    trace: Trace
    reports: list[CrashReport] = field(default_factory=list)

    def recorded(self, kind: str) -> list[str]:
        """Actors of the trace records of a kind, in order."""
        return [record.actor for record in self.trace.recent(10_000) if record.kind == kind]


Run = Callable[..., Outcome]
Then = Callable[[Any], None] | None


def run_realtime(specs: Sequence[ActorSpec], then: Then = None, **options: Any) -> Outcome:
    """Run until an actor stops it; `then` is called with the runtime once it has started."""
    trace, reports = Trace(), list[CrashReport]()
    runtime = RealtimeRuntime(specs, trace=trace, report=reports.append, **options)
    reasons = []

    async def main() -> None:
        async def serve(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            reasons.append(await runtime.run(task_status=task_status))

        with anyio.fail_after(SECONDS_MAX):
            async with anyio.create_task_group() as tasks:
                await tasks.start(serve)
                if then is not None:
                    then(runtime)

    try:
        anyio.run(main)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return Outcome(reasons[0], runtime, trace, reports)


def run_virtual(specs: Sequence[ActorSpec], then: Then = None, **options: Any) -> Outcome:
    """The same in virtual time; a run that nobody stops ends with the reason `idle`."""
    trace, reports = Trace(hashed=True), list[CrashReport]()
    runtime = VirtualRuntime(specs, trace=trace, report=reports.append, **options)
    runtime.start()
    if then is not None:
        then(runtime)
    runtime.run_until_idle(EVENTS_MAX)
    return Outcome(runtime.stop_reason or "idle", runtime, trace, reports)


@pytest.fixture(params=["realtime", "virtual"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs actors until one of them stops the run."""
    return run_realtime if request.param == "realtime" else run_virtual


@pytest.fixture
def realtime() -> Run:
    """Runs actors on the realtime runtime."""
    return run_realtime
