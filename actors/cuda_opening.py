"""From a model's name to a CUDA device that holds it: memory shared out, weights loaded, lanes, graphs.

What is asked of a card goes through `CardAccess`, so that the same code opens one that is not there. torch is
imported with this module, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from muxk.actors.backends import Backend, Progress, StartupError
from muxk.actors.tokenizer import Tokenizer
from muxk.kernel.device import DeviceLost
from muxk.kernel.devices.cuda import CudaDevice, Opened
from muxk.kernel.devices.cuda_driver import CudaError, CudaUnavailable, open_driver
from muxk.kernel.devices.cuda_graphs import BUCKETS
from muxk.kernel.devices.cuda_memory import DoesNotFitOnCard, plan_memory
from muxk.kernel.devices.cuda_partition import PartitionRefused, Partitions, open_partitions
from muxk.kernel.devices.cuda_streams import CudaStreams, TorchStreams
from muxk.kernel.work import PAGE_SIZE
from muxk.models import cuda_load
from muxk.models.config import ModelConfig
from muxk.models.cuda_lane import release_memory
from muxk.models.errors import ModelError
from muxk.models.load import open_weights
from muxk.models.resolve import resolve_model
from muxk.models.tokenizer import load_tokenizer


@dataclass(frozen=True)
class CardAccess:
    """What opening needs of a card."""

    index: int
    torch_device: str
    """As torch names it: `cuda:0`."""
    capability: tuple[int, int]
    partitions: Callable[[], Partitions]
    streams: Callable[[], CudaStreams]


@dataclass(frozen=True)
class CardModel:
    """What is to be served."""

    name: str
    config: ModelConfig
    dtype: str
    """`auto`, `bf16` or `fp16`."""
    weights: cuda_load.MakeWeights
    tokenizer: Tokenizer
    kv_tokens: int | None
    """Of the KV pool; None for all that fit."""
    rows_max: int = cuda_load.ROWS_MAX
    """Rows of a decode step that lanes and graphs are made for; larger steps run too, more slowly."""


def open_card(index: int, model: str, dtype: str, kv_tokens: int | None, progress: Progress) -> Backend:
    """The card of an index with a model of the user's. Raises StartupError."""
    try:
        card = open_driver().card(index)
        source = resolve_model(model)
        known = CardModel(
            name=model,
            config=open_weights(source).config,
            dtype=dtype,
            weights=partial(cuda_load.open_card_weights, source),
            tokenizer=load_tokenizer(source),
            kv_tokens=kv_tokens,
        )
    except (ModelError, CudaError, CudaUnavailable) as error:
        raise StartupError(str(error)) from error
    return open_on_card(real_access(index, card.capability), known, progress)


def real_access(index: int, capability: tuple[int, int]) -> CardAccess:
    """The card that CUDA counts as `index`."""
    return CardAccess(
        index=index,
        torch_device=f"cuda:{index}",
        capability=capability,
        partitions=partial(open_partitions, index),
        streams=partial(TorchStreams, index),
    )


def open_on_card(access: CardAccess, model: CardModel, progress: Progress) -> Backend:
    """Raises StartupError, with the bytes where the model does not fit."""
    opening = _Opening(access, model, progress)
    try:
        opened = opening.open()
    except (ModelError, DoesNotFitOnCard, PartitionRefused, CudaError) as error:
        raise StartupError(str(error)) from error
    device = CudaDevice(f"cuda:{access.index}", opened, opening.open_again)
    try:
        device.prepare(progress)
    except Exception as error:
        device.close()
        raise StartupError(f"the lanes of {device.name} could not be opened: {error}") from error
    limit = min(model.config.max_context_tokens, (device.pages - 1) * PAGE_SIZE)
    return Backend(device, model.tokenizer, model.name, limit)


class _Opening:
    """Opens a card with a model, as often as it has to be."""

    def __init__(self, access: CardAccess, model: CardModel, progress: Progress) -> None:
        self._access = access
        self._model = model
        self._progress = progress
        self._pages: int | None = None
        """As many as when it was opened first: the actors were built for them."""

    def open(self) -> Opened:
        """Partitions first, for their contexts take memory; the weights once it is known that they fit."""
        streams = self._access.streams()
        streams.bind()
        partitions = self._access.partitions()
        try:
            return self._open(streams, partitions)
        except BaseException:
            partitions.close()
            raise

    def open_again(self) -> Opened:
        """After a loss. Raises DeviceLost where the context itself is gone, which no call brings back."""
        fault = self._access.streams().fault()
        if fault is not None:
            raise DeviceLost(fault)
        self._progress = lambda what, done: None
        release_memory()
        return self.open()

    def _open(self, streams: CudaStreams, partitions: Partitions) -> Opened:
        model, access = self._model, self._access
        dtype = cuda_load.card_dtype(model.dtype, access.capability)
        free, total = streams.memory()
        units, splits = partitions.units, len(partitions.splits())
        needs, chunk = cuda_load.card_needs(model.name, model.config, dtype, total, units, splits)
        pages = _pages(model.kv_tokens) if self._pages is None else self._pages
        plan = plan_memory(free, total, needs, pages)
        self._pages = plan.pages
        runner = cuda_load.load_cuda_runner(
            model.weights(access.torch_device, dtype),
            access.torch_device,
            dtype,
            device_units=partitions.units,
            pages=plan.pages,
            chunk_tokens_max=chunk,
            rows_max=model.rows_max,
            progress=self._loaded,
        )
        rows = tuple(bucket for bucket in BUCKETS if bucket <= model.rows_max)
        return Opened(streams, partitions, runner, plan.graphs, rows, plan.describe())

    def _loaded(self, done: int, total: int, what: str) -> None:
        self._progress(f"loading {what}", done / max(1, total))


def _pages(kv_tokens: int | None) -> int | None:
    """Pages for so many tokens, and page 0."""
    if kv_tokens is None:
        return None
    if kv_tokens < PAGE_SIZE:
        raise StartupError(f"--kv-tokens {kv_tokens} is less than one page of {PAGE_SIZE} tokens")
    return kv_tokens // PAGE_SIZE + 1
