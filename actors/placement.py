"""placement: which devices compute a prompt, and which decode it, on a server that has several.

tokenizer hands it requests; it asks the policy's `place` and sends each to the admission of a group. Requests
that are computed again come back here. It keeps books on what every group has to do, from what others tell
it, and moves devices between groups where they are elastic. Invariant: a request is in `queue`, or `placed`,
or not here; a device belongs to one group, or is on its way to one.
"""

from __future__ import annotations

from typing import Any

import msgspec
from muxk.actors.group_messages import (
    DeviceReleased,
    DevicesTaken,
    MoveDecode,
    RequestEnded,
    RequestMigrated,
    RequestsJoined,
)
from muxk.actors.messages import (
    AbortRequest,
    AdmitRequest,
    EstimatorReady,
    RecomputeRequest,
    Request,
    RequestAborted,
    RequestRefused,
    StopRequest,
)
from muxk.actors.placement_state import (
    Assignment,
    GroupLoad,
    PlacementState,
    Stage,
    prompt_sums,
)
from muxk.actors.refs import PlacementInbox, Refs
from muxk.actors.request_views import classified, prefill_tokens, up_to_date
from muxk.actors.transfers import Transfer, Transfers
from muxk.kernel.actor import Actor
from muxk.kernel.decider import Decider
from muxk.kernel.messages import (
    EstimatesChanged,
    GroupResized,
    KvChanged,
    PolicyChanged,
    ReportRequests,
    ReportState,
    RequestsReported,
    StateReported,
)
from muxk.kernel.placing import Assign, Grow, Move, PlaceAnswer, PlaceView, Shrink
from muxk.kernel.policy import PolicyBook
from muxk.kernel.statuses import Reason, StatusReport
from muxk.kernel.work import PAGE_SIZE

ROUNDS_MAX = 16
"""Times that `place` is asked at one event; each answer may make another one possible."""
SHORT_OF_PAGES = 0.05
"""Share of a group's pages: with fewer free ones a policy of elastic groups is asked to do something."""


class Fleet(msgspec.Struct, frozen=True):
    """What all devices of a server have in common."""

    units: int
    layers: int
    elastic: bool
    pages: int
    """Of one device's pool."""
    page_bytes: int
    link_bytes_per_ns: float


