"""Conversations whose turns wait for the answer before, as those of people do.

Sessions open at a rate that brings the rate of requests asked for, and each later turn comes a think time
after its answer ended. A slow server is asked a little later; but openings wait for nobody, so that a server
that is too slow still falls behind. The open loop needs none of this: there a workload's times are the same
whatever happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import msgspec
from muxk.client.traffic import TrafficRequest, Workload, WorkloadError


@runtime_checkable
class Conversations(Protocol):
    """A workload that can say what follows an answer."""

    @property
    def name(self) -> str: ...

    def openings(self) -> Iterator[TrafficRequest]:
        """First turns in order of arrival."""
        ...

    def next_turn(self, request: TrafficRequest, ended_ns: int) -> TrafficRequest | None:
        """The turn that follows a request which ended at a time; None where the session ends."""
        ...


class ClosedLoop:
    """Requests of a workload in order of time, while time passes. Memory is that of sessions that think."""

    def __init__(self, workload: Workload) -> None:
        """Raises WorkloadError for one that has its times from a file."""
        if not isinstance(workload, Conversations):
            raise WorkloadError(
                f"{workload.name} says itself when requests come: turns that wait for an answer are for "
                "the generated workloads"
            )
        self._workload = workload
        self._due: list[tuple[int, int, TrafficRequest]] = []
        self._answers = 0

    def answered(self, request: TrafficRequest, ended_ns: int) -> None:
        """Tell that an answer ended, at a time of the run."""
        following = self._workload.next_turn(request, ended_ns)
        if following is not None:
            self._answers += 1
            heapq.heappush(self._due, (following.arrival_ns, self._answers, following))

    def requests(self, wait: Callable[[int], int]) -> Iterator[TrafficRequest]:
        """One request at a time, each when its time has come.

        `wait(at_ns)` lets time pass, up to that time or less far, and says what time it is then. A turn that
        came due during such a wait arrives at its end.
        """
        openings = self._workload.openings()
        opening = next(openings, None)
        while True:
            times = [entry.arrival_ns for entry in (opening,) if entry is not None]
            due_ns = min([*times, *(entry[0] for entry in self._due[:1])], default=None)
            if due_ns is None:
                return
            now_ns = wait(due_ns)
            if now_ns < due_ns:
                continue
            if opening is not None and opening.arrival_ns <= (self._due[0][0] if self._due else due_ns):
                yield opening
                opening = next(openings, None)
            else:
                following = heapq.heappop(self._due)[2]
                yield msgspec.structs.replace(following, arrival_ns=max(following.arrival_ns, now_ns))
