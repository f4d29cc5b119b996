"""Parts of a CUDA device: pairs of green contexts on disjoint SMs, one pair a split, with a stream on each.

All pairs exist from start to end: to change the split is to choose other streams. The driver decides which
SMs a context gets, so their number is read back, and a number that differs is an error and not a smaller
partition. Where there are no green contexts, two prioritised streams share the whole device and `why_not`
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from muxk.kernel.devices.cuda_driver import (
    CallMissing,
    Card,
    CudaError,
    Driver,
    GreenContext,
    SmResource,
    Stream,
    open_driver,
    stream_handle,
    version_text,
)
from muxk.kernel.devices.cuda_granularity import (
    Granularity,
    Support,
    default_menu,
    green_support,
    no_green_contexts,
    refusal,
)
from muxk.kernel.work import Phase, Split

STRUCTURED_VERSION = 13010
"""The CUDA whose drivers can split into groups of different sizes."""
MENU_MAX = 16
"""Splits of one device: each holds two contexts, and decode graphs of its own."""
NO_SUCH_SPLIT_CODES = ("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "CUDA_ERROR_INVALID_VALUE")
"""How the structured split says that it can not make this one."""


class PartitionRefused(Exception):
    """The device can not be parted like this; the text is for the user."""


class PartitionsBusy(Exception):
    """Streams were to be destroyed while work runs on them."""


class Part(msgspec.Struct, frozen=True):
    """A split whose two partitions exist."""

    split: Split
    method: str
    """The call that made it: `structured` (since CUDA 13.1) or `by count`."""


class Description(msgspec.Struct, frozen=True):
    """What was asked of the driver and what it gave."""

    card: str
    capability: tuple[int, int]
    driver: str
    """The CUDA that it implements, as `13.0`."""
    units: int
    granularity: Granularity | None
    parts: tuple[Part, ...]
    priorities: tuple[int, int]
    """Of prefill's and decode's streams; a lower number runs first."""
    why_not: str | None


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
        """A `Description`, as plain values for the state and for JSON."""

    def close(self) -> None:
        """Destroy the streams, then their contexts. Idempotent.

        Raises:
            PartitionsBusy: work is in flight; nothing was destroyed.
            CudaError: the first failure, after everything has been tried.
        """


def open_partitions(device_index: int, menu: Sequence[int] | None = None) -> Partitions:
    """Make a pair of green contexts for each entry of the menu, and a pair of streams on the whole device.

    Args:
        device_index: as CUDA counts them, after CUDA_VISIBLE_DEVICES.
        menu: SMs of the decode partition of each split; None for those that suit the device.

    Raises:
        PartitionRefused: an entry is below the minimum, off the alignment or above the device; or the driver
            gave another number of SMs than was asked.
        CudaUnavailable: there is no driver here.
        CudaError: the driver failed. In all cases nothing is left behind.
    """
    if menu is not None and len(menu) > MENU_MAX:
        raise PartitionRefused(f"a menu of {len(menu)} splits was asked for, and {MENU_MAX} are the most")
    driver = open_driver()
    maker = _Maker(driver, driver.card(device_index))
    try:
        return _part(maker, menu)
    except BaseException:
        maker.undo()
        raise


def _part(maker: _Maker, menu: Sequence[int] | None) -> CudaPartitions:
    whole_device = maker.pair_on_all()
    mark = maker.mark()
    support = green_support(maker.driver, maker.card)
    why_not = support.why_not
    pairs: tuple[_Pair, ...] = ()
    try:
        if why_not is None:
            pairs = tuple(maker.pair(*cut) for cut in _cuts(maker, support, menu))
    except CudaError as error:
        why_not = no_green_contexts(error)
        failure = maker.undo(mark)
        if failure is not None:
            raise failure from error
    return CudaPartitions(maker, support.granularity, pairs, whole_device, why_not)


class _Cut(NamedTuple):
    """The SMs of a split's two partitions, no context on them yet."""

    decode: SmResource
    prefill: SmResource
    method: str


class _Pair(NamedTuple):
    """A stream for each phase."""

    part: Part
    decode: Stream
    prefill: Stream


def _cuts(maker: _Maker, support: Support, menu: Sequence[int] | None) -> list[_Cut]:
    """The cuts of a menu, ascending in decode units and none twice. Raises PartitionRefused."""
    assert support.whole is not None, "a device with green contexts has SMs"
    assert support.granularity is not None, "SMs come with their granularity"
    units, name = support.whole.units, maker.card.name
    asked = default_menu(units, support.granularity) if menu is None else tuple(sorted(set(menu)))
    cuts: dict[int, _Cut] = {}
    for count in asked:
        wrong = refusal(count, units, support.granularity)
        if wrong is not None:
            raise PartitionRefused(f"a decode partition of {count} SMs can not be had on {name}: {wrong}")
        cut = maker.cut(support.whole, count)
        if menu is not None and cut.decode.units != count:
            raise PartitionRefused(
                f"a decode partition of {count} SMs was asked for on {name}, and the driver would make one "
                f"of {cut.decode.units}: ask for that"
            )
        if cut.decode.units + cut.prefill.units > units:
            raise PartitionRefused(f"the driver made partitions of {name} that overlap: {_counts(cut)}")
        if cut.prefill.units >= support.granularity.minimum:
            cuts[cut.decode.units] = cut
    return list(cuts.values())


def _counts(cut: _Cut) -> str:
    return f"{cut.decode.units} and {cut.prefill.units} SMs"