class Placement(Actor):
    """One a server with several devices."""

    Accepts = PlacementInbox

    def __init__(self, groups: tuple[Refs, ...], book: PolicyBook, policy_sha: str, fleet: Fleet) -> None:
        self._groups = groups
        self._shared = groups[0]
        self._fleet = fleet
        count = len(groups)
        self.state = PlacementState(
            decider=Decider(book, policy_sha, "placement", self.now_ns),
            loads=[GroupLoad() for _ in range(count)],
            width_factors=[1.0] * count,
        )

    def started(self) -> None:
        self._transfers = Transfers(self._groups, self.context)

    # --- requests ---

    def on_admit_request(self, message: AdmitRequest) -> None:
        bound = self.state.decider.limits.queue_bound
        if len(self.state.queue) >= bound:
            reason = f"{bound} requests wait for a device already, the bound of the queue"
            refused = RequestRefused(message.request.request_id, "overloaded", reason)
            self.send(self._shared.tokenizer, refused)
            return
        self._enqueue(
            msgspec.structs.replace(message, request=classified(message.request, self.state.decider))
        )

    def on_recompute_request(self, message: RecomputeRequest) -> None:
        """Somewhere else perhaps: the group that had it may have had too few pages."""
        self.state.forget(message.request.request_id, self.now_ns())
        request = up_to_date(message.request, self.state.decider)
        self._enqueue(RecomputeRequest(msgspec.structs.replace(request, decode_group=None)))

    def _enqueue(self, message: AdmitRequest | RecomputeRequest) -> None:
        queue = self.state.queue
        queue[message.request.request_id] = message
        if isinstance(message, RecomputeRequest):
            self.state.queue = dict(sorted(queue.items(), key=lambda item: item[1].request.arrival_ns))
        self._place()

    def on_abort_request(self, message: AbortRequest) -> None:
        request_id = message.request_id
        placed = self.state.placed.get(request_id)
        if self.state.queue.pop(request_id, None) is not None or placed is None:
            self.send(self._shared.gateway, RequestAborted(request_id))
            return
        held = self._held_for(request_id)
        if held is not None:
            held.held.append(message)
        else:
            self.send(self._groups[placed.group].admission, message)

    def _held_for(self, request_id: int) -> Transfer | None:
        """The transfer of devices that a request waits for."""
        for transfer in self._transfers.under_way:
            for message in transfer.held:
                if not isinstance(message, AbortRequest) and message.request.request_id == request_id:
                    return transfer
        return None

    def on_stop_request(self, message: StopRequest) -> None:
        placed = self.state.placed.get(message.request_id)
        if placed is not None:
            self.send(self._groups[placed.group].decode, message)

    def on_requests_joined(self, message: RequestsJoined) -> None:
        state = self.state
        for request_id in message.request_ids:
            placed = state.placed.get(request_id)
            if placed is not None:
                stays = placed.decode_group == message.group
                state.enter(request_id, Stage.DECODING if stays else Stage.LEAVING)
            self._left_assignment(request_id)
        self._place_if_elastic()

    def on_request_migrated(self, message: RequestMigrated) -> None:
        self.state.enter(message.request_id, Stage.DECODING)
        self._place_if_elastic()

    def on_request_ended(self, message: RequestEnded) -> None:
        state = self.state
        assert self._shared.migration is not None
        self.send(self._shared.migration, message)
        if message.answer_tokens:
            state.answers += 1
            state.answer_tokens += message.answer_tokens
        state.queue.pop(message.request_id, None)
        state.forget(message.request_id, self.now_ns())
        self._left_assignment(message.request_id)
        self._place_if_elastic()

    def _left_assignment(self, request_id: int) -> None:
        """Its prompt is computed, or nobody wants it: helpers go with the last one."""
        for assignment in self.state.assignments:
            if assignment.left.pop(request_id, 0) != 0:
                continue
            if not assignment.left:
                self.state.assignments.remove(assignment)
                self.state.measure(assignment, self._fleet.units, self.now_ns())
                self._transfers.shrink(assignment.group, assignment.helpers)
            return

    # --- asking the policy ---

    def _place_if_elastic(self) -> None:
        if self._fleet.elastic or self.state.queue:
            self._place()

    def _place(self) -> None:
        if self.state.ready < len(self._groups):
            return
        for _ in range(ROUNDS_MAX):
            if not self._apply(self._answer()):
                break
        self._ensure_progress()

    def _answer(self) -> PlaceAnswer:
        if not self.state.decider.policy.places:
            return self._least_loaded()
        return self.state.decider.place(self._view())

    def _view(self) -> PlaceView:
        state, fleet = self.state, self._fleet
        return PlaceView(
            now_ns=self.now_ns(),
            queue=state.queue_views(),
            waiting=len(state.queue),
            groups=tuple(
                state.group_view(group, member.devices, member.leaving)
                for group, member in enumerate(self._transfers.members)
            ),
            layers=fleet.layers,
            units=fleet.units,
            elastic=fleet.elastic,
            page_tokens=PAGE_SIZE,
            page_bytes=fleet.page_bytes,
            link_bytes_per_ns=fleet.link_bytes_per_ns,
            answer_tokens=state.answer_tokens / state.answers if state.answers else 0.0,
            width_factors=tuple(state.width_factors),
            estimates=state.estimates,
        )

    def _least_loaded(self) -> PlaceAnswer:
        """Of a policy that does not say: each request to the group with the least to do, all of it there."""
        head = next(iter(self.state.queue), None)
        awake = [group for group in range(len(self._groups)) if self._transfers.is_awake(group)]
        if head is None or not awake:
            return PlaceAnswer(())
        loads = self.state.loads
        group = min(awake, key=lambda group: (loads[group].waiting + loads[group].decoding, group))
        return PlaceAnswer((Assign((head,), group),))

    def _apply(self, answer: PlaceAnswer) -> bool:
        """Do what can be done; False when nothing was."""
        done = False
        for action in answer.actions:
            legal = self._do(action)
            self.state.counts[type(action).__name__.lower() if legal else "illegal actions"] += 1
            done = done or legal
        return done

    def _do(self, action: Assign | Grow | Shrink | Move) -> bool:
        match action:
            case Assign():
                return self._assign(action)
            case Grow():
                return self._may_grow(action.group, action.devices) and self._grow(action)
            case Shrink():
                return self._shrink(action)
            case Move():
                return self._move(action)

    # --- what policies want ---

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
                and self.state.loads[device].idle
                for device in devices
            )
        )

    def _grow(self, action: Grow) -> bool:
        self._transfers.grow(action.group, action.devices, action.devices)
        return True

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
        placed = self.state.placed
        moving = [
            request_id
            for request_id, known in placed.items()
            if known.group == action.group and known.stage is Stage.DECODING
        ]
        for request_id in moving:
            self.state.move(request_id, action.to)
        if moving:
            self.send(self._groups[action.group].decode, MoveDecode(action.to))
        return bool(moving)

    def _assign(self, action: Assign) -> bool:
        state, group = self.state, action.group
        messages = [state.queue[request] for request in action.requests if request in state.queue]
        decode_group = group if action.decode is None else action.decode
        awake = self._transfers.is_awake(group) and self._transfers.is_awake(decode_group)
        if not messages or not awake or (action.devices and not self._may_grow(group, action.devices)):
            return False
        began_ns = self.now_ns() if state.loads[group].idle else None
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
            self.state.assignments.append(assignment)
        if action.devices:
            with_pages = [device for device in action.devices if device in kept]
            self._transfers.grow(action.group, action.devices, with_pages).held.extend(messages)
            return
        for message in messages:
            self.send(self._groups[action.group].admission, message)

    def _ensure_progress(self) -> None:
        """When everybody is idle and somebody waits, the first one goes somewhere."""
        state, transfers = self.state, self._transfers
        if not state.queue or transfers.under_way or not all(load.idle for load in state.loads):
            return
        head = next(iter(state.queue))
        awake = [group for group in range(len(self._groups)) if transfers.is_awake(group)]
        state.counts["forced placements"] += 1
        self._assign(Assign((head,), awake[0], self._needed(head, awake)))

    def _needed(self, request_id: int, awake: list[int]) -> tuple[int, ...]:
        """Devices that a long prompt needs beside the first awake group's own."""
        if not self._fleet.elastic:
            return ()
        pages = prefill_tokens(self.state.queue[request_id].request) // PAGE_SIZE + 1
        member = self._transfers.members[awake[0]]
        missing = -(-pages // self._fleet.pages) - len(member.with_pages)
        alone = [group for group in awake[1:] if self._transfers.members[group].devices == (group,)]
        return tuple(alone[: max(0, missing)])

    # --- devices on their way ---

    def on_device_released(self, message: DeviceReleased) -> None:
        self._transfers.released(message.group, message.device)

    def on_group_resized(self, message: GroupResized) -> None:
        self._ended_transfer(self._transfers.resized(message.group))

    def on_devices_taken(self, message: DevicesTaken) -> None:
        self._ended_transfer(self._transfers.taken(message.group))

    def _ended_transfer(self, transfer: Transfer | None) -> None:
        if transfer is None:
            return
        for device in transfer.devices:
            self.state.loads[device].since_ns = self.now_ns()
        self._place()

    # --- facts ---

    def on_estimator_ready(self, message: EstimatorReady) -> None:
        self.state.ready += 1
        if self.state.ready == len(self._groups):
            self.send(self._shared.gateway, message)
            self._place()

    def on_kv_changed(self, message: KvChanged) -> None:
        kv = message.kv
        self.state.loads[message.group].kv = kv
        if self._fleet.elastic and kv.pages_free < SHORT_OF_PAGES * kv.pages_total:
            self._place()

    def on_estimates_changed(self, message: EstimatesChanged) -> None:
        if message.group == 0:
            self.state.estimates = message.estimates

    def on_policy_changed(self, message: PolicyChanged) -> None:
        """One that does not place has no use for devices that work together."""
        state = self.state
        state.decider.use(message.sha)
        for request_id, waiting in list(state.queue.items()):
            request = classified(waiting.request, state.decider)
            state.queue[request_id] = msgspec.structs.replace(waiting, request=request)
        if not state.decider.policy.places:
            for group, member in enumerate(self._transfers.members):
                self._transfers.shrink(group, member.devices)
        self._place()

    def on_report_requests(self, message: ReportRequests) -> None:
        report = StatusReport("placement", message.request_ids)
        for place, request_id in enumerate(self.state.queue):
            if report.wants(request_id):
                detail = f"no device was chosen for it yet; {place} requests came before it"
                report.add(request_id, Reason.PLACING, detail)
        for transfer in self._transfers.under_way:
            for held in transfer.held:
                if not isinstance(held, AbortRequest) and report.wants(held.request.request_id):
                    detail = f"it waits for devices {transfer.devices} to join device {transfer.target}"
                    report.add(held.request.request_id, Reason.PLACING, detail)
        self.send(self._shared.gateway, RequestsReported.of(report, message.ticket))

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._shared.gateway, StateReported(message.ticket, "placement", self.describe()))

    def describe(self) -> dict[str, Any]:
        state = self.state
        views = [
            state.group_view(group, member.devices) for group, member in enumerate(self._transfers.members)
        ]
        return {
            "waiting": len(state.queue),
            "placed": len(state.placed),
            "groups": [
                {
                    "devices": list(view.devices),
                    "waiting": view.waiting,
                    "pending_tokens": view.pending_tokens,
                    "incoming": view.incoming,
                    "decoding": view.decoding,
                    "promised_pages": view.promised_pages,
                }
                for view in views
            ],
            "transfers": len(self._transfers.under_way),
            "width_factors": [round(factor, 3) for factor in state.width_factors],
            "counts": dict(sorted(state.counts.items())),
            "rules": dict(sorted(state.decider.counts.items())),
        }
