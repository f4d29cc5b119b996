"""Synthetic workloads with the lengths of table 1 of the MuxWise paper: `synthetic(name, Arrivals(2.0))`.

| workload | input (min / mean / max) | output | reused |
|---|---|---|---|
| sharegpt | 4 / 226 / 1,024 | 4 / 195 / 1,838 | - |
| loogle | 3,380 / 30k / 81k | 2 / 15 / 326 | - |
| openthoughts | 311 / 709 / 4,633 | 684 / 8,374 / 32k | 243 |
| conversation | 891 / 7,538 / 123k | 1 / 342 / 2,000 | 0 / 4,496 / 120k |
| toolagent | 891 / 8,596 / 123k | 1 / 182 / 2,000 | 0 / 4,905 / 120k |

The table fixes bounds and means. The rest is assumed, and stands here: the log-normal family and its sigmas;
that input and output lengths are independent; the length of later messages; for `toolagent` the tree of
shared text (8 system prompts of 1,000 tokens, under each 4 sets of tools of 1,000); think times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from muxk.client.arrivals import Arrivals, positive
from muxk.client.lengths import Lengths
from muxk.client.sessions import USUAL_PACE, Pace, SessionShape, SessionWorkload, SharedText
from muxk.client.traffic import TrafficRequest, WorkloadError, mix

ONE_TURN = Lengths(1, 2, 3, 1.0)
"""Stands for the later messages of workloads that have none."""

NAMES = ("sharegpt", "loogle", "openthoughts", "conversation", "toolagent")


def shape(name: str) -> SessionShape:
    """How the sessions of a workload look."""
    match name:
        case "sharegpt":
            return SessionShape(Lengths(4, 226, 1024, 1.3), ONE_TURN, Lengths(4, 195, 1838, 1.1))
        case "loogle":
            return SessionShape(Lengths(3380, 30_000, 81_000, 0.7), ONE_TURN, Lengths(2, 15, 326, 0.9))
        case "openthoughts":
            thoughts = Lengths(684, 8374, 32_000, 0.8)
            return SessionShape(
                Lengths(311, 709, 4633, 0.6), ONE_TURN, thoughts, shared=(SharedText(1, 243),)
            )
        case "conversation":
            return SessionShape.meeting(
                prompt=Lengths(891, 7538, 123_000, 1.0),
                reused_mean=4496,
                reused_max=120_000,
                message=Lengths(8, 1200, 20_000, 1.2),
                output=Lengths(1, 342, 2000, 0.9),
            )
        case "toolagent":
            return SessionShape.meeting(
                prompt=Lengths(891, 8596, 123_000, 1.0),
                reused_mean=4905,
                reused_max=120_000,
                message=Lengths(8, 1500, 20_000, 1.2),
                output=Lengths(1, 182, 2000, 1.0),
                shared=(SharedText(8, 1000), SharedText(4, 1000)),
            )
    raise WorkloadError(f"there is no workload {name!r}; there are {', '.join(NAMES)}")


def synthetic(
    name: str, arrivals: Arrivals, pace: Pace = USUAL_PACE, request_class: str = ""
) -> SessionWorkload:
    """The workload of a name in `NAMES`; endless."""
    return SessionWorkload(name, shape(name), arrivals, pace, request_class)


class Mixture:
    """Workloads side by side: their requests in order of arrival.

    Give each its own share of the rate, and its own seed, or they arrive in step.
    """

    def __init__(self, name: str, parts: Sequence[SessionWorkload]) -> None:
        if not parts:
            raise WorkloadError(f"the mixture {name!r} has no parts")
        self._name = name
        self._parts = tuple(parts)

    @property
    def name(self) -> str:
        return self._name

    def requests(self) -> Iterator[TrafficRequest]:
        """Ends when all parts did."""
        return heapq.merge(*(part.requests() for part in self._parts), key=attrgetter("arrival_ns"))

    def openings(self) -> Iterator[TrafficRequest]:
        """First turns, as `requests`."""
        return heapq.merge(*(part.openings() for part in self._parts), key=attrgetter("arrival_ns"))

    def next_turn(self, request: TrafficRequest, ended_ns: int) -> TrafficRequest | None:
        """Of the workload whose session it is."""
        owner = next(part for part in self._parts if part.owns(request))
        return owner.next_turn(request, ended_ns)


def mixture(shares: Mapping[str, float], arrivals: Arrivals, pace: Pace = USUAL_PACE) -> Mixture:
    """Synthetic workloads, each at its share of the rate, with its name as the class of its requests.

    `mixture({"sharegpt": 0.5, "loogle": 0.5}, Arrivals(4.0))`: half and half by requests.
    """
    for name, share in shares.items():
        positive(f"share of {name}", share, "of the requests")
    parts = [
        synthetic(name, _part(arrivals, name, share / sum(shares.values())), pace, name)
        for name, share in shares.items()
    ]
    return Mixture("+".join(shares), parts)


def _part(arrivals: Arrivals, name: str, share: float) -> Arrivals:
    return Arrivals(arrivals.rate * share, arrivals.burstiness, mix(arrivals.seed, *name.encode()))
