"""What a person calls a workload: the name of a synthetic one, several joined by `+`, or a trace file."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from muxk.client.arrivals import Arrivals
from muxk.client.sessions import USUAL_PACE, Pace
from muxk.client.synthetic import NAMES, mixture, synthetic
from muxk.client.traces import Replay, open_trace
from muxk.client.traffic import Workload, WorkloadError


@dataclass(frozen=True)
class Traffic:
    """How the requests of a workload come."""

    rate: float | None
    """Requests a second; None for a trace file as recorded."""
    burstiness: float = 1.0
    seed: int = 0
    pace: Pace = USUAL_PACE
    """Of synthetic conversations."""


def find_workload(name: str, traffic: Traffic) -> Workload:
    """`conversation`, `sharegpt+loogle` (in equal parts by requests), or the path of a trace file.

    Raises WorkloadError, or TraceError for a file that is none.
    """
    parts = name.split("+")
    if all(part in NAMES for part in parts):
        return _synthetic(parts, traffic)
    path = Path(name)
    if path.exists() or "/" in name or "." in name:
        return open_trace(path, Replay(traffic.rate, traffic.burstiness, traffic.seed))
    wrong = next(part for part in parts if part not in NAMES)
    near = get_close_matches(wrong, NAMES, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise WorkloadError(
        f"{wrong!r} is no workload and no file{hint}; there are {', '.join(NAMES)}, several joined by +, "
        "or the path of a trace file"
    )


def _synthetic(parts: list[str], traffic: Traffic) -> Workload:
    if traffic.rate is None:
        raise WorkloadError(f"{'+'.join(parts)} needs a rate: say how many requests come a second")
    arrivals = Arrivals(traffic.rate, traffic.burstiness, traffic.seed)
    if len(parts) == 1:
        return synthetic(parts[0], arrivals, traffic.pace)
    if len(dict.fromkeys(parts)) < len(parts):
        raise WorkloadError(f"{'+'.join(parts)} has a part twice")
    return mixture(dict.fromkeys(parts, 1.0), arrivals, traffic.pace)
