"""How much prefill each class of requests got, so that the policy can serve them by their shares.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with classes as flows: a class that is served n
tokens moves on by n / share, and the one that is behind goes next. A class that wanted nothing for a while
comes back where the others are, so that it can neither save up service nor owe any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muxk.kernel.view import RequestClass


class Service:
    """Owned by admission. A class wants service while requests of it wait for pages or for their turn."""

    def __init__(self) -> None:
        self._classes: tuple[str, ...] = ()
        self._wanting: dict[str, int] = {}
        """Requests, of classes with any."""
        self._served: dict[str, float] = {}

    @property
    def by_class(self) -> Mapping[str, float]:
        """Tokens divided by the share, of classes that ever wanted service."""
        return self._served

    def wants(self, request_class: RequestClass) -> None:
        """A request begins to wait."""
        name = request_class.name
        if name not in self._wanting:
            self._served[name] = max(self._served.get(name, 0.0), self._level())
        self._wanting[name] = self._wanting.get(name, 0) + 1

    def _level(self) -> float:
        """Where a class begins that comes back: at the least of those that want service. When none does,
        at the most that any got: what the last busy period left is settled."""
        wanting = [self._served[name] for name in self._wanting]
        return min(wanting) if wanting else max(self._served.values(), default=0.0)

    def served(self, request_class: RequestClass, tokens: int) -> None:
        """Prefill of a request that waited begins, with so many tokens to compute."""
        self._served[request_class.name] += tokens / request_class.share
        self.left(request_class)

    def left(self, request_class: RequestClass) -> None:
        """A request waits no more."""
        name = request_class.name
        self._wanting[name] -= 1
        if not self._wanting[name]:
            del self._wanting[name]

    def restart(self, classes: tuple[str, ...], wanting: Iterable[RequestClass]) -> None:
        """A policy came into force: what classes got is forgotten unless it has the same ones."""
        if classes != self._classes:
            self._classes = classes
            self._wanting, self._served = {}, {}
        before, level = self._wanting, self._level()
        self._wanting = {}
        for name in [request_class.name for request_class in wanting]:
            if name not in before:
                self._served[name] = max(self._served.get(name, 0.0), level)
            self._wanting[name] = self._wanting.get(name, 0) + 1
