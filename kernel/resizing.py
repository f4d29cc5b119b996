"""Devices that join and leave those which work on the arbiter's items: leave only when none of those runs."""

from __future__ import annotations

from muxk.kernel.actor import Context
from muxk.kernel.arbiter_state import ArbiterRefs, ArbiterState
from muxk.kernel.device import ElasticDevice
from muxk.kernel.lanes import LaneTable
from muxk.kernel.messages import GroupResized


class Resizing:
    """Owned by the arbiter, whose state it works on."""

    def __init__(
        self,
        device: ElasticDevice | None,
        state: ArbiterState,
        lanes: LaneTable,
        refs: ArbiterRefs,
        context: Context,
    ) -> None:
        """`device` is None where placement gives it no others."""
        self._device = device
        self._state = state
        self._lanes = lanes
        self._refs = refs
        self._context = context

    def begin(self, width: int) -> None:
        """So many devices work on what is launched from now on."""
        assert self._device is not None, "only elastic devices are given others"
        self._device.resize(max(1, width))
        self._lanes.width = max(1, width)
        self._state.resizing += 1
        self.look()

    def look(self) -> None:
        """Tell placement once nothing of another width is in flight."""
        if not self._state.resizing or self._lanes.has_other_widths():
            return
        assert self._refs.placement is not None
        for _ in range(self._state.resizing):
            self._context.send(self._refs.placement, GroupResized(self._refs.group))
        self._state.resizing = 0
