"""The plan `loongserve`: groups of devices that grow for prefill and shrink for decode.

LoongServe (Wu et al., SOSP 2024), its four steps each time something changes. *Dispatch* takes requests of
the queue, on idle devices, or on those of a group that decodes and pauses for them. *Allocation* empties
devices by moving what decodes together, where that is faster than to prefill without them. *Batching* cuts
requests and idle devices into groups (`loongserve_batching.py`). The *scaling plan* says how many devices a
group keeps when its prompts are computed, and gives a group that decodes another one when its pages run
short or its batch is so large that decode is bound by arithmetic.

What differs: what is computed beside a group that decodes joins it at once, where it has room, and not in
the next round of consolidation. Pausing takes one group that decodes, not several. How far the answers of a
group are is not told, so half of a mean answer is taken to be left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

from muxk.kernel.placing import Action, Assign, GroupView, Grow, Move, PlaceAnswer, PlaceView, Shrink
from muxk.kernel.view import RequestView
from muxk.policies.loongserve_batching import REQUESTS_MAX, Batch, PrefillTimes, Prompt, batches
from muxk.policies.place_scopes import pages_of
from muxk.policies.plans import API_VERSION, Answer, PlanParam
from muxk.policies.units import Type

LABEL = "place/loongserve"

Accept = Callable[[Sequence[Prompt]], bool]


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters, with the defaults of LoongServe's code where it has one."""

    max_prefill: float = 500e6
    max_out_of_order: float = 10
    max_wait_steps: float = 10
    max_batch_tokens: float = 65_536
    decode_batch: float = 100
    max_width: float = 8
    decode_width: float = 1


_PARAMS: Mapping[str, PlanParam] = {
    "max_prefill": PlanParam(
        Type.DURATION,
        500e6,
        1,
        1e15,
        "longest prefill of several requests (5s in the paper)",
    ),
    "max_out_of_order": PlanParam(
        Type.NUMBER, 10, 0, 1e6, "requests that may be passed over while those behind them go", whole=True
    ),
    "max_wait_steps": PlanParam(
        Type.NUMBER, 10, 0, 1e6, "decode steps of a group between two times that it pauses", whole=True
    ),
    "max_batch_tokens": PlanParam(Type.NUMBER, 65_536, 1, 1e9, "prompt tokens of a batch", whole=True),
    "decode_batch": PlanParam(
        Type.NUMBER,
        100,
        1,
        1e6,
        "rows a device from which arithmetic bounds decode (128 in the paper)",
        True,
    ),
    "max_width": PlanParam(Type.NUMBER, 8, 1, 8, "devices of one group, at most", whole=True),
    "decode_width": PlanParam(Type.NUMBER, 1, 1, 8, "devices that a group keeps for decode, at least", True),
}


_STEPS: Mapping[type, str] = {
    Assign: f"{LABEL}-dispatch",
    Grow: f"{LABEL}-scale-up",
    Shrink: f"{LABEL}-scale-down",
    Move: f"{LABEL}-consolidate",
}


@dataclass(frozen=True)
class LoongServe:
    """Implements `plans.Plan`."""

    api_version: int = API_VERSION
    devices_min: int = 2
    labels: tuple[str, ...] = tuple(_STEPS.values())
    params: Mapping[str, PlanParam] = field(default_factory=lambda: _PARAMS)
    about: str = (
        "LoongServe: elastic sequence parallelism. Groups of devices that grow for prefill and shrink for "
        "decode; groups that decode pause for a prefill, or move together, where that is worth it. Devices "
        "that can not form groups are used one by one."
    )

    def group_devices_max(self, values: Mapping[str, float]) -> int:
        """See `plans.group_devices_max`."""
        return int(values["max_width"])

    def __call__(self, values: Mapping[str, float], /) -> Answer:
        """The plan under values of its parameters."""
        settings = Settings(**{each.name: values[each.name] for each in fields(Settings)})
        return lambda view: plan(view, settings)


