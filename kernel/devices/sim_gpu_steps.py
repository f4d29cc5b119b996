"""Decode steps of a simulated GPU that are launched ahead of its time, each behind the one before.

Nothing runs beside them, so that the end of each follows from its launch. It is found here without what a
launch into the unknown needs: of the device's plan only the two that are in flight at the end become part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from muxk.kernel.device import StepAhead
from muxk.kernel.devices.sim_gpu_load import ItemLoad
from muxk.kernel.noise import Noise
from muxk.kernel.timeline import Job, Timeline
from muxk.kernel.token_pool import TokenPool
from muxk.kernel.work import DecodeWork, RowPages, int32_bytes, int32_values

if TYPE_CHECKING:
    from muxk.kernel.devices.sim_gpu import CostModel, HostTimes


class StepParts(NamedTuple):
    """Parts of the simulated GPU."""

    cost: CostModel
    pool: TokenPool
    timeline: Timeline
    noise: Noise
    host: HostTimes
    layers: int


class _Launched(NamedTuple):
    step_id: int
    step: StepAhead
    phases: list[tuple[float, float, float]]
    ready_ns: int
    """When the host has launched it."""


class SimSteps:
    """Implements `kernel.device.StepsAhead`. The tokens are written to the pool at the launch."""

    def __init__(
        self,
        parts: StepParts,
        newest: Job,
        tokens: bytes,
        work: DecodeWork,
        pages: RowPages | None,
        host_free_ns: int,
        units: int,
        quiet_until_ns: int,
    ) -> None:
        """`newest` is the plan of the step in flight, `work` and `tokens` what it is given and samples."""
        self._parts = parts
        self._units = units
        self._rows = work.rows
        self._context_tokens = work.context_tokens
        self._step_id = work.step_id
        self._row_steps = parts.pool.steps_behind(work, pages, tokens)
        assert newest.start_ns is not None
        assert newest.end_ns is not None
        known_ns = newest.end_ns + parts.host.wakeup_ns
        self.newest = StepAhead(newest.job_id, newest.start_ns, newest.end_ns, known_ns, int32_values(tokens))
        self.host_free_ns = host_free_ns
        """When the host has launched all of them."""
        self.quiet_until_ns = quiet_until_ns
        self._first = newest
        self._launched: list[_Launched] = []
        """The last two at most."""

    def launch(self, item_id: int, at_ns: int) -> StepAhead:
        parts = self._parts
        self._context_tokens += self._rows
        load = ItemLoad(parts.layers, self._rows, self._context_tokens, 0, 0, 0, 0, self._rows, self._rows)
        factor = parts.noise.factor(item_id)
        phases = [(ns * factor, moved, waits) for ns, moved, waits in parts.cost.phases(load, self._units)]
        begins_ns = at_ns if at_ns > self.host_free_ns else self.host_free_ns
        ready_ns = self.host_free_ns = begins_ns + parts.host.decode_launch_ns
        last_ns = self.newest.ended_ns
        start_ns = ready_ns if ready_ns > last_ns else last_ns
        end_ns = parts.timeline.end_alone(phases, start_ns, ready_ns)
        self._step_id += 1
        known_ns = end_ns + parts.host.wakeup_ns
        self.newest = StepAhead(item_id, start_ns, end_ns, known_ns, self._row_steps.step())
        self._launched = [*self._launched[-1:], _Launched(self._step_id, self.newest, phases, ready_ns)]
        return self.newest

    def committed(self) -> tuple[Job, Job]:
        """The plans of the last two, which are the device's now, as are their tokens."""
        jobs = [self._first]
        for step_id, step, phases, ready_ns in self._launched:
            job = Job(step.item_id, jobs[-1].lane, phases, ready_ns, ready_ns, (jobs[-1].job_id,))
            self._parts.timeline.plan_alone(job, step.started_ns)
            self._parts.pool.keep(step_id, step.tokens)
            jobs.append(job)
        before, last = jobs[-2:]
        self._parts.timeline.adopt((before, last))
        return before, last

    def outputs(self) -> dict[int, bytes]:
        """int32: of the steps that were launched, the last two at most, by item."""
        return {one.step.item_id: int32_bytes(list(one.step.tokens)) for one in self._launched}
