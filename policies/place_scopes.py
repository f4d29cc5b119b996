"""What the rules of `place` read: one request of the queue and one device that it could go to.

Loads are counted on while an answer is made, so that the second request of a queue sees what the first one
was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from muxk.kernel.estimates import Estimates
from muxk.kernel.placing import GroupView, PlaceView
from muxk.kernel.view import RequestView
from muxk.policies.units import Type
from muxk.policies.vocabulary import Name


class DeviceLoad:
    """What a device has to do, with what this answer sends to it."""

    __slots__ = (
        "context_tokens",
        "decoding",
        "incoming",
        "number",
        "pages_free",
        "pages_total",
        "pending_tokens",
        "promised_pages",
        "waiting",
    )

    def __init__(self, group: GroupView) -> None:
        self.number = group.group
        self.waiting = group.waiting
        self.pending_tokens = group.pending_tokens
        self.incoming = group.incoming
        self.decoding = group.decoding
        self.context_tokens = group.context_tokens
        self.promised_pages = group.promised_pages
        self.pages_free = group.pages_free
        self.pages_total = group.pages_total

    @property
    def prefills(self) -> bool:
        """It has prompts to compute."""
        return self.waiting > 0

    @property
    def decodes(self) -> bool:
        """Requests decode here, or will."""
        return self.decoding > 0 or self.incoming > 0

    @property
    def idle(self) -> bool:
        return not (self.prefills or self.decodes)


class PlaceScope:
    """Scope of the expressions of `place`; `request` and `device` are put in before each is read."""

    __slots__ = ("device", "devices", "now_ns", "request", "view")

    request: RequestView
    device: DeviceLoad

    def __init__(self, view: PlaceView) -> None:
        self.view = view
        self.now_ns = view.now_ns
        self.devices = tuple(DeviceLoad(group) for group in view.groups if group.devices)
        """Those that do not sleep, by number."""

    @property
    def estimates(self) -> Estimates:
        return self.view.estimates

    @property
    def longest_pages(self) -> int:
        return pages_of(self.request, self.view)

    def send(self, request: RequestView, prefill: DeviceLoad, decode: DeviceLoad) -> None:
        """Count a request on the devices that compute its prompt and decode it."""
        prefill.waiting += 1
        prefill.pending_tokens += request.prompt_tokens + request.generated_tokens
        decode.promised_pages += pages_of(request, self.view)
        if decode is not prefill:
            decode.incoming += 1
            prefill.promised_pages += request.pages


def pages_of(request: RequestView, view: PlaceView) -> int:
    """Pages that its prompt and longest answer fill."""
    return -(-(request.prompt_tokens + request.max_tokens) // max(1, view.page_tokens))


_N = Type.NUMBER
_DEVICE = (
    ("number", "its place among the devices, from 0"),
    ("waiting", "requests that were sent to it and whose prompts are not computed"),
    ("pending_tokens", "prompt tokens of those"),
    ("incoming", "requests that will decode on it and are computed elsewhere, or on their way"),
    ("decoding", "requests that decode on it"),
    ("context_tokens", "context of those"),
    ("promised_pages", "KV pages that all of these hold or may come to need"),
    ("pages_free", "KV pages that an allocation can take"),
    ("pages_total", "KV pages of its pool"),
)
DEVICE_NAMES: Mapping[str, Name] = {
    **{f"device.{key}": Name(_N, attrgetter(f"device.{key}"), about, "", 0) for key, about in _DEVICE},
    "device.idle": Name(Type.BOOL, attrgetter("device.idle"), "it has nothing to do"),
    "devices.total": Name(_N, lambda scope: len(scope.devices), "devices of the server", "", 1),
    "estimate.known": Name(Type.BOOL, attrgetter("estimates.known"), "false until something was measured"),
    "queue.requests": Name(_N, attrgetter("view.waiting"), "requests that wait for prefill", "", 0),
    "request.longest_pages": Name(
        _N, attrgetter("longest_pages"), "KV pages that its prompt and longest answer fill", "", 1
    ),
}
"""What only the expressions of `place` may name."""
