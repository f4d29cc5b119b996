"""Devices on their way between groups: in which order who lets go of them and who takes them.

A device leaves a group when no page of it is in use and no item of the group's former width is in flight;
then the next group gets its pages and its width. All of that is asked by messages, and each answer moves a
transfer on. placement owns the one object of this class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from muxk.actors.group_messages import ReleaseDevice, TakeDevices
from muxk.actors.messages import AbortRequest, AdmitRequest, RecomputeRequest
from muxk.actors.refs import Refs
from muxk.kernel.actor import Context
from muxk.kernel.messages import ResizeGroup


class Step(StrEnum):
    """What a transfer waits for."""

    PAGES = "pages"
    """No page of the devices is in use."""
    ITEMS = "items"
    """Nothing of the old width is in flight."""
    TAKEN = "taken"
    """The group that gets them has its pages and its width."""


@dataclass
class Transfer:
    """Some devices, from their own groups to another one or back."""

    target: int
    """The group that gets them; of a return each device's own."""
    devices: tuple[int, ...]
    with_pages: tuple[int, ...]
    """Those among them whose pages the group uses; the others only compute."""
    source: int | None = None
    """The group that gives them back; None: each comes from its own."""
    step: Step = Step.PAGES
    waits: int = 0
    """Answers that are missing in this step."""
    recalled: bool = False
    """Its devices go home as soon as they are there."""
    held: list[AdmitRequest | RecomputeRequest | AbortRequest] = field(default_factory=list)
    """For the target's admission, when it has the devices."""


@dataclass
class Membership:
    """The devices of a group."""

    devices: tuple[int, ...]
    """Ascending; empty while its own works elsewhere."""
    with_pages: tuple[int, ...]
    leaving: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return len(self.devices)


class Transfers:
    """Who has which device, and what is under way."""

    def __init__(
        self, groups: tuple[Refs, ...], context: Context, needed: Callable[[int], int] = lambda group: 1
    ) -> None:
        """`needed` says of a group how many devices with pages it has to keep for what it was sent."""
        self._groups = groups
        self._needed = needed
        self._context = context
        self.members = [Membership((group,), (group,)) for group in range(len(groups))]
        self.under_way: list[Transfer] = []
        self._resizing: list[deque[Transfer]] = [deque() for _ in groups]
        """By group, the transfers that wait for its arbiter, in order."""
        self._taking: list[deque[Transfer]] = [deque() for _ in groups]
        """And for its kv_pool to have the pages."""

    def is_moving(self, device: int) -> bool:
        return any(device in transfer.devices for transfer in self.under_way)

    def is_awake(self, group: int) -> bool:
        """It has its own device, now and when all is done."""
        return group in self.members[group].devices and not self.is_moving(group)

    def grow(self, group: int, devices: tuple[int, ...], with_pages: Sequence[int]) -> Transfer:
        """Take devices from their own groups, which have nothing to do, for another one."""
        transfer = Transfer(group, devices, tuple(d for d in devices if d in with_pages))
        self.under_way.append(transfer)
        for device in devices:
            self.members[device] = Membership((), ())
            transfer.waits += 1
            self._send_kv(device, ReleaseDevice(device))
        return transfer

    def shrink(self, group: int, devices: Sequence[int]) -> None:
        """Give devices back to their own groups, as soon as that can be; not those whose pages it needs."""
        member = self.members[group]
        going = self.spare(group, devices)
        member.leaving += going
        for device in going:
            transfer = Transfer(device, (device,), (device,), source=group)
            self.under_way.append(transfer)
            if device in member.with_pages:
                member.with_pages = tuple(other for other in member.with_pages if other != device)
                transfer.waits = 1
                self._send_kv(group, ReleaseDevice(device))
            else:
                self._pages_are_free(transfer)

    def spare(self, group: int, devices: Sequence[int]) -> tuple[int, ...]:
        """Those of the devices that a group can give back."""
        member = self.members[group]
        spare_pages = len(member.with_pages) - self._needed(group)
        going: list[int] = []
        for device in devices:
            if device not in member.devices or device == group or device in (*member.leaving, *going):
                continue
            if device in member.with_pages:
                if spare_pages < 1:
                    continue
                spare_pages -= 1
            going.append(device)
        return tuple(going)

    @property
    def all_at_home(self) -> bool:
        """Each device is a group of its own."""
        return all(member.devices == (group,) for group, member in enumerate(self.members))

    def recall(self) -> None:
        """Give all devices back to their own groups, those as well that are on their way to another one."""
        for group, member in enumerate(self.members):
            self.shrink(group, member.devices)
        for transfer in self.under_way:
            transfer.recalled = transfer.source is None

    # --- answers ---

    def released(self, group: int, device: int) -> None:
        """kv_pool of a group: no page of the device is in use."""
        for transfer in self.under_way:
            giver = device if transfer.source is None else transfer.source
            if transfer.step is Step.PAGES and device in transfer.devices and giver == group:
                transfer.waits -= 1
                if transfer.waits == 0:
                    self._pages_are_free(transfer)
                return
        raise AssertionError(f"nobody asked group {group} for device {device}")

    def _pages_are_free(self, transfer: Transfer) -> None:
        transfer.step = Step.ITEMS
        if transfer.source is None:
            for device in transfer.devices:
                self._resize(device, 0, transfer)
            return
        member = self.members[transfer.source]
        member.devices = tuple(d for d in member.devices if d not in transfer.devices)
        member.leaving = tuple(d for d in member.leaving if d not in transfer.devices)
        self._resize(transfer.source, member.width, transfer)

    def resized(self, group: int) -> Transfer | None:
        """arbiter of a group: it works with its new width only. A transfer that ended by that."""
        return self._answered(self._resizing[group].popleft())

    def taken(self, group: int) -> Transfer | None:
        """kv_pool of a group: it has the pages. A transfer that ended by that."""
        return self._answered(self._taking[group].popleft())

    def _answered(self, transfer: Transfer) -> Transfer | None:
        transfer.waits -= 1
        if transfer.waits:
            return None
        if transfer.step is Step.ITEMS:
            self._take(transfer)
            return None
        self.under_way.remove(transfer)
        for message in transfer.held:
            self._context.send(self._groups[transfer.target].admission, message)
        if transfer.recalled:
            self.shrink(transfer.target, transfer.devices)
        return transfer

    def _take(self, transfer: Transfer) -> None:
        transfer.step = Step.TAKEN
        member = self.members[transfer.target]
        member.devices = tuple(sorted((*member.devices, *transfer.devices)))
        if transfer.with_pages:
            member.with_pages = tuple(sorted((*member.with_pages, *transfer.with_pages)))
            transfer.waits += 1
            self._taking[transfer.target].append(transfer)
            self._send_kv(transfer.target, TakeDevices(transfer.with_pages))
        self._resize(transfer.target, member.width, transfer)

    def _resize(self, group: int, width: int, transfer: Transfer) -> None:
        transfer.waits += 1
        self._resizing[group].append(transfer)
        self._context.send(self._groups[group].arbiter, ResizeGroup(width))

    def _send_kv(self, group: int, message: ReleaseDevice | TakeDevices) -> None:
        self._context.send(self._groups[group].kv_pool, message)
