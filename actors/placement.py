"""placement: which devices compute a prompt, and which decode it, on a server that has several.

tokenizer hands it requests; it asks the policy's `place` and sends each to the admission of a group. Requests
that are computed again come back here. It keeps books on what every group has to do, from what others tell
it, and moves devices between groups where they are elastic. Invariant: a request is in `queue`, or `placed`,
or not here; a device belongs to one group, or is on its way to one.
"""

from __future__ import annotations

from typing import Any

import msgspec
from muxk.actors.context_limits import never_fits, outgrew, room_for, with_room
from muxk.actors.group_messages import (
    DeviceReleased,
    DevicesTaken,
    RequestEnded,
    RequestMigrated,
    RequestsJoined,
)
from muxk.actors.messages import (
    AbortRequest,
    AdmitRequest,
    EstimatorReady,
    RecomputeRequest,
    RequestAborted,
    RequestFailed,
    RequestRefused,
    StopRequest,
)
from muxk.actors.placement_state import (
    GroupLoad,
    PlacementState,
    Stage,
)
from muxk.actors.placer import Fleet, Placer
from muxk.actors.refs import PlacementInbox, Refs
from muxk.actors.request_views import classified, up_to_date
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
from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.policy import PolicyBook, widest_group_of
from muxk.kernel.statuses import Reason, StatusReport
from muxk.kernel.work import PAGE_SIZE

ROUNDS_MAX = 16
"""Times that `place` is asked at one event; each answer may make another one possible."""
SHORT_OF_PAGES = 0.05
"""Share of a group's pages: with fewer free ones a policy of elastic groups is asked to do something."""


class Placement(Actor):
    """One a server with several devices."""

    Accepts = PlacementInbox

    def __init__(
        self,
        groups: tuple[Refs, ...],
        book: PolicyBook,
        policy_sha: str,
        fleet: Fleet,
        max_queue: int | None = None,
    ) -> None:
        self._groups = groups
        self._max_queue = max_queue
        self._shared = groups[0]
        self._fleet = fleet
        count = len(groups)
        self.state = PlacementState(
            decider=Decider(book, policy_sha, "placement", self.now_ns),
            loads=[GroupLoad() for _ in range(count)],
            width_factors=[1.0] * count,
        )

    def started(self) -> None:
        self._transfers = Transfers(self._groups, self.context, self._devices_needed)
        self._placer = Placer(self._groups, self._fleet, self.state, self._transfers, self.context)

    # --- requests ---

    def on_admit_request(self, message: AdmitRequest) -> None:
        limits, bound = self._context_limits(), self._queue_bound()
        refusal = never_fits(message, limits[-1])
        if refusal is not None:
            self._refuse(message, "never_fits", refusal + self._wider())
        elif len(self.state.queue) >= bound:
            reason = f"{bound} requests wait for a device already, the bound of the queue"
            self._refuse(message, "overloaded", reason)
        else:
            room = room_for(message.request.prompt_tokens, limits)
            request = classified(with_room(message, room), self.state.decider)
            self._enqueue(AdmitRequest(request, max_tokens_given=True))

    def _context_limits(self) -> tuple[int, ...]:
        """Of the groups that the policy in force forms, by their number of devices."""
        return self._fleet.limits(widest_group_of(self.state.decider.policy))

    def _wider(self) -> str:
        """What would hold a longer context here, for people."""
        most = self._fleet.context_tokens[-1]
        if most == self._context_limits()[-1]:
            return ""
        name = self.state.decider.policy.name
        return (
            f" under the policy {name}; one that forms larger groups, as loongserve does, takes up to {most}"
        )

    def _queue_bound(self) -> int:
        bound = self.state.decider.limits.queue_bound
        return bound if self._max_queue is None else min(bound, self._max_queue)

    def _refuse(self, message: AdmitRequest, code: str, reason: str) -> None:
        self.send(self._shared.tokenizer, RequestRefused(message.request.request_id, code, reason))

    def on_recompute_request(self, message: RecomputeRequest) -> None:
        """Somewhere else perhaps: the group that had it may have had too few pages."""
        if message.request.request_id not in self.state.placed:
            return  # it ended while it was on its way here
        self.state.forget(message.request.request_id, self.now_ns())
        request = up_to_date(message.request, self.state.decider)
        if not self._ends_outgrown(message):
            self._enqueue(RecomputeRequest(msgspec.structs.replace(request, decode_group=None)))

    def _ends_outgrown(self, message: AdmitRequest | RecomputeRequest) -> bool:
        """It is refused when another policy came into force that forms smaller groups than it needs."""
        reason = outgrew(message.request, self._context_limits()[-1])
        if reason is None:
            return False
        failed = RequestFailed(message.request.request_id, "never_fits", reason + self._wider())
        self.send(self._shared.tokenizer, failed)
        return True

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
        elif placed.by_migration and placed.stage is Stage.WAITING:
            assert self._shared.migration is not None
            self.send(self._shared.migration, msgspec.structs.replace(message, group=placed.group))
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
        """To the decode that said the text: it has it, or knows where it went."""
        self.send(self._groups[message.group].decode, message)

    def on_requests_joined(self, message: RequestsJoined) -> None:
        state = self.state
        for request_id in message.request_ids:
            placed = state.placed.get(request_id)
            if placed is not None:
                stays = placed.decode_group == message.group
                state.enter(request_id, Stage.DECODING if stays else Stage.LEAVING, self.now_ns())
            self._left_assignment(request_id)
        self._place_if_elastic()

    def on_request_migrated(self, message: RequestMigrated) -> None:
        self.state.enter(message.request_id, Stage.DECODING, self.now_ns())
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
            if request_id not in assignment.left:
                continue
            del assignment.left[request_id]
            if not assignment.left:
                self.state.assignments.remove(assignment)
                self.state.measure(assignment, self._fleet.units, self.now_ns())
                self._transfers.shrink(assignment.group, assignment.helpers)
            return

    # --- asking the policy ---

    def _devices_needed(self, group: int) -> int:
        return self._fleet.devices_for(self.state.pages_needed(group))

    def _place_if_elastic(self) -> None:
        if self.state.recalling:
            self._transfers.recall()
            self.state.recalling = not self._transfers.all_at_home
        if self._fleet.elastic or self.state.queue:
            self._place()

    def _place(self) -> None:
        if self.state.ready < len(self._groups):
            return
        for _ in range(ROUNDS_MAX):
            if not self._placer.apply(self._answer()):
                break
        self._placer.ensure_progress()

    def _answer(self) -> PlaceAnswer:
        if not self.state.decider.policy.places:
            return self._placer.least_loaded()
        return self.state.decider.place(self._view())

    def _view(self) -> PlaceView:
        state, fleet = self.state, self._fleet
        return PlaceView(
            now_ns=self.now_ns(),
            queue=state.queue_views(),
            waiting=len(state.queue),
            groups=tuple(
                state.group_view(
                    group, member.devices if self._transfers.is_awake(group) else (), member.leaving
                )
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
            overtaken=state.overtaken,
        )

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
        """Devices go back to their own groups: what is lent out is for the policy in force to say."""
        state = self.state
        state.decider.use(message.sha)
        for request_id, waiting in list(state.queue.items()):
            if self._ends_outgrown(waiting):
                del state.queue[request_id]
                continue
            request = classified(waiting.request, state.decider)
            state.queue[request_id] = msgspec.structs.replace(waiting, request=request)
        self._transfers.recall()
        state.recalling = widest_group_of(state.decider.policy) == 1
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
