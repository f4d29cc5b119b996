"""profiler: takes the estimator's place while a device is profiled, and has the arbiter run probes.

It gets stages of measurements, one when all of the one before have ended, and hands on what each took. What
ran beside the last one has ended too when all is done: a device is not closed under work in flight.
Invariant: at most WINDOW of them are with the arbiter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from muxk.actors.refs import Refs
from muxk.kernel.actor import Actor
from muxk.kernel.messages import (
    LaneMoved,
    LaneStuck,
    ProbeDone,
    RequestsReported,
    RunProbe,
    StateReported,
)
from muxk.profiles.grid import Shape

WINDOW = 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """A shape to measure, and how."""

    shape: Shape
    layers: int
    beside: int = 0
    """Prefill probes beside it, one after the other."""
    beside_layers: int = 1


NextStage = Callable[[], Sequence[Measurement]]
"""The measurements that come next; none: all is done."""
Keep = Callable[[Measurement, int, bool], None]
"""(what, its time in ns or 0 when it failed, whether what ran beside it outlasted it)."""


@dataclass
class ProfilerState:
    waiting: deque[Measurement] = field(default_factory=deque)
    running: dict[int, Measurement] = field(default_factory=dict)
    """By the id of the probe that is measured."""
    owner: dict[int, int] = field(default_factory=dict)
    """From a probe beside another to that one."""
    ended_beside: dict[int, int] = field(default_factory=dict)
    next_id: int = 1
    done: int = 0


class Profiler(Actor):
    """One run of `muxk profile`."""

    Accepts = ProbeDone

    def __init__(self, refs: Refs, next_stage: NextStage, keep: Keep, finished: Callable[[], None]) -> None:
        self._refs = refs
        self._next_stage = next_stage
        self._keep = keep
        self._finished = finished
        self.state = ProfilerState()

    def started(self) -> None:
        self._go_on()

    def on_probe_done(self, message: ProbeDone) -> None:
        state = self.state
        main = state.owner.pop(message.probe_id, None)
        if main is not None:
            if main in state.ended_beside:
                state.ended_beside[main] += 1
            self._go_on()
            return
        measured = state.running.pop(message.probe_id)
        covered = state.ended_beside.pop(message.probe_id, 0) < measured.beside or not measured.beside
        state.done += 1
        self._keep(measured, message.elapsed_ns, covered)
        self._go_on()

    def _go_on(self) -> None:
        state = self.state
        if not state.waiting and not state.running and not state.owner:
            state.waiting.extend(self._next_stage())
            if not state.waiting:
                self._finished()
        while state.waiting and len(state.running) < WINDOW:
            self._run(state.waiting.popleft())

    def _run(self, wanted: Measurement) -> None:
        state = self.state
        main = state.next_id
        ids = range(main + 1, main + 1 + wanted.beside)
        state.next_id = ids.stop
        state.running[main] = wanted
        state.ended_beside[main] = 0
        state.owner.update(dict.fromkeys(ids, main))
        beside = tuple(wanted.shape.beside(number) for number in ids)
        probe = RunProbe(wanted.shape.probe(main), wanted.layers, beside, wanted.beside_layers)
        self.send(self._refs.arbiter, probe)

    def describe(self) -> dict[str, Any]:
        return {"done": self.state.done, "waiting": len(self.state.waiting)}


class ProfilingWatch(Actor):
    """Takes the gateway's place: hears of an item that does not end, and stops the run."""

    Accepts = StateReported | RequestsReported | LaneStuck | LaneMoved

    def on_lane_stuck(self, message: LaneStuck) -> None:
        self.stop(message.reason)

    def on_lane_moved(self, message: LaneMoved) -> None:
        """Too late."""

    def on_state_reported(self, message: StateReported) -> None:
        """Nobody asked."""

    def on_requests_reported(self, message: RequestsReported) -> None:
        """Nobody asked."""
