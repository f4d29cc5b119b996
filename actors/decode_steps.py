"""The decode steps between their submission and their end, as the decode actor counts them."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.actors.decode_batch import DecodeBatch, Submitted
from muxk.kernel.messages import MoreSteps, StepsRan
from muxk.kernel.work import DecodeWork

ON_LANES_MAX = 2


@dataclass
class Step:
    """A decode step that was submitted and has not ended."""

    versions: dict[int, Submitted] = field(default_factory=dict)
    """What was submitted of it, each replacing the one before unless that is launched already."""
    launched: int | None = None
    """The version that the arbiter said is on a lane; the others are gone then."""


@dataclass
class Steps:
    """Steps in flight, oldest first: those on lanes, and at most one behind them that waits.

    The host knows all tokens but those of steps on lanes. A step is only submitted while at most one is
    known to be there, so that each of its rows lacks at most one token.
    """

    newest: int = 0
    outstanding: dict[int, Step] = field(default_factory=dict)
    on_lanes: list[int] = field(default_factory=list)
    """Steps that are known to be launched."""
    granted: int = 0
    """`SubmitDecode.more` of the newest step, as far as it holds."""

    @property
    def waiting(self) -> Step | None:
        """The step of which a newer version may still be taken."""
        step = self.outstanding.get(self.newest)
        return None if step is None or step.launched is not None else step

    def is_oldest(self, step_id: int) -> bool:
        """All steps before it have ended."""
        return step_id == next(iter(self.outstanding))

    def running(self, decode_running: bool) -> int | None:
        """The newest step on a lane: no row that joins now is in it.

        `decode_running` is what the arbiter says, for devices where it does not tell of launches.
        """
        if self.on_lanes:
            return self.on_lanes[-1]
        return next(iter(self.outstanding)) if decode_running and self.outstanding else None

    def submit(self, batch: DecodeBatch) -> Submitted | None:
        """A newer version of the step that waits, or the first one of the next; None when no row is ready."""
        step = self.outstanding.get(self.newest)
        if step is None or step.launched is not None:
            if len(self.on_lanes) >= ON_LANES_MAX:  # each of its rows would lack two tokens
                return None
            step = None
        rows = batch.ready()
        if not rows:
            return None
        if step is None:
            self.newest += 1
            step = self.outstanding[self.newest] = Step()
        version = len(step.versions) + 1
        submitted = step.versions[version] = batch.submit(rows, self.newest, version, self._on_lane())
        return submitted

    def grant(self, batch: DecodeBatch) -> MoreSteps | None:
        """What may follow the newest step, where it is launched behind one that runs."""
        if len(self.on_lanes) < ON_LANES_MAX or self.on_lanes[-1] != self.newest:
            return None
        found = batch.more_behind(self._launched(self.newest).rows)
        if found is None or not found[0]:
            return None
        self.granted, pages = found
        return MoreSteps(self.newest, self.granted, pages)

    def revoke(self) -> MoreSteps:
        """Nothing may follow it."""
        self.granted = 0
        return MoreSteps(self.newest)

    def ran(self, ran: StepsRan, batch: DecodeBatch) -> int:
        """Steps ended, and others that were launched unasked took their places; the rows of each."""
        rows = self._launched(self.newest).rows
        self.outstanding = {
            work.step_id: Step({work.version: Submitted(work, rows)}, work.version) for work in ran.on_lane
        }
        self.on_lanes = list(self.outstanding)
        self.newest = self.on_lanes[-1]
        batch.ran(rows, ran.tokens)
        return len(rows)

    def _launched(self, step_id: int) -> Submitted:
        step = self.outstanding[step_id]
        assert step.launched is not None
        return step.versions[step.launched]

    def versions_with(self, request_id: int) -> int:
        """Versions of steps with this row that may still run."""
        versions = [version for step in self.outstanding.values() for version in step.versions.values()]
        return sum(request_id in version.work.requests for version in versions)

    def _on_lane(self) -> DecodeWork | None:
        """What runs of the step that rows get carried tokens from."""
        if not self.on_lanes:
            return None
        return self._launched(self.on_lanes[0]).work

    def launch(self, step_id: int, version: int, batch: DecodeBatch) -> bool:
        """Note that a version is on its lane; False for a step that has ended."""
        step = self.outstanding.get(step_id)
        if step is None:
            return False
        step.versions = {version: step.versions[version]}
        step.launched = version
        self.on_lanes.append(step_id)
        batch.launched(step.versions[version].rows)
        return True

    def end(self, step_id: int, version: int, batch: DecodeBatch) -> Submitted:
        """The version that ran; no version of this step can run any more."""
        step = self.outstanding.pop(step_id)
        ran = step.versions[version]
        if step.launched is None:
            batch.launched(ran.rows)
        else:
            self.on_lanes.remove(step_id)
        return ran
