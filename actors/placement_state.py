"""What placement knows of requests and groups, and the view that it makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from muxk.actors.messages import AdmitRequest, RecomputeRequest, Request
from muxk.actors.request_views import prefill_tokens, request_view
from muxk.kernel.decider import Decider
from muxk.kernel.estimates import Estimates
from muxk.kernel.placing import PLACE_QUEUE_MAX, GroupView
from muxk.kernel.view import KvView, RequestView
from muxk.kernel.work import PAGE_SIZE, attention_pairs

WIDTH_MEMORY = 0.8
"""Weight of what was known of a width before the next measurement."""


class Stage(StrEnum):
    """Of a request that was sent to a group."""

    WAITING = "waiting"
    """Its prompt is not computed."""
    LEAVING = "leaving"
    """It is computed, and moves to the group that decodes it."""
    DECODING = "decoding"


@dataclass(slots=True)
class Placed:
    """A request that was sent to a group."""

    group: int
    """Where it is, or comes from while it moves."""
    decode_group: int
    prompt_tokens: int
    prompt_pages: int
    pages: int
    """For its prompt and its longest answer."""
    stage: Stage = Stage.WAITING
    by_migration: bool = False
    """It went there by way of migration, with a prefix."""
    decodes_since_ns: int | None = None
    """None: its prompt is not computed."""


@dataclass(slots=True)
class GroupLoad:
    """What a group has to do, as far as placement knows."""

    waiting: int = 0
    pending_tokens: int = 0
    incoming: int = 0
    decoding: int = 0
    promised_pages: int = 0
    kv: KvView = field(default_factory=lambda: KvView(0, 0))
    since_ns: int = 0
    prefill_since_ns: int = 0
    answers_since_sum_ns: int = 0
    """Over the rows that decode."""
    newest_since_ns: int = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.incoming or self.decoding)


@dataclass(slots=True)
class Assignment:
    """Requests that were sent to a group with devices that only compute their prompts."""

    group: int
    left: dict[int, None]
    """Requests whose prompts are not computed."""
    helpers: tuple[int, ...]
    """Devices that go when they are."""
    width: int
    tokens: int
    pairs: int
    began_ns: int | None = None
    """When the group had nothing else to do and began; None: it had, and no time is measured."""


@dataclass
class PlacementState:
    decider: Decider
    queue: dict[int, AdmitRequest | RecomputeRequest] = field(default_factory=dict)
    """By request, by arrival."""
    overtaken: int = 0
    """See `PlaceView`."""
    placed: dict[int, Placed] = field(default_factory=dict)
    wide: dict[int, None] = field(default_factory=dict)
    """Those of them that need more pages than one device has."""
    loads: list[GroupLoad] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    estimates: Estimates = field(default_factory=Estimates)
    width_factors: list[float] = field(default_factory=list)
    answers: int = 0
    answer_tokens: int = 0
    recalling: bool = False
    """Devices are to be in their own groups as soon as no request needs more of them than one."""
    ready: int = 0
    """Groups that were measured."""
    counts: Counter[str] = field(default_factory=Counter)

    def send_to(
        self, request: Request, group: int, decode_group: int, pages_of_one: int, now_ns: int
    ) -> None:
        """Keep books on a request that goes to a group."""
        if not self.loads[group].waiting:
            self.loads[group].prefill_since_ns = now_ns
        tokens = prefill_tokens(request)
        placed = Placed(group, decode_group, tokens, prompt_pages(request), longest_pages(request))
        self.placed[request.request_id] = placed
        if placed.pages > pages_of_one:
            self.wide[request.request_id] = None
        self._count(placed, 1)

    def pages_needed(self, group: int) -> int:
        """Of its largest request: with fewer pages a group could never serve all that it was sent. Told of
        those only that need more than one device has; 0 where there are none."""
        most = 0
        for request_id in self.wide:
            placed = self.placed[request_id]
            if placed.decode_group == group:
                most = max(most, placed.pages)
            elif placed.group == group:
                most = max(most, placed.prompt_pages)
        return most

    def enter(self, request_id: int, stage: Stage, now_ns: int) -> None:
        """It has come so far; an unknown one has ended."""
        placed = self.placed.get(request_id)
        if placed is None:
            return
        self._count(placed, -1)
        placed.stage = stage
        if placed.decodes_since_ns is None:
            placed.decodes_since_ns = self.loads[placed.group].since_ns = now_ns
        if stage is Stage.DECODING:
            placed.group = placed.decode_group
            load = self.loads[placed.group]
            load.newest_since_ns = max(load.newest_since_ns, placed.decodes_since_ns)
        self._count(placed, 1)

    def move(self, request_id: int, group: int) -> None:
        """It leaves for another group."""
        placed = self.placed[request_id]
        self._count(placed, -1)
        placed.decode_group, placed.stage = group, Stage.LEAVING
        self._count(placed, 1)

    def forget(self, request_id: int, now_ns: int) -> None:
        placed = self.placed.pop(request_id, None)
        if placed is None:
            return
        self.wide.pop(request_id, None)
        self._count(placed, -1)
        for group in (placed.group, placed.decode_group):
            if self.loads[group].idle:
                self.loads[group].since_ns = now_ns

    def _count(self, placed: Placed, change: int) -> None:
        here, there = self.loads[placed.group], self.loads[placed.decode_group]
        away = placed.group != placed.decode_group
        there.promised_pages += change * placed.pages
        if away:
            here.promised_pages += change * placed.prompt_pages
            there.incoming += change
        if placed.stage is Stage.WAITING:
            here.waiting += change
            here.pending_tokens += change * placed.prompt_tokens
        elif placed.stage is Stage.DECODING:
            there.decoding += change
            there.answers_since_sum_ns += change * (placed.decodes_since_ns or 0)

    def queue_views(self) -> tuple[RequestView, ...]:
        """Those that `place` sees."""
        messages = list(self.queue.values())[:PLACE_QUEUE_MAX]
        return tuple(request_view(message.request) for message in messages)

    def group_view(self, group: int, devices: tuple[int, ...], leaving: tuple[int, ...] = ()) -> GroupView:
        load = self.loads[group]
        used = load.kv.pages_total - load.kv.pages_free
        return GroupView(
            group=group,
            devices=devices,
            waiting=load.waiting,
            pending_tokens=load.pending_tokens,
            incoming=load.incoming,
            decoding=load.decoding,
            context_tokens=used * PAGE_SIZE if load.decoding else 0,
            promised_pages=load.promised_pages,
            pages_total=load.kv.pages_total,
            pages_free=load.kv.pages_free,
            since_ns=load.since_ns,
            leaving=leaving,
            prefill_since_ns=load.prefill_since_ns,
            newest_since_ns=load.newest_since_ns,
            answers_since_ns=load.answers_since_sum_ns // load.decoding if load.decoding else 0,
        )

    def measure(self, assignment: Assignment, units: int, now_ns: int) -> None:
        """What a prefill by so many devices took, over the estimate for one divided by their number."""
        if assignment.began_ns is None or not self.estimates.known:
            return
        alone = self.estimates.layers * self.estimates.prefill_layer_ns(
            units, assignment.tokens, assignment.pairs
        )
        factor = (now_ns - assignment.began_ns) * assignment.width / alone
        place = assignment.width - 1
        self.width_factors[place] = WIDTH_MEMORY * self.width_factors[place] + (1 - WIDTH_MEMORY) * factor


def prompt_pages(request: Request) -> int:
    """Pages that it is reserved for its prefill."""
    return prefill_tokens(request) // PAGE_SIZE + 1


def longest_pages(request: Request) -> int:
    """Pages of its prompt and longest answer. The last token of all is never written."""
    longest = request.prompt_tokens + request.params.max_tokens
    return max(prompt_pages(request), -(-longest // PAGE_SIZE))


def prompt_sums(requests: list[Request]) -> tuple[int, int]:
    """(tokens, query-key pairs) of their prompts."""
    tokens = tuple(prefill_tokens(request) for request in requests)
    return sum(tokens), attention_pairs(tokens, (0,) * len(tokens))
