"""When launched work on lanes that share bandwidth begins and ends.

Times are integers in ns. Between two events all rates are constant. The timeline is a plan of everything
that was launched, to its end. A new job can only change what comes after its own start, which the plan
tells: so the plan is taken back to that moment, and made anew from there. Each job keeps a log of its rates
for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from muxk.kernel.bandwidth import Sharing, rates, rates_of_two


class PhaseCost(NamedTuple):
    """A part of an item: GEMMs, attention and so on."""

    ns: float
    """When it runs alone."""
    bytes: float
    """Moved to and from memory."""
    waits: float = 1.0
    """Part of its time alone that the bytes need by themselves; 1 when it is bound by memory."""


Mark = tuple[int, int, float, float]
"""A moment at which the rate of a job changed: the time, the phase, what is left of it, the rate."""


class Job(msgspec.Struct, eq=False, gc=False):
    """A launched item on its way through a lane.

    It may start at `ready_ns`; it ends at `launched_ns`, when all of it is launched, or later.
    """

    job_id: int
    lane: int
    phases: Sequence[tuple[float, float, float]]
    """As in `PhaseCost`."""
    ready_ns: int
    launched_ns: int
    after: tuple[int, ...] = ()
    log: list[Mark] = []
    started: bool = False
    start_ns: int | None = None
    """Known once all that it waits for has a known end."""
    end_ns: int | None = None
    phase: int = 0
    left: float = 0.0
    """Of its phase at `anchor_ns`, in ns alone."""
    rate: float = 0.0
    anchor_ns: int = 0
    due_ns: int = 0
    """When its phase ends at the present rate."""
    demand: float = 0.0
    """Bytes a ns of its phase when it runs alone."""
    waits: float = 0.0
    """See `PhaseCost`."""

    def begin(self, phase: int, now_ns: int) -> None:
        """Enter a phase; after the last one it waits for the host, moving nothing. A rate must follow."""
        self.phase, self.rate, self.anchor_ns = phase, 0.0, now_ns
        if phase < len(self.phases):
            self.left, moved, self.waits = self.phases[phase]
            self.demand = moved / self.left
        else:
            self.left = self.demand = self.waits = 0.0

    def use_rate(self, rate: float, now_ns: int) -> None:
        """An unchanged rate leaves the anchor: an end that nothing disturbs stays to the nanosecond."""
        if rate == self.rate:
            return
        left = self.left - (now_ns - self.anchor_ns) * self.rate
        self.left = left = left if left > 0.0 else 0.0
        self.rate, self.anchor_ns = rate, now_ns
        self.log.append((now_ns, self.phase, left, rate))
        if left:
            self.due_ns = now_ns + math.ceil(left / rate)
        else:
            self.due_ns = self._due_ns()

    def _due_ns(self) -> int:
        if self.phase < len(self.phases):
            return self.anchor_ns + math.ceil(self.left / self.rate)
        return max(self.anchor_ns, self.launched_ns)

    def rewind(self, to_ns: int) -> None:
        """Back to how it was at a time, with the events of that moment behind it."""
        self.end_ns = None
        log = self.log
        while log and log[-1][0] > to_ns:
            log.pop()
        if not log:
            self.started = False
            self.start_ns = None
            return
        self.anchor_ns, self.phase, self.left, self.rate = log[-1]
        if self.phase < len(self.phases):
            alone_ns, moved, self.waits = self.phases[self.phase]
            self.demand = moved / alone_ns
        else:
            self.demand = self.waits = 0.0
        self.due_ns = self._due_ns()


class Timeline:
    """The plan of one device."""

    def __init__(self, sharing: Sharing, switch_ns: int) -> None:
        """`switch_ns` comes on top of the end of a job on another lane that one waits for."""
        self._sharing = sharing
        self._bandwidth = sharing.bandwidth
        self._switch_ns = switch_ns
        self._jobs: dict[int, Job] = {}
        """By id, in the order of their launches: all that may still matter to one that comes."""
        self._last: dict[int, Job] = {}
        """The last of each lane."""

    def add(self, job: Job, now_ns: int) -> list[Job]:
        """Queue a job behind those of its lane; all jobs that were planned anew, and so it."""
        before = self._last.get(job.lane)
        if before is not None:
            job.after = (*job.after, before.job_id)
        if job.ready_ns < now_ns:
            job.ready_ns = now_ns
        start_ns = self._start_of(job)
        assert start_ns is not None, "the plan goes to the end of all jobs"
        again = []
        for other in self._jobs.values():
            end_ns = other.end_ns
            if end_ns is None or end_ns > start_ns:
                again.append(other)
        self._jobs[job.job_id] = self._last[job.lane] = job
        if not again:
            self.plan_alone(job, start_ns)
            return [job]
        for other in again:
            other.rewind(start_ns)
        again.append(job)
        self._plan(again, start_ns)
        return again

    def job(self, job_id: int) -> Job:
        """One that was not forgotten."""
        return self._jobs[job_id]

    def adopt(self, jobs: Sequence[Job]) -> None:
        """Of one lane, planned alone one behind the other; all before them have ended."""
        self._jobs = {job.job_id: job for job in jobs}
        self._last = {job.lane: job for job in jobs}

    def clear(self) -> None:
        self._jobs.clear()
        self._last.clear()

    def forget(self, now_ns: int) -> list[int]:
        """Drop jobs that ended too long ago to matter to any that comes; their ids."""
        last_ns = now_ns - self._switch_ns
        jobs, gone = self._jobs, []
        for job in jobs.values():
            if (job.end_ns or 0) <= last_ns:
                gone.append(job.job_id)
        for job_id in gone:
            job = jobs.pop(job_id)
            if self._last[job.lane] is job:
                del self._last[job.lane]
        return gone

    def _start_of(self, job: Job) -> int | None:
        """When a job can start, or None while the end of one that it waits for is not known."""
        start_ns = job.ready_ns
        for other_id in job.after:
            other = self._jobs.get(other_id)
            if other is not None:
                end_ns = other.end_ns
                if end_ns is None:
                    return None
                if other.lane != job.lane:
                    end_ns += self._switch_ns
                if end_ns > start_ns:
                    start_ns = end_ns
        return start_ns

    def _plan(self, jobs: list[Job], now_ns: int) -> None:
        """Run the jobs from a time to their ends."""
        running = [job for job in jobs if job.started]
        waiting = [job for job in jobs if not job.started]
        while waiting or len(running) > 1:
            if waiting:
                waiting = self._begin(running, waiting, now_ns)
            self._share(running, now_ns)
            dues_ns = [job.due_ns for job in running]
            if waiting:
                dues_ns += [job.start_ns for job in waiting if job.start_ns is not None]
            now_ns = min(dues_ns)
            running = [job for job in running if job.due_ns > now_ns or not self._is_over(job, now_ns)]
        if running:
            self._finish(running[0], now_ns)

    def _finish(self, job: Job, now_ns: int) -> None:
        """`_plan` of the last job that runs."""
        while job.end_ns is None:
            job.use_rate(self._rate_alone(job.demand, job.waits), now_ns)
            now_ns = job.due_ns
            self._is_over(job, now_ns)

    def end_alone(self, phases: Sequence[tuple[float, float, float]], start_ns: int, launched_ns: int) -> int:
        """When a job ends beside which nothing runs: as `plan_alone`, without a plan."""
        now_ns, bandwidth = start_ns, self._bandwidth
        for alone_ns, moved, waits in phases:
            demand = moved / alone_ns
            rate = 1.0 if demand <= bandwidth else self._rate_alone(demand, waits)
            now_ns += math.ceil(alone_ns / rate)
        return now_ns if now_ns > launched_ns else launched_ns

    def plan_alone(self, job: Job, now_ns: int) -> int:
        """`_plan` of a new job beside which nothing runs, as most decode steps; when it ends."""
        job.started, job.start_ns = True, now_ns
        log, bandwidth = job.log, self._bandwidth
        for phase, (alone_ns, moved, waits) in enumerate(job.phases):
            demand = moved / alone_ns
            rate = 1.0 if demand <= bandwidth else self._rate_alone(demand, waits)
            log.append((now_ns, phase, alone_ns, rate))
            now_ns += math.ceil(alone_ns / rate)
        if now_ns < job.launched_ns:
            log.append((now_ns, len(job.phases), 0.0, 1.0))
            now_ns = job.launched_ns
        job.end_ns = now_ns
        return now_ns

    def _rate_alone(self, demand: float, waits: float) -> float:
        if demand <= self._bandwidth:
            return 1.0
        [rate] = rates([demand], [waits], self._sharing)
        return rate

    def _begin(self, running: list[Job], waiting: list[Job], now_ns: int) -> list[Job]:
        """Move jobs whose time has come from those that wait, which are returned, to those that run."""
        left = []
        for job in waiting:
            if job.start_ns is None:
                job.start_ns = self._start_of(job)
            if job.start_ns is None or job.start_ns > now_ns:
                left.append(job)
            else:
                job.started = True
                job.begin(0, now_ns)
                running.append(job)
        return left

    def _is_over(self, job: Job, now_ns: int) -> bool:
        """End a phase of the job; true when it was the last, and the host has launched everything."""
        phase = job.phase + 1
        if phase < len(job.phases) or now_ns < job.launched_ns:
            job.begin(phase, now_ns)
            return False
        job.end_ns = now_ns
        return True

    def _share(self, running: list[Job], now_ns: int) -> None:
        if len(running) == 2:
            first, second = running
            one, two = rates_of_two(first.demand, second.demand, first.waits, second.waits, self._sharing)
            first.use_rate(one, now_ns)
            second.use_rate(two, now_ns)
            return
        if len(running) == 1:
            running[0].use_rate(self._rate_alone(running[0].demand, running[0].waits), now_ns)
            return
        found = rates([job.demand for job in running], [job.waits for job in running], self._sharing)
        for job, rate in zip(running, found, strict=True):
            job.use_rate(rate, now_ns)
