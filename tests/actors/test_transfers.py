"""Devices on their way between groups: whose answer moves whom on."""

from __future__ import annotations

from typing import Any

from muxk.actors.refs import group_refs
from muxk.actors.transfers import Transfers


class Sent:
    """A context that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []

    def send(self, ref: Any, message: Any) -> None:
        self.messages.append((ref.name, message))


def transfers(count: int) -> Transfers:
    context: Any = Sent()
    return Transfers(tuple(map(group_refs, range(count))), context)


def leave(moving: Transfers, device: int) -> None:
    """A group that has nothing to do lets go of its own device."""
    moving.released(device, device)
    moving.resized(device)


def test_two_devices_that_join_a_group_at_once_both_arrive_whatever_answers_first() -> None:
    moving = transfers(3)
    moving.grow(0, (1,), (1,))
    moving.grow(0, (2,), (2,))
    leave(moving, 1)
    leave(moving, 2)
    ended = [moving.taken(0), moving.taken(0), moving.resized(0), moving.resized(0)]
    assert [one.devices for one in ended if one is not None] == [(1,), (2,)]
    assert moving.under_way == []
    assert moving.members[0].devices == (0, 1, 2)


def test_devices_that_were_on_their_way_when_all_are_recalled_go_home_when_they_are_there() -> None:
    moving = transfers(2)
    moving.grow(0, (1,), (1,))
    moving.recall()
    leave(moving, 1)
    moving.taken(0)
    moving.resized(0)
    moving.released(0, 1)
    moving.resized(0)
    moving.taken(1)
    moving.resized(1)
    assert moving.under_way == []
    assert [member.devices for member in moving.members] == [(0,), (1,)]