def plan(view: PlaceView, settings: Settings) -> PlaceAnswer:
    """What is done now."""
    actions = tuple(_Planner(view, settings).actions())
    labels = dict.fromkeys(_STEPS[type(action)] for action in actions)
    return PlaceAnswer(actions, tuple(labels))


class _Planner:
    """One answer."""

    def __init__(self, view: PlaceView, settings: Settings) -> None:
        self._view = view
        self._settings = settings
        self._times = PrefillTimes(view)
        awake = [group for group in view.groups if group.devices]
        # A group whose pages are still on their way out has nothing to do, and no room either.
        idle = [group for group in awake if group.idle and not group.promised_pages]
        self._wide = [group for group in idle if len(group.devices) > 1]
        self._free = [group.group for group in idle if group.devices == (group.group,)]
        self._decoding = [group for group in awake if group.decoding and not group.waiting]
        self._busy = [group for group in awake if group.group not in self._free]
        # Devices between two groups, about to leave one that is done, or with KV on its way out of them,
        # are there in a moment.
        coming = len(view.groups) - sum(len(group.devices) for group in awake) if view.elastic else 0
        leaving = any(group.idle and group.promised_pages for group in awake)
        self._moving = bool(coming or self._wide) or leaving
        self._joined: dict[int, int] = {}
        self._joined_pages: dict[int, int] = {}
        """Rows and pages that this answer sends to groups that decode."""
        self._width = min(int(settings.max_width), len(view.groups)) if view.elastic else 1
        self._page_total = max((group.pages_total // len(group.devices) for group in awake), default=0)

    def actions(self) -> Iterator[Action]:
        """What is done is taken apart, then pages, then prompts, then devices for large batches."""
        for group in self._wide:
            yield from self._give_up(group, 1)
        yield from self._grow_for_pages()
        if self._view.queue and not self._moving:
            yield from self._dispatch()
        yield from self._grow_for_batches()

    # --- dispatch ---

    def _dispatch(self) -> Iterator[Action]:
        queue = self._view.queue
        if not self._view.estimates.known:
            if self._free:
                yield from self._on_idle([self._prompt(queue[0])])
            return
        taken = self._accept(len(self._free), self._page_total * len(self._free), self._idle_is_fast_enough)
        move = self._consolidation(taken or [self._prompt(queue[0])], bool(taken))
        if move is not None:
            yield move
        elif taken:
            yield from self._on_idle(taken)
        else:
            yield from self._pausing()
            yield from self._shrink()

    def _accept(self, width: int, pages: int, allowed: Accept) -> list[Prompt]:
        """Requests in order of arrival, with a bounded number passed over."""
        taken: list[Prompt] = []
        passed = 0
        for request in self._view.queue:
            one = self._prompt(request)
            if self._fits([*taken, one], width, pages) and allowed([*taken, one]):
                taken.append(one)
            else:
                passed += 1
            if passed > self._settings.max_out_of_order or len(taken) >= REQUESTS_MAX:
                break
        return taken

    def _fits(self, prompts: Sequence[Prompt], width: int, pages: int) -> bool:
        """Worst-case pages, tokens of a batch, and its time unless it is alone."""
        if not width or sum(one.pages for one in prompts) > pages:
            return False
        if len(prompts) == 1:
            return True
        if sum(one.tokens for one in prompts) > self._settings.max_batch_tokens:
            return False
        return self._times.of(min(width, self._width), prompts) <= self._settings.max_prefill

    def _idle_is_fast_enough(self, prompts: Sequence[Prompt]) -> bool:
        """Whether idle devices lose less against all devices than these would take to come free."""
        idle, every = min(len(self._free), self._width), min(len(self._view.groups), self._width)
        lost_ns = self._times.of(idle, prompts) - self._times.of(every, prompts)
        return lost_ns <= self._wait_ns()

    def _wait_ns(self) -> float:
        """Mean time until groups that work now are done; infinite while nothing is known of answers."""
        waits = [self._left_ns(group) for group in self._busy]
        return sum(waits) / len(waits) if waits else math.inf

    def _left_ns(self, group: GroupView) -> float:
        if not group.decoding:
            tokens = group.pending_tokens
            each = tokens // max(1, group.waiting)
            pairs = group.waiting * each * (each + 1) // 2
            return self._times.time_ns(len(group.devices), tokens, pairs)
        return self._step_ns(group) * self._view.answer_tokens / 2 if self._view.answer_tokens else math.inf

    def _step_ns(self, group: GroupView) -> float:
        view = self._view
        return view.estimates.decode_ns(view.units, group.decoding, group.context_tokens)

    def _on_idle(self, prompts: Sequence[Prompt]) -> Iterator[Action]:
        """Groups of idle devices, as the programme cuts them."""
        if not self._view.elastic:
            yield from self._one_by_one(prompts)
            return
        found: tuple[Batch, ...] | None = None
        if self._view.estimates.known:
            found = batches(prompts, len(self._free), self._width, self._page_total, self._times)
        if found is None:
            found = (Batch(tuple(prompts[:1]), min(len(self._free), self._width)),)
        for batch in found:
            devices, self._free = tuple(self._free[: batch.width]), self._free[batch.width :]
            yield self._assign(batch, devices)

    def _one_by_one(self, prompts: Sequence[Prompt]) -> Iterator[Action]:
        """Without groups of several devices: the longest prompts first, a device each; the rest waits."""
        ordered = sorted(prompts, key=lambda one: (-one.tokens, one.request_id))
        for one, device in zip(ordered, tuple(self._free), strict=False):
            if one.pages <= self._page_total:
                self._free.remove(device)
                yield Assign((one.request_id,), device)

    def _assign(self, batch: Batch, devices: tuple[int, ...]) -> Assign:
        pages, rows = sum(one.pages for one in batch.prompts), len(batch.prompts)
        requests = tuple(one.request_id for one in batch.prompts)
        joined = self._room_for(pages, rows, pages)
        if joined is not None:
            self._joined[joined.group] = self._joined.get(joined.group, 0) + rows
            self._joined_pages[joined.group] = self._joined_pages.get(joined.group, 0) + pages
            return Assign(requests, devices[0], devices[1:], decode=joined.group)
        keep = min(len(devices), self._needed(pages, rows))
        return Assign(requests, devices[0], devices[1:], None if keep == len(devices) else keep)

    def _needed(self, pages: int, rows: int) -> int:
        """Devices that hold so many pages and keep decode bound by memory."""
        for_pages = math.ceil(pages / self._page_total) if self._page_total else 1
        for_rows = math.ceil(rows / self._settings.decode_batch)
        return max(1, for_pages, for_rows, int(self._settings.decode_width))

    # --- pausing a group that decodes ---

    def _pausing(self) -> Iterator[Action]:
        """The group for which pausing costs least, if what the requests gain is worth it."""
        for group in sorted(self._decoding, key=lambda one: (one.decoding, one.group)):
            if not self._may_pause(group):
                continue
            room = len(group.devices) + len(self._free)
            pages = self._page_total * room - group.promised_pages
            taken = self._accept(room, pages, partial(self._is_worth, group))
            if taken:
                extra = tuple(self._free[: max(0, self._width - len(group.devices))])
                self._free = self._free[len(extra) :]
                yield self._join(group, taken, extra)
                return

    def _may_pause(self, group: GroupView) -> bool:
        waited_ns = self._view.now_ns - group.since_ns
        return self._view.answer_tokens > 0 and waited_ns >= self._settings.max_wait_steps * self._step_ns(
            group
        )

    def _is_worth(self, group: GroupView, prompts: Sequence[Prompt]) -> bool:
        """Gain: time saved a prompt token. Cost: time added a token of the answers that pause."""
        width = min(self._width, len(group.devices) + len(self._free))
        gain = sum(self._left_ns(group) / one.tokens for one in prompts)
        cost = group.decoding * self._times.of(width, prompts) / self._view.answer_tokens
        return gain > cost

    def _join(self, group: GroupView, taken: Sequence[Prompt], extra: tuple[int, ...]) -> Assign:
        pages = group.promised_pages + sum(one.pages for one in taken)
        devices = len(group.devices) + len(extra)
        keep = max(len(group.devices), min(devices, self._needed(pages, group.decoding + len(taken))))
        requests = tuple(one.request_id for one in taken)
        return Assign(requests, group.group, extra, None if keep == devices else keep)

    # --- allocation and the scaling plan ---

    def _consolidation(self, prompts: Sequence[Prompt], accepted: bool) -> Move | None:
        """A group to move into another one, where its devices save the prefill more than that takes."""
        view = self._view
        if not view.link_bytes_per_ns > 0:
            return None
        now_ns = self._times.of(min(len(self._free), self._width), prompts) if accepted else self._wait_ns()
        best: tuple[float, Move] | None = None
        for group in self._decoding:
            used = group.pages_total - group.pages_free
            target = self._room_for(group.promised_pages, group.decoding, used, group)
            if target is None:
                continue
            move_ns = used * view.page_bytes / view.link_bytes_per_ns
            wider = min(self._width, len(self._free) + len(group.devices))
            then_ns = self._times.of(wider, prompts) if accepted else 0.0
            won_ns = now_ns - then_ns - move_ns
            if 0 < won_ns < math.inf and (best is None or won_ns > best[0]):
                best = won_ns, Move(group.group, target.group)
        return None if best is None else best[1]

    def _room_for(
        self, promised: int, rows: int, used: int, source: GroupView | None = None
    ) -> GroupView | None:
        """The fullest group that decodes, but for the source, and can take so much, worst cases included."""
        most = self._settings.decode_batch
        able = [
            group
            for group in self._decoding
            if group is not source
            and group.pages_free >= used
            and self._promised(group) + promised <= group.pages_total
            and group.decoding + group.incoming + self._joined.get(group.group, 0) + rows
            <= most * len(group.devices)
        ]
        return min(able, key=lambda one: (one.pages_free, one.group), default=None)

    def _promised(self, group: GroupView) -> int:
        return group.promised_pages + self._joined_pages.get(group.group, 0)

    def _shrink(self) -> Iterator[Action]:
        """Devices that a group does not need any more, while somebody waits."""
        for group in self._decoding:
            yield from self._give_up(group, self._needed(group.promised_pages, group.decoding))

    def _give_up(self, group: GroupView, needed: int) -> Iterator[Action]:
        """All devices but its own and as many more as it needs."""
        others = [device for device in group.devices if device != group.group]
        spare = [device for device in others[needed - 1 :] if device not in group.leaving]
        if spare and self._view.elastic:
            yield Shrink(group.group, tuple(spare))

    def _grow_for_pages(self) -> Iterator[Action]:
        """A device for each group whose next steps may find no page; else it moves where there is room."""
        for group in self._decoding:
            if group.pages_free >= group.decoding:
                continue
            if self._view.elastic and self._free and len(group.devices) < self._width:
                yield Grow(group.group, (self._free.pop(0),))
            elif not self._moving:
                used = group.pages_total - group.pages_free
                target = self._room_for(group.promised_pages, group.decoding, used, group)
                if target is not None:
                    self._moving = True
                    yield Move(group.group, target.group)

    def _grow_for_batches(self) -> Iterator[Action]:
        """Devices that are left, for groups with more rows than decode takes for the same time."""
        for group in self._decoding:
            wide = len(group.devices)
            crowded = group.decoding > self._settings.decode_batch * wide
            if crowded and self._view.elastic and self._free and wide < self._width:
                yield Grow(group.group, (self._free.pop(0),))

    def _prompt(self, request: RequestView) -> Prompt:
        tokens = max(1, request.prompt_tokens + request.generated_tokens)
        return Prompt(request.request_id, tokens, pages_of(request, self._view))