class _Maker:
    """Makes streams and contexts on one device, and remembers how to destroy them: the last goes first, so
    that a stream goes before its context and every context before the primary one below it."""

    def __init__(self, driver: Driver, card: Card) -> None:
        self.driver = driver
        self.card = card
        self.version = driver.version()
        self.streams: list[Stream] = []
        self._undos: list[Callable[[], None]] = []
        self._primary = driver.retain_primary(card.index)
        self._undos.append(lambda: driver.release_primary(card.index))
        try:
            with driver.current(self._primary):
                self.least, self.greatest = driver.priorities()
        except BaseException:
            self.undo()
            raise

    def mark(self) -> int:
        """How much has been made, for `undo`."""
        return len(self._undos)

    def undo(self, mark: int = 0) -> CudaError | None:
        """Destroy what was made since the mark, whatever fails on the way; returns the first failure."""
        failure: CudaError | None = None
        while len(self._undos) > mark:
            try:
                self._undos.pop()()
            except CudaError as error:
                failure = failure or error
        return failure

    def cut(self, whole: SmResource, units: int) -> _Cut:
        """Divide the SMs, `units` of them or a few more for decode."""
        if self.version >= STRUCTURED_VERSION:
            try:
                return _Cut(*self.driver.split_structured(whole, units), "structured")
            except CudaError as error:
                if not isinstance(error, CallMissing) and error.code not in NO_SUCH_SPLIT_CODES:
                    raise
        return _Cut(*self.driver.split_by_count(whole, units), "by count")

    def pair(self, decode: SmResource, prefill: SmResource, method: str) -> _Pair:
        """A context and a stream for each phase on SMs of its own."""
        streams = (
            self._green_stream(decode, Phase.DECODE, self.greatest),
            self._green_stream(prefill, Phase.PREFILL, self.least),
        )
        return _Pair(Part(Split(decode.units, prefill.units), method), *streams)

    def _green_stream(self, sms: SmResource, phase: Phase, priority: int) -> Stream:
        context = self.driver.green_context(self.card.index, sms)
        self._undos.append(lambda: self.driver.destroy_green(context))
        self._check_units(context, sms.units, phase)
        return self._kept(self.driver.green_stream(context, priority))

    def _check_units(self, context: GreenContext, units: int, phase: Phase) -> None:
        given = self.driver.green_units(context)
        if given != units:
            raise PartitionRefused(
                f"the {phase} partition of {self.card.name} was to have {units} SMs, and its context has "
                f"{given}: muxk does not serve on partitions that are not what they say"
            )

    def pair_on_all(self) -> tuple[Stream, Stream]:
        """Streams of decode and of prefill on the whole device."""
        with self.driver.current(self._primary):
            decode = self._kept(self.driver.plain_stream(self.greatest))
            return decode, self._kept(self.driver.plain_stream(self.least))

    def _kept(self, stream: Stream) -> Stream:
        self.streams.append(stream)
        self._undos.append(lambda: self._destroy_stream(stream))
        return stream

    def _destroy_stream(self, stream: Stream) -> None:
        self.streams.remove(stream)
        with self.driver.current(self._primary):
            self.driver.destroy_stream(stream)

    def busy(self) -> int:
        """Streams on which work has not ended."""
        return sum(self.driver.stream_busy(stream) for stream in self.streams)


class CudaPartitions:
    """See `Partitions`."""

    def __init__(
        self,
        maker: _Maker,
        granularity: Granularity | None,
        pairs: Sequence[_Pair],
        whole_device: tuple[Stream, Stream],
        why_not: str | None,
    ) -> None:
        self._maker = maker
        self._granularity = granularity
        self._parts = tuple(pair.part for pair in pairs)
        self._why_not = why_not
        self._streams = self._by_phase_and_units(pairs, *whole_device)

    def _by_phase_and_units(
        self, pairs: Sequence[_Pair], decode: Stream, prefill: Stream
    ) -> Mapping[tuple[Phase, int], int]:
        streams = {
            (Phase.DECODE, self.units): stream_handle(decode),
            (Phase.PREFILL, self.units): stream_handle(prefill),
        }
        for part, own_decode, own_prefill in pairs:
            streams[Phase.DECODE, part.split.decode_units] = stream_handle(own_decode)
            streams[Phase.PREFILL, part.split.prefill_units] = stream_handle(own_prefill)
        if self._why_not is not None:
            for split in self.splits():
                streams[Phase.DECODE, split.decode_units] = stream_handle(decode)
                streams[Phase.PREFILL, split.prefill_units] = stream_handle(prefill)
        return streams

    @property
    def units(self) -> int:
        return self._maker.card.units

    @property
    def why_not(self) -> str | None:
        return self._why_not

    def splits(self) -> tuple[Split, ...]:
        if self._why_not is None:
            return tuple(part.split for part in self._parts)
        half = self.units // 2
        return (Split(half, self.units - half),) if half else ()

    def streams(self, phase: Phase, units: int) -> int:
        try:
            return self._streams[phase, units]
        except KeyError:
            known = ", ".join(str(own) for owner, own in sorted(self._streams) if owner is phase)
            raise PartitionRefused(f"no {phase} partition has {units} SMs: there are {known}") from None

    def describe(self) -> Mapping[str, object]:
        card = self._maker.card
        described = Description(
            card=card.name,
            capability=card.capability,
            driver=version_text(self._maker.version),
            units=card.units,
            granularity=self._granularity,
            parts=self._parts,
            priorities=(self._maker.least, self._maker.greatest),
            why_not=self._why_not,
        )
        plain: dict[str, object] = msgspec.to_builtins(described)
        return plain

    def close(self) -> None:
        busy = self._maker.busy()
        if busy:
            raise PartitionsBusy(f"work runs on {busy} streams of {self._maker.card.name}: they stay")
        failure = self._maker.undo()
        if failure is not None:
            raise failure
