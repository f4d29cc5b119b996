"""What a policy's placements come to: requests sent to groups, devices asked to move, requests that migrate.

The half of placement that acts. Whatever the policy says, only what is legal is done: an awake group gets
requests, and only devices whose own groups have nothing to do are given to another one.
"""

from __future__ import annotations

import msgspec
from muxk.actors.group_messages import FetchPrefix, MoveDecode
from muxk.actors.messages import AdmitRequest, RecomputeRequest, Request
from muxk.actors.placement_state import (
    Assignment,
    PlacementState,
    Stage,
    longest_pages,
    prompt_pages,
    prompt_sums,
)
from muxk.actors.refs import Refs
from muxk.actors.transfers import Transfers
from muxk.kernel.actor import Context
from muxk.kernel.placing import Action, Assign, Grow, Move, PlaceAnswer, Shrink


class Fleet(msgspec.Struct, frozen=True):
    """What all devices of a server have in common."""

    units: int
    layers: int
    elastic: bool
    pages: int
    """Of one device's pool."""
    context_tokens: tuple[int, ...]
    """Longest prompt and answer together, in groups of one device, of two, and so on up to all."""
    page_bytes: int
    link_bytes_per_ns: float

    def limits(self, widest_group: int) -> tuple[int, ...]:
        """Longest contexts under a policy that forms groups of so many devices at most."""
        return self.context_tokens[:widest_group]

    def devices_for(self, pages: int) -> int:
        """Devices whose pools together have so many pages."""
        return max(1, -(-pages // self.pages))


class Placer:
    """Owned by placement, on whose state it works."""

    def __init__(
        self,
        groups: tuple[Refs, ...],
        fleet: Fleet,
        state: PlacementState,
        transfers: Transfers,
        context: Context,
    ) -> None:
        self._groups = groups
        self._fleet = fleet
        self._state = state
        self._transfers = transfers
        self._context = context

    def least_loaded(self) -> PlaceAnswer:
        """Of a policy that does not say: each request to the group with the least to do, all of it there."""
        head = next(iter(self._state.queue), None)
        awake = self._awake()
        if head is None or not awake:
            return PlaceAnswer(())
        loads = self._state.loads
        group = min(awake, key=lambda group: (loads[group].waiting + loads[group].decoding, group))
        return PlaceAnswer((Assign((head,), group),))

    def _awake(self) -> list[int]:
        return [group for group in range(len(self._groups)) if self._transfers.is_awake(group)]

    def apply(self, answer: PlaceAnswer) -> bool:
        """Do what can be done; False when nothing was."""
        done = False
        queue = tuple(self._state.queue) if answer.actions else ()
        for action in answer.actions:
            legal = self._do(action)
            self._state.counts[type(action).__name__.lower() if legal else "illegal actions"] += 1
            done = done or legal
        self._note_order(queue)
        return done

    def _note_order(self, before: tuple[int, ...]) -> None:
        """Whether those that left the queue came before all that are in it still."""
        queue = self._state.queue
        gone = [place for place, request_id in enumerate(before) if request_id not in queue]
        if gone:
            self._state.overtaken = self._state.overtaken + 1 if gone[-1] >= len(gone) else 0

    def _do(self, action: Action) -> bool:
        match action:
            case Assign():
                return self._assign(action)
            case Grow():
                return self._grow(action)
            case Shrink():
                return self._shrink(action)
            case Move():
                return self._move(action)

    def _may_grow(self, group: int, devices: tuple[int, ...]) -> bool:
        """Only an awake group, and by devices whose own groups have nothing to do."""
        transfers = self._transfers
        return (
            self._fleet.elastic
            and bool(devices)
            and transfers.is_awake(group)
            and all(
                device != group
                and transfers.is_awake(device)
                and transfers.members[device].devices == (device,)
                and self._state.loads[device].idle
                for device in devices
            )
        )

    def _grow(self, action: Grow) -> bool:
        may = self._may_grow(action.group, action.devices)
        if may:
            self._transfers.grow(action.group, action.devices, action.devices)
        return may

    def _shrink(self, action: Shrink) -> bool:
        going = self._transfers.spare(action.group, action.devices)
        self._transfers.shrink(action.group, going)
        return bool(going)

    def _room(self, group: int) -> int:
        """Pages of a group when all who leave it have left."""
        return len(self._transfers.members[group].with_pages) * self._fleet.pages

    def _move(self, action: Move) -> bool:
        transfers = self._transfers
        if not (transfers.is_awake(action.group) and transfers.is_awake(action.to)):
            return False
        placed, room = self._state.placed, self._room(action.to)
        moving = [
            request_id
            for request_id, known in placed.items()
            if known.group == action.group and known.stage is Stage.DECODING
        ]
        if any(placed[request_id].pages > room for request_id in moving):
            return False
        for request_id in moving:
            self._state.move(request_id, action.to)
        if moving:
            self._context.send(self._groups[action.group].decode, MoveDecode(action.to))
        return bool(moving)

    def _assign(self, action: Assign) -> bool:
        state, group = self._state, action.group
        messages = [state.queue[request] for request in action.requests if request in state.queue]
        decode_group = group if action.decode is None else action.decode
        awake = self._transfers.is_awake(group) and self._transfers.is_awake(decode_group)
        if decode_group in action.devices:  # it would wait for pages of a device that it lent to where it is
            return False
        if not messages or not awake or (action.devices and not self._may_grow(group, action.devices)):
            return False
        if not self._can_hold(action, decode_group, [message.request for message in messages]):
            return False
        now_ns = self._context.now_ns()
        began_ns = now_ns if state.loads[group].idle else None
        requests = [message.request for message in messages]
        for request in requests:
            del state.queue[request.request_id]
            state.send_to(request, group, decode_group, self._fleet.pages, now_ns)
        own = None if decode_group == group else decode_group
        sent = [
            msgspec.structs.replace(
                message, request=msgspec.structs.replace(message.request, decode_group=own)
            )
            for message in messages
        ]
        self._hand_out(action, requests, sent, began_ns)
        return True

    def _can_hold(self, action: Assign, decode_group: int, requests: list[Request]) -> bool:
        """Whether each of them fits, when it has the group's pages to itself."""
        room = self._fleet.pages * len(self._kept_with_pages(action))
        if decode_group == action.group:
            return all(longest_pages(request) <= room for request in requests)
        there = self._room(decode_group)
        return all(prompt_pages(one) <= room and longest_pages(one) <= there for one in requests)

    def _devices_of(self, action: Assign) -> tuple[int, ...]:
        """All that compute the prompts, the leader of the group first."""
        others = (*self._transfers.members[action.group].devices, *action.devices)
        return (action.group, *(device for device in others if device != action.group))

    def _kept_with_pages(self, action: Assign) -> tuple[int, ...]:
        """Those of them that hold KV afterwards."""
        devices = self._devices_of(action)
        kept = devices if action.keep is None else devices[: max(1, action.keep)]
        with_pages = (*self._transfers.members[action.group].with_pages, *action.devices)
        return tuple(device for device in kept if device in with_pages)

    def _hand_out(
        self,
        action: Assign,
        requests: list[Request],
        messages: list[AdmitRequest | RecomputeRequest],
        began_ns: int | None,
    ) -> None:
        """To the group's admission, at once or when the devices are there."""
        devices = self._devices_of(action)
        kept = devices if action.keep is None else devices[: max(1, action.keep)]
        helpers = tuple(device for device in devices if device not in kept)
        if self._fleet.elastic:
            tokens, pairs = prompt_sums(requests)
            left = dict.fromkeys(request.request_id for request in requests)
            assignment = Assignment(action.group, left, helpers, len(devices), tokens, pairs, began_ns)
            self._state.assignments.append(assignment)
        if action.devices:
            with_pages = [device for device in action.devices if device in kept]
            self._transfers.grow(action.group, action.devices, with_pages).held.extend(messages)
            return
        for message in messages:
            self._send(message, action.group)

    def _send(self, message: AdmitRequest | RecomputeRequest, group: int) -> None:
        """To the group's admission; by way of migration if its prefix is kept where it decodes."""
        request, migration = message.request, self._groups[0].migration
        decode_group = request.decode_group
        if decode_group is None or not self._state.decider.policy.fetches_prefix:
            self._context.send(self._groups[group].admission, message)
            return
        assert migration is not None
        self._state.placed[request.request_id].by_migration = True
        self._context.send(migration, FetchPrefix(message, source=decode_group, target=group))

    def ensure_progress(self) -> None:
        """When everybody is idle and somebody waits, the first one goes somewhere."""
        state, transfers = self._state, self._transfers
        if not state.queue or transfers.under_way or not all(load.idle for load in state.loads):
            return
        head = next(iter(state.queue))
        group = self._awake()[0]
        state.counts["forced placements"] += 1
        if not self._assign(Assign((head,), group, self._missing(head, group))):
            transfers.recall()

    def _missing(self, request_id: int, group: int) -> tuple[int, ...]:
        """Devices that a long request needs beside those of a group; too few where others are not alone."""
        if not self._fleet.elastic:
            return ()
        members = self._transfers.members
        needed = self._fleet.devices_for(longest_pages(self._state.queue[request_id].request))
        alone = [other for other in self._awake() if other != group and members[other].devices == (other,)]
        return tuple(alone[: max(0, needed - len(members[group].with_pages))])
