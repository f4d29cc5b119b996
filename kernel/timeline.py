"""Queues of launched work on lanes that share bandwidth: when does each piece begin and end?

Times are integers in ns. Between two events all rates are constant. A phase keeps its anchor (a time, and the
work left then) until its rate changes, so that an end that nothing disturbs comes out the same to the
nanosecond however often it is asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from muxk.kernel.bandwidth import Sharing, rates


class PhaseCost(NamedTuple):
    """A part of an item: GEMMs, attention and so on."""

    ns: float
    """When it runs alone."""
    bytes: float
    """Moved to and from memory."""


class Job:
    """A launched item on its way through a lane."""

    __slots__ = (
        "after",
        "anchor_ns",
        "ended_ns",
        "job_id",
        "launched_ns",
        "left",
        "phase",
        "phases",
        "rate",
        "ready_ns",
        "started_ns",
    )

    def __init__(
        self, job_id: int, phases: Sequence[PhaseCost], ready_ns: int, launched_ns: int, after: Sequence[int]
    ) -> None:
        """It may start at `ready_ns`; it ends at `launched_ns`, when all of it is launched, or later."""
        self.job_id = job_id
        self.phases = phases
        self.ready_ns = ready_ns
        self.launched_ns = launched_ns
        self.after = after
        self.phase = 0
        self.left = 0.0
        self.rate = 0.0
        self.anchor_ns = 0
        self.started_ns: int | None = None
        self.ended_ns: int | None = None

    def copy(self) -> Job:
        """One whose progress is its own."""
        other = Job(self.job_id, self.phases, self.ready_ns, self.launched_ns, self.after)
        other.phase, other.left, other.rate = self.phase, self.left, self.rate
        other.anchor_ns, other.started_ns, other.ended_ns = self.anchor_ns, self.started_ns, self.ended_ns
        return other

    @property
    def demand(self) -> float:
        """Bytes a ns of the phase it is in, when it runs alone."""
        if self.phase >= len(self.phases):
            return 0.0
        cost = self.phases[self.phase]
        return cost.bytes / cost.ns

    @property
    def due_ns(self) -> int:
        """When its phase ends at the present rate."""
        if self.phase >= len(self.phases):
            return max(self.anchor_ns, self.launched_ns)
        return self.anchor_ns + math.ceil(self.left / self.rate)

    def begin_phase(self, now_ns: int) -> None:
        self.anchor_ns = now_ns
        self.rate = 0.0
        self.left = self.phases[self.phase].ns if self.phase < len(self.phases) else 0.0

    def use_rate(self, rate: float, now_ns: int) -> None:
        if rate != self.rate:
            self.left = max(0.0, self.left - (now_ns - self.anchor_ns) * self.rate)
            self.anchor_ns = now_ns
            self.rate = rate


class Timeline:
    """Lanes by number, each a queue; the head of a queue runs when it has started."""

    def __init__(self, sharing: Sharing, switch_ns: int) -> None:
        """`switch_ns` comes on top of the end of an item on another lane that one waits for."""
        self.now_ns = 0
        self._sharing = sharing
        self._switch_ns = switch_ns
        self._queues: dict[int, deque[Job]] = {}
        self._free_ns: dict[int, int] = {}
        self._ends_ns: dict[int, int] = {}
        self._open: dict[int, None] = {}

    def add(self, lane: int, job: Job) -> None:
        """Queue a job at the present time; `advance` first."""
        self._queues.setdefault(lane, deque()).append(job)
        self._open[job.job_id] = None
        self._ends_ns = {
            job_id: ns for job_id, ns in self._ends_ns.items() if ns + self._switch_ns > self.now_ns
        }

    def copy(self) -> Timeline:
        """One that can be run ahead."""
        other = Timeline(self._sharing, self._switch_ns)
        other.now_ns = self.now_ns
        other._queues = {
            lane: deque(job.copy() for job in queue) for lane, queue in self._queues.items() if queue
        }
        other._free_ns, other._ends_ns = dict(self._free_ns), dict(self._ends_ns)
        other._open = dict(self._open)
        return other

    def advance(self, until_ns: int) -> list[Job]:
        """Go on to a time; the jobs that ended by then, in the order in which they did."""
        ended: list[Job] = []
        while (due_ns := self._next_ns()) is not None and due_ns <= until_ns:
            self._step(due_ns, ended)
        self.now_ns = max(self.now_ns, until_ns)
        return ended

    def run_out(self) -> list[Job]:
        """Go on until nothing is left."""
        ended: list[Job] = []
        while (due_ns := self._next_ns()) is not None:
            self._step(due_ns, ended)
        assert not self._open, "jobs that wait for each other"
        return ended

    def clear(self) -> None:
        self._queues.clear()
        self._free_ns.clear()
        self._ends_ns.clear()
        self._open.clear()

    def _next_ns(self) -> int | None:
        next_ns: int | None = None
        for lane, queue in self._queues.items():
            if queue:
                head = queue[0]
                due_ns = self._start_ns(lane, head) if head.started_ns is None else head.due_ns
                if due_ns is not None and (next_ns is None or due_ns < next_ns):
                    next_ns = due_ns
        return next_ns

    def _start_ns(self, lane: int, job: Job) -> int | None:
        """When a head may start, or None while it waits for one that has not ended."""
        start_ns = max(job.ready_ns, self._free_ns.get(lane, 0), self.now_ns)
        for other in job.after:
            if other in self._open:
                return None
            start_ns = max(start_ns, self._ends_ns.get(other, -self._switch_ns) + self._switch_ns)
        return start_ns

    def _step(self, due_ns: int, ended: list[Job]) -> None:
        """All that happens at one moment: phases and jobs end, heads start, the bandwidth is shared."""
        self.now_ns = due_ns
        for lane, queue in self._queues.items():
            if queue and queue[0].started_ns is not None and queue[0].due_ns <= due_ns:
                self._phase_ended(lane, queue, due_ns, ended)
        for lane, queue in self._queues.items():
            if queue and queue[0].started_ns is None:
                start_ns = self._start_ns(lane, queue[0])
                if start_ns is not None and start_ns <= due_ns:
                    queue[0].started_ns = due_ns
                    queue[0].begin_phase(due_ns)
        self._share(due_ns)

    def _phase_ended(self, lane: int, queue: deque[Job], now_ns: int, ended: list[Job]) -> None:
        job = queue[0]
        job.phase += 1
        if job.phase < len(job.phases) or now_ns < job.launched_ns:
            job.begin_phase(now_ns)
            return
        job.ended_ns = now_ns
        queue.popleft()
        self._free_ns[lane] = now_ns
        self._ends_ns[job.job_id] = now_ns
        del self._open[job.job_id]
        ended.append(job)

    def _share(self, now_ns: int) -> None:
        running = [queue[0] for queue in self._queues.values() if queue and queue[0].started_ns is not None]
        found = rates([job.demand for job in running], self._sharing)
        for job, rate in zip(running, found, strict=True):
            job.use_rate(rate, now_ns)
