"""The requests that wait for prefill, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from muxk.actors.messages import Request
from muxk.actors.request_views import class_of, prefill_tokens, request_view
from muxk.kernel.view import QueueView, RequestView

NOBODY = QueueView(0, 0)


class Waiting:
    """In order of arrival here; bounded by `limits.queue_bound`, recomputed requests on top."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._views: dict[int, RequestView] = {}
        """In the same order; kept, as the order is asked for again and again."""
        self._by_class: dict[str, QueueView] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: int) -> Request | None:
        return self._requests.get(request_id)

    @property
    def views(self) -> list[RequestView]:
        """Of the requests, in the same order."""
        return list(self._views.values())

    @property
    def view(self) -> QueueView:
        return QueueView(len(self._requests), self._tokens)

    @property
    def by_class(self) -> dict[str, QueueView]:
        """Of classes with requests here."""
        return dict(self._by_class)

    def of_class(self, name: str) -> QueueView:
        return self._by_class.get(name, NOBODY)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._views[request.request_id] = request_view(request)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id], self._views[request.request_id]
        self._count(request, -1)

    def put_back(self, requests: Iterable[Request]) -> None:
        """To the front: they arrived before what waits."""
        returned = {request.request_id: request for request in requests}
        self._requests = returned | self._requests
        self._views = {key: request_view(request) for key, request in returned.items()} | self._views
        for request in returned.values():
            self._count(request, 1)

    def replace(self, requests: Iterable[Request]) -> None:
        """The same requests, put into other classes."""
        replaced = list(requests)
        self._requests, self._views, self._by_class, self._tokens = {}, {}, {}, 0
        for request in replaced:
            self.add(request)

    def _count(self, request: Request, sign: int) -> None:
        name, tokens = class_of(request).name, sign * prefill_tokens(request)
        known = self.of_class(name)
        counted = QueueView(known.requests + sign, known.tokens + tokens)
        self._tokens += tokens
        if counted.requests:
            self._by_class[name] = counted
        else:
            del self._by_class[name]
