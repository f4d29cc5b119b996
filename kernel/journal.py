"""The journal: a bounded ring of what policies were asked and what they answered.

Policies are pure, so a record is all that an explanation needs: whoever reads one asks the same policy the
same question again. Records hold references and are formatted only when somebody reads them, so that keeping
one costs about a microsecond. All actors of a server share one journal, on the runtime's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from muxk.kernel.placing import PlaceView
from muxk.kernel.view import OrderAnswer, RequestView

JOURNAL_RECORDS = 4096
"""Records that the ring holds; the oldest goes first."""
JOURNAL_REQUESTS = 32_768
"""Requests that the questions of `order` and `victim` in the ring may hold together: the oldest questions
lose theirs first, and keep the first ORDER_KEPT places of their answer."""
ORDER_KEPT = 16
DIFFERENCES = 512
"""Decisions in which a shadow policy differed that are kept, whatever else happens in between."""


class OrderQuestion(msgspec.Struct, frozen=True):
    """What `Policy.order` was asked."""

    now_ns: int
    requests: Sequence[RequestView]
    service: Mapping[str, float]


class VictimQuestion(msgspec.Struct, frozen=True):
    """What `Policy.victim` was asked."""

    now_ns: int
    requests: Sequence[RequestView]


Questions = OrderQuestion | VictimQuestion | PlaceView
"""Those that hold many requests."""


class Forgotten(msgspec.Struct, frozen=True):
    """In place of a question with many requests that grew old: how many there were."""

    now_ns: int
    requests: int


class ShadowAnswer(msgspec.Struct, frozen=True):
    """What the shadow policy said where it differed."""

    sha: str
    answer: Any
    differs: tuple[str, ...]
    """Points at which it did."""


class Record(msgspec.Struct, eq=False, gc=False):
    """One decision, or a run of equal ones of `decide`."""

    at_ns: int
    actor: str
    point: str
    """The question: `classify`, `admit`, `order`, `form`, `decide`, `victim`, `retain` or `place`."""
    sha: str
    """Of the policy that answered."""
    view: Any
    """The first question of the run: a View of some kind, a RequestView, or one of those above."""
    answer: Any
    last_at_ns: int
    last_view: Any
    """The latest question of the run."""
    count: int = 1
    shadow: ShadowAnswer | None = None
    """There when a shadow policy was asked and differed."""
    dropped: bool = False
    """It left the ring."""


class Sink(Protocol):
    """Where records go besides the ring."""

    def add(self, record: Record) -> None:
        """A record that nothing will be added to any more."""

    def name_request(self, first_id: int, choices: int, name: str) -> None:
        """The client's name of a request whose choices have ids from `first_id` on."""

    def describe(self) -> dict[str, Any]: ...


class Journal:
    """One a server."""

    def __init__(self, records: int = JOURNAL_RECORDS, requests: int = JOURNAL_REQUESTS) -> None:
        assert records >= 1
        self._records = records
        self._requests_max = requests
        self._ring: deque[Record] = deque()
        self._with_requests: deque[Record] = deque()
        self._requests = 0
        self._runs: dict[str, Record] = {}
        self.differences: deque[Record] = deque(maxlen=DIFFERENCES)
        self.sink: Sink | None = None
        self.zero_ns = 0
        """When the server started: moments are told to people from there."""

    def __len__(self) -> int:
        return len(self._ring)

    def snapshot(self) -> list[Record]:
        """Records in the order in which they were begun."""
        return list(self._ring)

    def runs(self) -> list[Record]:
        """Records that may still grow: the latest of `decide`, of each actor."""
        return list(self._runs.values())

    def note(
        self,
        actor: str,
        point: str,
        sha: str,
        at_ns: int,
        view: Any,
        answer: Any,
        shadow: ShadowAnswer | None,
    ) -> None:
        """Keep one decision."""
        record = Record(at_ns, actor, point, sha, view, answer, at_ns, view, 1, shadow)
        self._append(record)
        if self.sink is not None:
            self.sink.add(record)

    def note_of_many(
        self,
        actor: str,
        point: str,
        sha: str,
        view: Questions,
        answer: Any,
        shadow: ShadowAnswer | None,
    ) -> None:
        """Keep a decision about many requests; older ones lose theirs when there are too many."""
        at_ns = view.now_ns
        record = Record(at_ns, actor, point, sha, view, answer, at_ns, view, 1, shadow)
        self._append(record)
        self._requests += len(requests_of(view))
        self._with_requests.append(record)
        if self.sink is not None:
            self.sink.add(record)
        while self._requests > self._requests_max and len(self._with_requests) > 1:
            self._forget(self._with_requests.popleft())

    def note_run(
        self, actor: str, sha: str, at_ns: int, view: Any, answer: Any, shadow: ShadowAnswer | None
    ) -> None:
        """Keep a decision of `decide`; one that is equal to the last adds to its record."""
        last = self._runs.get(actor)
        if last is not None:
            same_answer = last.answer is answer or last.answer == answer
            same = same_answer and last.sha == sha and last.shadow == shadow
            if same and not last.dropped:
                last.count += 1
                last.last_at_ns = at_ns
                last.last_view = view
                return
            if self.sink is not None:
                self.sink.add(last)
        record = Record(at_ns, actor, "decide", sha, view, answer, at_ns, view, 1, shadow)
        self._runs[actor] = record
        self._append(record)

    def _append(self, record: Record) -> None:
        ring = self._ring
        if len(ring) >= self._records:
            self._drop(ring.popleft())
        ring.append(record)
        if record.shadow is not None:
            self.differences.append(record)

    def _drop(self, record: Record) -> None:
        """A record that leaves the ring; of those with requests the oldest ones leave it first."""
        record.dropped = True
        with_requests = self._with_requests
        if with_requests and with_requests[0] is record:
            with_requests.popleft()
            self._requests -= len(requests_of(record.view))

    def _forget(self, record: Record) -> None:
        question = record.view
        requests = len(requests_of(question))
        self._requests -= requests
        record.view = record.last_view = Forgotten(question.now_ns, requests)
        if isinstance(record.answer, OrderAnswer):
            kept = record.answer.order[:ORDER_KEPT]
            record.answer = msgspec.structs.replace(record.answer, order=kept)
        if record.shadow is not None:
            record.shadow = msgspec.structs.replace(record.shadow, answer=None)


def requests_of(question: Questions) -> Sequence[RequestView]:
    """Those that a question holds."""
    return question.queue if isinstance(question, PlaceView) else question.requests
