"""Parts of a CUDA device: pairs of green contexts on disjoint SMs, one pair a split, with a stream on each.

All pairs exist from start to end: to change the split is to choose other streams. The driver decides which SMs a
context gets, so their number is read back, and a number that differs is an error and not a smaller partition.
Where there are no green contexts, two prioritised streams share the whole device and `why_not` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from muxk.kernel.work import Phase, Split


class PartitionRefused(Exception):
    """The device can not be parted like this; the text is for the user."""


class Partitions(Protocol):
    """The streams of a device's lanes. Made before serving, closed after the last item has ended."""

    @property
    def units(self) -> int:
        """SMs of the device, or of the MIG instance."""

    @property
    def why_not(self) -> str | None:
        """Why lanes are not disjoint; None when they are."""

    def splits(self) -> tuple[Split, ...]:
        """Ascending in decode units. With `why_not`, one nominal split, both of whose lanes use all SMs."""

    def streams(self, phase: Phase, units: int) -> int:
        """Raw `CUstream` of a phase on so many units of one of `splits()`, or of the whole device.

        Raises PartitionRefused for any other number of units.
        """

    def describe(self) -> Mapping[str, object]:
        """What was asked of the driver and what it gave, for the state and for `muxk doctor`."""

    def close(self) -> None:
        """Destroy the streams, then their contexts. Nothing may be in flight. Idempotent."""


def open_partitions(device_index: int, menu: Sequence[int] | None = None) -> Partitions:
    """Make a pair of green contexts for each entry of the menu, and a pair of streams on the whole device.

    Args:
        device_index: as CUDA counts them, after CUDA_VISIBLE_DEVICES.
        menu: SMs of the decode partition of each split; None for six to eight that suit the device.

    Raises:
        PartitionRefused: an entry is below the minimum, off the alignment or above the device; or the driver
            gave another number of SMs than was asked.
        CudaError: the driver failed; nothing is left behind.
    """
    raise NotImplementedError
