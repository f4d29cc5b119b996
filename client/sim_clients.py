"""The clients of a simulated server: requests that are live, and the tokens that they got."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.actors import protocol as wire
from muxk.client.traffic import TrafficRequest
from muxk.kernel.view import RequestClass


@dataclass(slots=True)
class LiveRequest:
    """A request without its end."""

    request: TrafficRequest
    prompt_tokens: int
    chosen: RequestClass | None
    token_ns: list[int] = field(default_factory=list)
    """When each token came, once it was given to it."""
    said: list[int] = field(default_factory=list)


class LiveRequests:
    """By name. Tokens of steps with the same requests are kept by step, and given to each request when others
    come: most steps of a large batch touch none of its requests."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._names: tuple[str, ...] = ()
        self._steps: list[tuple[int, ...]] = []
        """Tokens of `_names`, of each of these times."""
        self._times_ns: list[int] = []

    def __len__(self) -> int:
        return len(self._live)

    def add(self, name: str, live: LiveRequest) -> None:
        self._live[name] = live

    def hear(self, event: wire.TokenIds, now_ns: int) -> None:
        """One token more for each of some."""
        if event.request_ids != self._names:
            self._settle()
            self._names = event.request_ids
        self._steps.append(event.token_ids)
        self._times_ns.append(now_ns)

    def take(self, name: str) -> LiveRequest:
        """One that has ended, with all its tokens."""
        self._settle()
        return self._live.pop(name)

    def _settle(self) -> None:
        for name, said in zip(self._names, zip(*self._steps, strict=True), strict=True):
            live = self._live[name]
            live.said += said
            live.token_ns += self._times_ns
        self._names, self._steps, self._times_ns = (), [], []
