"""What a policy's placements come to: requests sent to groups, devices asked to move, requests that migrate.

The half of placement that acts. Whatever the policy says, only what is legal is done: an awake group gets
requests, and only devices whose own groups have nothing to do are given to another one.
"""

from __future__ import annotations

import msgspec
from muxk.actors.group_messages import FetchPrefix, MoveDecode
from muxk.actors.messages import AdmitRequest, RecomputeRequest, Request
from muxk.actors.placement_state import Assignment, PlacementState, Stage, prompt_sums
from muxk.actors.refs import Refs
from muxk.actors.request_views import prefill_tokens
from muxk.actors.transfers import Transfers
from muxk.kernel.actor import Context
from muxk.kernel.placing import Action, Assign, Grow, Move, PlaceAnswer, Shrink
from muxk.kernel.work import PAGE_SIZE


class Fleet(msgspec.Struct, frozen=True):
    """What all devices of a server have in common."""

    units: int
    layers: int
    elastic: bool
    pages: int
    """Of one device's pool."""
    context_tokens: int
    """Longest prompt and answer together."""
    page_bytes: int
    link_bytes_per_ns: float


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
        for action in answer.actions:
            legal = self._do(action)
            self._state.counts[type(action).__name__.lower() if legal else "illegal actions"] += 1
            done = done or legal
        return done

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
        member = self._transfers.members[action.group]
        going = [
            device
            for device in action.devices
            if device in member.devices and device != action.group and device not in member.leaving
        ]
        self._transfers.shrink(action.group, going)
        return bool(going)

    def _move(self, action: Move) -> bool:
        transfers = self._transfers
        if not (transfers.is_awake(action.group) and transfers.is_awake(action.to)):
            return False
        placed = self._state.placed
        moving = [
            request_id
            for request_id, known in placed.items()
            if known.group == action.group and known.stage is Stage.DECODING
        ]
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
        if not messages or not awake or (action.devices and not self._may_grow(group, action.devices)):
            return False
        began_ns = self._context.now_ns() if state.loads[group].idle else None
        requests = [message.request for message in messages]
        for request in requests:
            del state.queue[request.request_id]
            state.send_to(request, group, decode_group)
        own = None if decode_group == group else decode_group
        sent = [
            msgspec.structs.replace(
                message, request=msgspec.structs.replace(message.request, decode_group=own)
            )
            for message in messages
        ]
        self._hand_out(action, requests, sent, began_ns)
        return True

    def _hand_out(
        self,
        action: Assign,
        requests: list[Request],
        messages: list[AdmitRequest | RecomputeRequest],
        began_ns: int | None,
    ) -> None:
        """To the group's admission, at once or when the devices are there."""
        member = self._transfers.members[action.group]
        devices = (action.group, *(d for d in (*member.devices, *action.devices) if d != action.group))
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
        awake = self._awake()
        state.counts["forced placements"] += 1
        self._assign(Assign((head,), awake[0], self._needed(head, awake)))

    def _needed(self, request_id: int, awake: list[int]) -> tuple[int, ...]:
        """Devices that a long prompt needs beside the first awake group's own."""
        if not self._fleet.elastic:
            return ()
        pages = prefill_tokens(self._state.queue[request_id].request) // PAGE_SIZE + 1
        member = self._transfers.members[awake[0]]
        missing = -(-pages // self._fleet.pages) - len(member.with_pages)
        alone = [group for group in awake[1:] if self._transfers.members[group].devices == (group,)]
        return tuple(alone[: max(0, missing)])
