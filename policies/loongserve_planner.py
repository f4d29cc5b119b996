"""What LoongServe does now: one answer of the plan, see `loongserve.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from muxk.kernel.placing import Action, Assign, GroupView, Grow, Move, PlaceView, Shrink
from muxk.kernel.view import RequestView
from muxk.policies.loongserve_batching import REQUESTS_MAX, Batch, PrefillTimes, Prompt, batches, weight_of
from muxk.policies.loongserve_times import GroupTimes
from muxk.policies.place_scopes import pages_of

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


class Room(NamedTuple):
    """What prompts may use."""

    devices: int
    pages: int


class Planner:
    """One answer."""

    def __init__(self, view: PlaceView, settings: Settings) -> None:
        self._view = view
        self._settings = settings
        self._times = PrefillTimes(view)
        self._group_times = GroupTimes(view, self._times)
        awake = [group for group in view.groups if group.devices]
        # A group whose pages are still on their way out has nothing to do, and no room either.
        idle = [group for group in awake if group.idle and not group.promised_pages]
        self._wide = [group for group in idle if len(group.devices) > 1]
        self._free = [group.group for group in idle if group.devices == (group.group,)]
        self._decoding = [group for group in awake if group.decoding and not group.waiting]
        self._computing = [group for group in awake if group.waiting]
        self._busy = [group for group in awake if group.group not in self._free]
        # Devices between two groups, about to leave one that is done, or with KV on its way out of them,
        # are there in a moment.
        leaving = any(group.idle and group.promised_pages for group in awake)
        self._moving = bool(view.between_groups or self._wide) or leaving
        self._joined: dict[int, int] = {}
        self._joined_pages: dict[int, int] = {}
        """Rows and pages that this answer sends to groups that decode."""
        self._pauses: dict[int, None] = {}
        """Groups that pause by this answer."""
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
        if self._computing:
            yield from self._within_macro_iteration()
            return
        taken = self._accept(self._view.queue, self._idle_room, self._idle_is_fast_enough)
        move = self._consolidation(taken or [self._prompt(queue[0])], bool(taken))
        if move is not None:
            yield move
            return
        if taken:
            yield from self._place(taken)
        yield from self._pausing(_without(queue, taken))
        if not taken:
            yield from self._shrink()

    @property
    def _idle_room(self) -> Room:
        return Room(len(self._free), self._page_total * len(self._free))

    def _within_macro_iteration(self) -> Iterator[Action]:
        """What idle devices can do before the prompts that are computed now are done."""
        left_ns = max(map(self._group_times.prefill_left_ns, self._computing))
        width = min(len(self._free), self._width)

        def ends_before(prompts: Sequence[Prompt]) -> bool:
            return self._times.of(width, prompts) <= left_ns

        taken = self._accept(self._view.queue, self._idle_room, ends_before)
        if taken:
            yield from self._on_idle(taken)

    def _accept(self, queue: Sequence[RequestView], room: Room, allowed: Accept) -> list[Prompt]:
        """Requests in order of arrival; those that are not taken are passed over so many times in a row."""
        in_order = self._view.overtaken >= self._settings.max_out_of_order
        taken: list[Prompt] = []
        for request in queue:
            one = self._prompt(request)
            if self._fits([*taken, one], room) and allowed([*taken, one]):
                taken.append(one)
            elif in_order:
                break
            if len(taken) >= REQUESTS_MAX:
                break
        return taken

    def _fits(self, prompts: Sequence[Prompt], room: Room) -> bool:
        """Worst-case pages, tokens of a batch, and its time unless it is alone."""
        width = min(room.devices, self._width)
        if not width or sum(one.pages for one in prompts) > room.pages:
            return False
        if len(prompts) == 1:
            return prompts[0].pages <= self._page_total * width
        if sum(one.tokens for one in prompts) > self._settings.max_batch_tokens:
            return False
        return self._times.of(width, prompts) <= self._settings.max_prefill

    def _idle_is_fast_enough(self, prompts: Sequence[Prompt]) -> bool:
        """Whether idle devices lose less against all devices than these would take to come free."""
        idle, every = min(len(self._free), self._width), min(len(self._view.groups), self._width)
        lost_ns = self._times.of(idle, prompts) - self._times.of(every, prompts)
        return lost_ns <= self._group_times.wait_ns(self._busy)

    def _place(self, taken: Sequence[Prompt]) -> Iterator[Action]:
        """On idle devices, or with those of a group that decodes, where that saves more than it costs."""
        cut = self._cut(taken)
        alone = sum(self._times.of(one.width, one.prompts) * weight_of(one.prompts) for one in cut)
        best: tuple[float, GroupView] | None = None
        for group in self._decoding:
            room = self._room_with(group)
            if not (self._may_pause(group) and self._fits(taken, room)):
                continue
            pause_ns = self._times.of(min(self._width, room.devices), taken)
            won = alone - pause_ns * weight_of(taken) - self._group_times.slowdown(group, pause_ns)
            if won > 0 and (best is None or won > best[0]):
                best = won, group
        if best is None:
            yield from self._on_idle(taken)
        else:
            yield self._join(best[1], taken)

    def _on_idle(self, prompts: Sequence[Prompt]) -> Iterator[Action]:
        """Groups of idle devices, as the programme cuts them."""
        if not self._view.elastic:
            yield from self._one_by_one(prompts)
            return
        for batch in self._cut(prompts):
            devices, self._free = tuple(self._free[: batch.width]), self._free[batch.width :]
            yield self._assign(batch, devices)

    def _cut(self, prompts: Sequence[Prompt]) -> tuple[Batch, ...]:
        """Batches for idle devices; the first prompt alone where the programme can not cut them all."""
        found: tuple[Batch, ...] | None = None
        if self._view.estimates.known and self._view.elastic:
            found = batches(prompts, len(self._free), self._width, self._page_total, self._times)
        width = min(len(self._free), self._width)
        return (Batch(tuple(prompts[:1]), width),) if found is None else found

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
            keep = min(len(devices), max(1, math.ceil(pages / self._page_total)))
            return Assign(requests, devices[0], devices[1:], _fewer(keep, devices), joined.group)
        keep = min(len(devices), self._needed(pages, rows))
        return Assign(requests, devices[0], devices[1:], _fewer(keep, devices))

    def _needed(self, pages: int, rows: int) -> int:
        """Devices that hold so many pages and keep decode bound by memory."""
        for_pages = math.ceil(pages / self._page_total) if self._page_total else 1
        for_rows = math.ceil(rows / self._settings.decode_batch)
        return max(1, for_pages, for_rows, int(self._settings.decode_width))

    # --- pausing a group that decodes ---

    def _pausing(self, queue: Sequence[RequestView]) -> Iterator[Action]:
        """Groups for which pausing costs least first, each for requests whose gain is worth it."""
        for group in sorted(self._decoding, key=lambda one: (one.decoding, one.group)):
            if not self._may_pause(group):
                continue
            taken = self._accept(queue, self._room_with(group), partial(self._is_worth, group))
            if taken:
                yield self._join(group, taken)
                queue = _without(queue, taken)

    def _room_with(self, group: GroupView) -> Room:
        """Of a group and the devices that are idle."""
        devices = len(group.devices) + len(self._free)
        return Room(devices, self._page_total * devices - self._promised(group))

    def _may_pause(self, group: GroupView) -> bool:
        if group.group in self._pauses:
            return False
        waited_ns = self._view.now_ns - group.since_ns
        steps_ns = self._settings.max_wait_steps * self._group_times.step_ns(group)
        return self._view.answer_tokens > 0 and waited_ns >= steps_ns

    def _is_worth(self, group: GroupView, prompts: Sequence[Prompt]) -> bool:
        """Gain: time saved a prompt token. Cost: time added a token of the answers that pause."""
        width = min(self._width, len(group.devices) + len(self._free))
        gain = self._group_times.left_ns(group) * weight_of(prompts)
        return gain > self._group_times.slowdown(group, self._times.of(width, prompts))

    def _join(self, group: GroupView, taken: Sequence[Prompt]) -> Assign:
        """Into a group that pauses, with the devices that are idle."""
        self._pauses[group.group] = None
        extra = tuple(self._free[: max(0, self._width - len(group.devices))])
        self._free = self._free[len(extra) :]
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
        idle = min(len(self._free), self._width)
        now_ns = self._times.of(idle, prompts) if accepted else self._group_times.wait_ns(self._busy)
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


def _without(queue: Sequence[RequestView], taken: Sequence[Prompt]) -> list[RequestView]:
    gone = {one.request_id: None for one in taken}
    return [request for request in queue if request.request_id not in gone]


def _fewer(keep: int, devices: tuple[int, ...]) -> int | None:
    """What `Assign.keep` says of so many of these devices."""
    return None if keep == len(devices) else keep
