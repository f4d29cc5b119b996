"""Messages of a server with several devices, in the order of a request's life (sender -> receiver).

A group is named by the number of the device that leads it, see `kernel/placing.py`. With one device none of
these is ever sent.
"""

from __future__ import annotations

from muxk.actors.messages import AdmitRequest, RecomputeRequest, Request, ReservedRequest
from muxk.kernel.actor import Message


class FetchPrefix(Message, frozen=True):
    """placement -> migration: copy the prefix of a request that its group of decode has to the one that
    computes its prompt, then hand it to admission there."""

    admitted: AdmitRequest | RecomputeRequest
    source: int
    target: int


class PinPrefix(Message, frozen=True):
    """migration -> kv_pool of the source: hold what the index has of a prompt."""

    request: Request


class PrefixPinned(Message, frozen=True):
    """kv_pool -> migration: `ReleasePages` gives them back; without pages nothing is held."""

    request_id: int
    pages: tuple[int, ...]


class MakeRoom(Message, frozen=True):
    """migration -> kv_pool of the target: pages for so many at the front of a request."""

    request: Request
    pages: int


class RoomMade(Message, frozen=True):
    """kv_pool -> migration: `PrefixArrived` gives them back."""

    request_id: int
    pages: tuple[int, ...] | None
    """None, and nothing is held, where there are too few."""
    present: int
    """Pages at the front whose KV this pool has already."""


class PrefixArrived(Message, frozen=True):
    """migration -> kv_pool of the target: the request is to come for so many pages at the front; those behind
    them hold nothing."""

    request_id: int
    pages: int


class PrefixKept(Message, frozen=True):
    """kv_pool -> migration: it may be reserved pages from now on."""

    request_id: int


class PrefixUnwanted(Message, frozen=True):
    """migration -> kv_pool of the target: the request has ended, whether it came for its prefix or not."""

    request_id: int


class RequestsJoined(Message, frozen=True):
    """decode -> placement: their prompts are computed."""

    group: int
    request_ids: tuple[int, ...]


class MoveDecode(Message, frozen=True):
    """placement -> decode: hand the rows of the running batch to another group."""

    to: int


class MigrateRequest(Message, frozen=True):
    """decode -> migration: no item in flight touches its pages; migration releases them."""

    source: int
    target: int
    reserved: ReservedRequest
    """Its request has all tokens whose KV is written."""
    token: int
    """The one after them, which the client has."""
    keep: bool
    """The pages it leaves go into the prefix index."""


class ReceiveRequest(Message, frozen=True):
    """migration -> kv_pool: pages for the KV of a request that comes from another group."""

    request: Request


class RequestReceived(Message, frozen=True):
    """kv_pool -> migration: the answer."""

    request_id: int
    group: int
    pages: tuple[int, ...] | None
    """None while there are too few; `RoomFreed` follows when some come back."""
    reused_tokens: int
    """At the front, whose KV this pool has already."""


class RoomFreed(Message, frozen=True):
    """kv_pool -> migration: pages came back after a denial."""

    group: int


class ResumeDecode(Message, frozen=True):
    """migration -> decode: a request whose KV has arrived."""

    reserved: ReservedRequest
    token: int


class RequestMigrated(Message, frozen=True):
    """migration -> placement: it decodes in another group from now on."""

    request_id: int
    group: int


class RequestEnded(Message, frozen=True):
    """gateway -> placement -> migration: it had its terminal event; nobody keeps books on it any more."""

    request_id: int
    answer_tokens: int


class ReleaseDevice(Message, frozen=True):
    """placement -> kv_pool: give out no page of this device any more, and tell when none is in use."""

    device: int


class DeviceReleased(Message, frozen=True):
    """kv_pool -> placement: no page of the device is in use."""

    group: int
    device: int


class TakeDevices(Message, frozen=True):
    """placement -> kv_pool: the pages of these devices are yours."""

    devices: tuple[int, ...]


class DevicesTaken(Message, frozen=True):
    """kv_pool -> admission -> placement: the pages are there, and whoever asks for them knows."""

    group: int
