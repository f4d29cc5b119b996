"""What the expectations of a PolicyTest may name: figures of requests, the state at a moment, hits of a rule.

Figures over nothing have no value: the expectation that asks for one fails and says so. A new name is one row
of a table here. A gap is the time between two events with tokens of one request; percentiles interpolate
linearly between the two nearest ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from muxk.policies.problems import RuleError
from muxk.policies.run_records import End, ItemRecord, MomentRecord, RequestRecord, RunRecord
from muxk.policies.units import Type
from muxk.policies.vocabulary import Name, Vocabulary

_N, _D, _B = Type.NUMBER, Type.DURATION, Type.BOOL

OF_REQUESTS = "an expectation"
AT_A_MOMENT = "an expectation with 'at'"
OF_A_RULE = "an expectation with 'rule'"


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two events with tokens of one request."""

    length_ns: int
    request: RequestRecord
    index: int
    """Of the later of the two, from 0."""

    @property
    def ends_ns(self) -> int:
        return self.request.token_ns[self.index]


class RequestsScope:
    """Requests that an expectation is about, and the run they are of."""

    def __init__(self, run: RunRecord, requests: Sequence[RequestRecord], who: str) -> None:
        """`who` names them in messages, such as `requests of 'chat'`."""
        self.run = run
        self.who = who
        self._requests = requests

    @property
    def requests(self) -> Sequence[RequestRecord]:
        if not self._requests:
            raise RuleError(f"there are no {self.who}")
        return self._requests

    @cached_property
    def gaps(self) -> list[Gap]:
        return [
            Gap(length_ns, request, index)
            for request in self.requests
            for index, length_ns in enumerate(request.gaps_ns, start=1)
        ]

    @cached_property
    def tbt(self) -> list[int]:
        if not self.gaps:
            raise RuleError(f"there is no gap between two tokens of {self.who}")
        return sorted(gap.length_ns for gap in self.gaps)

    @cached_property
    def ttft(self) -> list[int]:
        times = [request.ttft_ns for request in self.requests if request.ttft_ns is not None]
        if not times:
            raise RuleError(f"none of the {self.who} got a token")
        return sorted(times)

    @cached_property
    def latency(self) -> list[int]:
        times = [
            request.token_ns[-1] - request.arrival_ns
            for request in self.requests
            if request.end is End.FINISHED and request.token_ns
        ]
        if not times:
            raise RuleError(f"none of the {self.who} finished")
        return sorted(times)

    @cached_property
    def late_gaps(self) -> list[Gap]:
        """Gaps that are longer than the TBT SLO of their request."""
        _ = self.tbt
        return [gap for gap in self.gaps if gap.length_ns > _known(gap.request.tbt_slo_ns, gap.request)]

    @cached_property
    def late_first_tokens(self) -> list[RequestRecord]:
        """Requests whose first token came late, or not at all though their time was up."""
        return [request for request in self.requests if _is_late(request, self.run.ended_ns)]


def _known(slo_ns: int | None, request: RequestRecord) -> int:
    if slo_ns is None:
        raise RuleError(f"{request.name} has no SLO: the policy was never asked for its class")
    return slo_ns


def _is_late(request: RequestRecord, now_ns: int) -> bool:
    if request.end in (End.REFUSED, End.SHED):
        return False
    slo_ns = _known(request.ttft_slo_ns, request)
    end_ns = now_ns if request.end is End.LIVE else request.end_ns
    waited_ns = request.ttft_ns if request.ttft_ns is not None else end_ns - request.arrival_ns
    return waited_ns > slo_ns


