"""The load of stage 5: chats that stream all the time, and long prompts that come into them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from muxk.client.traffic import Span, TrafficRequest, chance

S = 1_000_000_000


@dataclass(frozen=True)
class Kind:
    """Requests of one kind; sizes are drawn evenly between their bounds."""

    number: int
    every_s: float
    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass(frozen=True)
class MixedLoad:
    """Implements `client.traffic.Workload`: the same requests for the card and for the simulator."""

    name: str
    kinds: tuple[Kind, ...]
    seed: int = 1
    texts_from: int = 0
    """Number of the first text: with another one nothing of the prompts is in a prefix cache from before."""

    def requests(self) -> Iterator[TrafficRequest]:
        """Without an end; whoever reads them stops at a time."""
        streams = [self._of(kind) for kind in self.kinds]
        return merge(*streams, key=lambda request: request.arrival_ns)

    def _of(self, kind: Kind) -> Iterator[TrafficRequest]:
        """At even distances, each moved by up to half of one."""
        number = 0
        while True:
            session = number * len(self.kinds) + kind.number
            draw = [chance(self.seed, session, place) for place in range(3)]
            prompt, output = (
                low + round((high - low) * share)
                for (low, high), share in zip((kind.prompt, kind.output), draw, strict=False)
            )
            at_ns = round((number + 0.5 * draw[2]) * kind.every_s * S)
            yield TrafficRequest(at_ns, (Span(self.texts_from + session, 0, prompt),), output, session)
            number += 1


FULL_LOAD = MixedLoad(
    "chats and long prompts",
    (Kind(0, 0.125, (100, 1200), (128, 384)), Kind(1, 1.5, (6000, 16_000), (32, 96))),
)
DRY_LOAD = MixedLoad(
    "a few short requests", (Kind(0, 0.2, (5, 40), (3, 6)), Kind(1, 0.5, (100, 200), (2, 4)))
)
