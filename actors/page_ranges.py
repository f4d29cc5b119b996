"""Free pages of a pool whose devices come and go."""

from __future__ import annotations

from collections import deque

import numpy as np


def without(free: deque[int], pages: range) -> deque[int]:
    """The order stays. A pool has tens of thousands of pages: numpy looks through them."""
    found = np.fromiter(free, np.int64, len(free))
    kept: list[int] = found[(found < pages.start) | (found >= pages.stop)].tolist()
    return deque(kept)


def mixed(free: deque[int], pages: range) -> deque[int]:
    """In the order in which they are given out: evenly, so that what is written from now on is spread over
    devices as their free pages are."""
    if not free:
        return deque(pages)
    both = np.concatenate([np.fromiter(free, np.int64, len(free)), np.arange(pages.start, pages.stop)])
    places = [np.arange(count) / count for count in (len(free), len(pages))]
    mixed: list[int] = both[np.argsort(np.concatenate(places), kind="stable")].tolist()
    return deque(mixed)


def meet(first: range, second: range) -> bool:
    """They have a page in common."""
    return first.start < second.stop and second.start < first.stop
