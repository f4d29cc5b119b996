"""Decode steps of one batch on one lane, each launched when the one before the one before it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from muxk.kernel.device import StepAhead
from muxk.kernel.jobs import Flight


@dataclass(slots=True)
class StepsInFlight:
    """Two were in flight; with each launch one ends, so that two always are."""

    oldest: Flight
    newest: Flight
    steps: list[StepAhead]
    """In their order, from these two on."""
    ended: int = 0
    """Of them."""

    def launched(self, step: StepAhead) -> None:
        """Behind the others, when the end of the oldest in flight was known."""
        self.steps.append(step)
        self.ended += 1

    @property
    def next_known_ns(self) -> int:
        """When the end of the oldest in flight is known."""
        return self.steps[self.ended].known_ns

    @property
    def last_known_ns(self) -> int:
        """When the last end was known, and the newest was launched."""
        return self.steps[self.ended - 1].known_ns

    def launched_ns(self, place: int) -> int:
        """Of one of them."""
        if place > 1:
            return self.steps[place - 2].known_ns
        return self.newest.launched_ns if place else self.oldest.launched_ns

    def ready_ns(self, place: int) -> int:
        """When, by the device's clock, what one of them waits for had ended."""
        if not place:
            return self.oldest.ready_ns
        before_ns = self.steps[place - 1].ended_ns
        return before_ns if place > 1 else max(self.newest.ready_ns, before_ns)
