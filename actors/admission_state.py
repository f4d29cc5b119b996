"""All that admission owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from muxk.actors.messages import Request
from muxk.actors.service import Service
from muxk.actors.waiting import NOBODY, Waiting
from muxk.kernel.actor import Timer
from muxk.kernel.decider import Decider
from muxk.kernel.estimates import Estimates
from muxk.kernel.view import KvView


@dataclass
class AdmissionState:
    decider: Decider
    waiting: Waiting = field(default_factory=Waiting)
    service: Service = field(default_factory=Service)
    head: Request | None = None
    """First of the queue in the policy's order, unless `head_left`."""
    head_left: bool = False
    """The head was aborted; a new one is looked for once, after the burst of aborts it may be part of."""
    reserving: dict[int, Request] = field(default_factory=dict)
    aborted_reserving: dict[int, None] = field(default_factory=dict)
    """Aborted while kv_pool decides: ended here if pages are denied, by prefill if they are given."""
    short_of_pages: bool = False
    """Pages were denied and none came back yet: forming again would only be denied again."""
    overdue_timer: Timer | None = None
    overdue_ns: int = 0
    """When that timer is due: no request becomes overdue before."""
    kv: KvView = field(default_factory=lambda: KvView(0, 0))
    estimates: Estimates = field(default_factory=Estimates)
    refused: int = 0
    accepted: int = 0

    def describe_classes(self) -> dict[str, Any]:
        """Of each class that ever waited: who waits, and tokens that it got, divided by its share."""
        waiting = self.waiting.by_class
        return {
            name: {
                "waiting": waiting.get(name, NOBODY).requests,
                "waiting_tokens": waiting.get(name, NOBODY).tokens,
                "service": round(served),
            }
            for name, served in self.service.by_class.items()
        }