def percentile(ordered: Sequence[int], share: float) -> float:
    """Of ascending values, with linear interpolation."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _distribution(root: str, what: str) -> dict[str, Name]:
    """Names of a list of times that the scope holds under `root`, ascending."""
    get: Callable[[Any], list[int]] = attrgetter(root)

    def at(share: float) -> Callable[[Any], float]:
        return lambda scope: percentile(get(scope), share)

    rows: tuple[tuple[str, Callable[[Any], float], str], ...] = (
        ("p50", at(0.5), "median"),
        ("p90", at(0.9), "90th percentile"),
        ("p99", at(0.99), "99th percentile"),
        ("max", lambda scope: get(scope)[-1], "longest"),
        ("mean", lambda scope: sum(get(scope)) / len(get(scope)), "mean"),
    )
    return {f"{root}.{key}": Name(_D, read, f"{about} of {what}") for key, read, about in rows}


def _ended(end: End) -> Callable[[RequestsScope], int]:
    return lambda scope: sum(request.end is end for request in scope.requests)


def _sum(field: str) -> Callable[[RequestsScope], int]:
    get: Callable[[RequestRecord], int] = attrgetter(field)
    return lambda scope: sum(get(request) for request in scope.requests)


def _one_slo(field: str, what: str) -> Callable[[RequestsScope], int]:
    """The SLO that all requests have in common."""
    get: Callable[[RequestRecord], int | None] = attrgetter(field)

    def read(scope: RequestsScope) -> int:
        found = {
            _known(get(request), request): request.name for request in scope.requests if request.class_name
        }
        if not found:
            raise RuleError(f"the policy was never asked for the class of the {scope.who}")
        if len(found) > 1:
            names = " and ".join(list(found.values())[:2])
            raise RuleError(
                f"the {scope.who} have different SLOs, such as {names}; ask {what}.late, or for some of them"
            )
        return next(iter(found))

    return read


def _throughput(scope: RequestsScope) -> float:
    begins_ns = min(request.arrival_ns for request in scope.requests)
    ends_ns = max(request.end_ns for request in scope.requests)
    if ends_ns <= begins_ns:
        raise RuleError(f"none of the {scope.who} took any time")
    return sum(request.tokens for request in scope.requests) / (ends_ns - begins_ns) * 1e9


_REQUEST_NAMES: Mapping[str, Name] = {
    **_distribution("tbt", "the time between two tokens"),
    "tbt.late": Name(_N, lambda scope: len(scope.late_gaps), "gaps longer than the TBT SLO of their request"),
    "tbt.count": Name(_N, lambda scope: len(scope.gaps), "gaps between tokens"),
    **_distribution("ttft", "the time from arrival to the first token"),
    "ttft.late": Name(
        _N, lambda scope: len(scope.late_first_tokens), "requests without a first token at their deadline"
    ),
    **_distribution("latency", "the time from arrival to the last token, of those that finished"),
    "slo.tbt": Name(_D, _one_slo("tbt_slo_ns", "tbt"), "the TBT SLO of the requests' class"),
    "slo.ttft": Name(
        _D, _one_slo("ttft_slo_ns", "ttft"), "the TTFT SLO of the requests, or the deadline they came with"
    ),
    "requests": Name(_N, lambda scope: len(scope.requests), "requests that arrived"),
    "finished": Name(_N, _ended(End.FINISHED), "requests that got all their tokens"),
    "refused": Name(_N, _ended(End.REFUSED), "requests that can never be served"),
    "shed": Name(_N, _ended(End.SHED), "requests turned away because too much waited"),
    "aborted": Name(_N, _ended(End.ABORTED), "requests that their client ended"),
    "failed": Name(_N, _ended(End.FAILED), "requests that broke"),
    "tokens": Name(_N, _sum("tokens"), "tokens generated"),
    "prompt.tokens": Name(_N, _sum("prompt_tokens"), "tokens of the prompts"),
    "prompt.cached": Name(_N, _sum("cached_tokens"), "of those, found in the prefix index; of finished ones"),
    "recomputes": Name(_N, _sum("recomputes"), "times that requests lost their pages"),
    "throughput": Name(_N, _throughput, "tokens a second, from the first arrival to the last end"),
}


def _items(scope: RequestsScope, test: Callable[[ItemRecord], bool], what: str) -> list[ItemRecord]:
    items = [item for item in scope.run.items if test(item)]
    if not items:
        raise RuleError(f"no {what} ran")
    return items


def _decodes(scope: RequestsScope) -> list[ItemRecord]:
    return _items(scope, attrgetter("decodes"), "decode step")


def _prefills(scope: RequestsScope) -> list[ItemRecord]:
    return _items(scope, attrgetter("prefills"), "prefill")


def _spans(items: Sequence[ItemRecord]) -> list[tuple[int, int]]:
    """Times in which at least one of the items ran, apart and ascending."""
    spans: list[tuple[int, int]] = []
    for begins, ends in sorted((item.begins_ns, item.ends_ns) for item in items):
        if spans and begins <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(ends, spans[-1][1]))
        else:
            spans.append((begins, ends))
    return spans


def _length(spans: Sequence[tuple[int, int]]) -> int:
    return sum(ends - begins for begins, ends in spans)


def _time_of(test: Callable[[ItemRecord], bool]) -> Callable[[RequestsScope], int]:
    return lambda scope: _length(_spans([item for item in scope.run.items if test(item)]))


def _together(scope: RequestsScope) -> int:
    """Time in which both phases ran: what each takes, less what both take together."""
    decode, prefill = (_time_of(attrgetter(phase))(scope) for phase in ("decodes", "prefills"))
    return decode + prefill - _length(_spans(scope.run.items))


def _count(test: Callable[[ItemRecord], bool]) -> Callable[[RequestsScope], int]:
    return lambda scope: sum(test(item) for item in scope.run.items)


_RUN_NAMES: Mapping[str, Name] = {
    "decode.steps": Name(_N, _count(attrgetter("decodes")), "decode steps that ran, fused ones included"),
    "decode.units.min": Name(_N, lambda s: min(i.units for i in _decodes(s)), "fewest units a step ran on"),
    "decode.units.max": Name(_N, lambda s: max(i.units for i in _decodes(s)), "most units a step ran on"),
    "decode.batch.max": Name(_N, lambda s: max(i.rows for i in _decodes(s)), "rows of the largest step"),
    "decode.time": Name(_D, _time_of(attrgetter("decodes")), "time in which a decode step ran"),
    "prefill.items": Name(_N, _count(attrgetter("prefills")), "prefill items that ran, fused ones included"),
    "prefill.units.min": Name(
        _N, lambda s: min(i.units for i in _prefills(s)), "fewest units prefill ran on"
    ),
    "prefill.units.max": Name(_N, lambda s: max(i.units for i in _prefills(s)), "most units prefill ran on"),
    "prefill.tokens.max": Name(
        _N, lambda s: max(i.tokens for i in _prefills(s)), "tokens of the largest item"
    ),
    "prefill.layers.max": Name(_N, lambda s: max(i.layers for i in _prefills(s)), "most layers of one item"),
    "prefill.time": Name(_D, _time_of(attrgetter("prefills")), "time in which prefill ran"),
    "fused.steps": Name(_N, _count(lambda item: item.phase == "fused"), "items that were both in one pass"),
    "together.time": Name(_D, _together, "time in which both phases ran at once"),
    "split.changes": Name(_N, attrgetter("run.split_changes"), "how often the split changed"),
    "preemptions": Name(_N, attrgetter("run.preemptions"), "how often a prefill batch was parked"),
    "errors": Name(_N, lambda scope: sum(scope.run.errors.values()), "times that a rule failed"),
    "duration": Name(_D, attrgetter("run.ended_ns"), "from time 0 to the end of the last request"),
}
"""Of the whole run, whichever requests an expectation is about."""

_MOMENT_NAMES: Mapping[str, Name] = {
    "split.decode": Name(_N, attrgetter("decode_units"), "units for decode of the split in force"),
    "split.prefill": Name(_N, attrgetter("prefill_units"), "units for prefill of the split in force"),
    "decode.batch": Name(_N, attrgetter("decode_batch"), "rows of the decode step; 0 when nothing decodes"),
    "prefill.batches": Name(_N, attrgetter("prefill_batches"), "prefill batches that are begun and not over"),
    "parked": Name(_B, attrgetter("parked"), "true when a prefill batch is parked"),
    "queue.requests": Name(_N, attrgetter("queue_requests"), "requests that wait for prefill"),
    "queue.tokens": Name(_N, attrgetter("queue_tokens"), "their prompt tokens"),
    "kv.total": Name(_N, attrgetter("kv_total"), "pages of the pool"),
    "kv.free": Name(_N, attrgetter("kv_free"), "pages that an allocation can take"),
    "live": Name(_N, attrgetter("live"), "requests that arrived and have not ended"),
}


@dataclass(frozen=True, slots=True)
class RuleScope:
    """Hits of one rule."""

    label: str
    """`point/rule`."""
    run: RunRecord

    @property
    def hits(self) -> int:
        return self.run.hits[self.label]

    @property
    def errors(self) -> int:
        prefix = f"{self.label}:"
        return sum(count for text, count in self.run.errors.items() if text.startswith(prefix))


_RULE_NAMES: Mapping[str, Name] = {
    "hits": Name(_N, attrgetter("hits"), "how often this rule answered"),
    "errors": Name(_N, attrgetter("errors"), "how often it failed"),
}

PLACES: Mapping[str, Mapping[str, Name]] = {
    OF_REQUESTS: {**_REQUEST_NAMES, **_RUN_NAMES},
    AT_A_MOMENT: _MOMENT_NAMES,
    OF_A_RULE: _RULE_NAMES,
}
"""Names of each kind of expectation, with type and meaning; what documents are made from."""

Scope = RequestsScope | MomentRecord | RuleScope


def vocabulary(place: str) -> Vocabulary:
    """What expectations of a kind may name."""
    elsewhere = {name: other for other, names in PLACES.items() for name in names}
    return Vocabulary(place, PLACES[place], {}, elsewhere)


def place_of(scope: Scope) -> str:
    """Which kind of expectation a scope is for."""
    if isinstance(scope, RequestsScope):
        return OF_REQUESTS
    return OF_A_RULE if isinstance(scope, RuleScope) else AT_A_MOMENT
