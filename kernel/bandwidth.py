"""How lanes that run at the same time share a GPU's memory bandwidth.

Each lane asks for the bytes a ns that its work draws when it runs alone. While the sum fits, nobody waits;
above it the bandwidth is shared max-min: no lane gets less than another unless it asks for less. Shared
caches and memory controllers cost more than that, which a further factor models: a lane slows down with the
share that the others draw, up to a bound. The factor only lowers what is drawn, so the bandwidth is never
exceeded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Sharing(msgspec.Struct, frozen=True):
    """Constants of one device."""

    bandwidth: float
    """Bytes a ns."""
    interference: float
    """Slowdown for each unit of the bandwidth that the others draw."""
    slowdown_max: float
    """Interference raises a slowdown to 1 + this at most; the sharing itself may go further."""


def max_min(demands: Sequence[float], capacity: float) -> list[float]:
    """What each gets: all it asks for, or an equal share of what smaller demands leave."""
    if sum(demands) <= capacity:
        return list(demands)
    given = [0.0] * len(demands)
    left = capacity
    ascending = sorted(range(len(demands)), key=demands.__getitem__)
    for place, index in enumerate(ascending):
        given[index] = min(demands[index], left / (len(demands) - place))
        left -= given[index]
    return given


def rates(demands: Sequence[float], sharing: Sharing) -> list[float]:
    """Progress of each lane relative to running alone, from above 0 to 1."""
    given = max_min(demands, sharing.bandwidth)
    drawn = sum(given)
    found = []
    for demand, share in zip(demands, given, strict=True):
        slowdown = demand / share if share < demand else 1.0
        others = (drawn - share) / sharing.bandwidth
        disturbed = slowdown * (1.0 + sharing.interference * others)
        found.append(1.0 / max(slowdown, min(disturbed, 1.0 + sharing.slowdown_max)))
    return found


def rates_of_two(first: float, second: float, sharing: Sharing) -> tuple[float, float]:
    """`rates` of two lanes, which is what there nearly always are, without lists."""
    bandwidth = sharing.bandwidth
    one, two = first, second
    if first + second > bandwidth:
        one = min(first, max(bandwidth / 2, bandwidth - second))
        two = min(second, max(bandwidth / 2, bandwidth - first))
    interference, bound = sharing.interference, 1.0 + sharing.slowdown_max
    slow_one = first / one if one < first else 1.0
    slow_two = second / two if two < second else 1.0
    slow_one = max(slow_one, min(slow_one * (1.0 + interference * two / bandwidth), bound))
    slow_two = max(slow_two, min(slow_two * (1.0 + interference * one / bandwidth), bound))
    return 1.0 / slow_one, 1.0 / slow_two
