"""How lanes that run at the same time share a GPU's memory bandwidth.

Each lane asks for the bytes a ns that its work draws when it runs alone. While the sum fits, nobody waits
for bytes; above it the bandwidth is shared max-min: no lane gets less than another unless it asks for less.
Shared caches and memory controllers cost more than that: what the others draw makes a lane's memory time
longer, which slows it down as far as memory is what it waits for. The factor only lowers what is drawn, so
the bandwidth is never exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Sharing(msgspec.Struct, frozen=True):
    """Constants of one device."""

    bandwidth: float
    """Bytes a ns."""
    interference: float
    """Part that memory time grows by when the others draw the whole bandwidth."""
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


def rates(demands: Sequence[float], waits: Sequence[float], sharing: Sharing) -> list[float]:
    """Progress of each lane relative to running alone, from above 0 to 1.

    `waits` are the parts of their times alone that their memory traffic needs by itself, from 0 to 1.
    """
    given = max_min(demands, sharing.bandwidth)
    drawn = sum(given)
    return [
        _rate(demand, share, wait, drawn - share, sharing)
        for demand, share, wait in zip(demands, given, waits, strict=True)
    ]


def rates_of_two(
    first: float, second: float, first_waits: float, second_waits: float, sharing: Sharing
) -> tuple[float, float]:
    """`rates` of two lanes, which is what there nearly always are, without lists."""
    bandwidth = sharing.bandwidth
    one, two = first, second
    if first + second > bandwidth:
        one = min(first, max(bandwidth / 2, bandwidth - second))
        two = min(second, max(bandwidth / 2, bandwidth - first))
    return _rate(first, one, first_waits, two, sharing), _rate(second, two, second_waits, one, sharing)


def _rate(demand: float, given: float, wait: float, others: float, sharing: Sharing) -> float:
    """Time is the norm of compute and memory time with exponent 3, about what fits of GEMMs find."""
    slowdown = demand / given if given < demand else 1.0
    longer = 1.0 + sharing.interference * others / sharing.bandwidth
    disturbed = slowdown * math.pow(1.0 + wait**3 * (longer**3 - 1.0), 1.0 / 3.0)
    bound = 1.0 + sharing.slowdown_max
    if disturbed > bound:
        disturbed = bound
    return 1.0 / (disturbed if disturbed > slowdown else slowdown)
