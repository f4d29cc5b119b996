"""Opening a card with a model: what fits, what is refused with the bytes, and what is left behind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import write_folder
from device_port import CollectingPort, decode_item, prefill_item
from fake_streams import GIB, FakePartitions, FakeStreams
from model_driver import RandomWeights, tiny_config
from muxk.actors.backends import StartupError
from muxk.actors.cuda_opening import CardAccess, CardModel, open_on_card
from muxk.kernel.device import ItemDone
from muxk.kernel.devices.cuda import CudaDevice
from muxk.kernel.work import Phase
from muxk.models.cuda_load import CardType, chunk_tokens, open_card_weights, weight_bytes
from muxk.models.resolve import FolderSource
from muxk.models.tokenizer import ByteTokenizer
from muxk.models.weights import Weights
from muxk.profiles.gpu_check_rig import LLAMA_8B

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA_70B = replace(LLAMA_8B, layers=80, hidden=8192, heads=64, intermediate=28_672)


@dataclass
class Card:
    """A card of eight SMs that is not there."""

    streams: FakeStreams = field(default_factory=FakeStreams)
    opened: list[FakePartitions] = field(default_factory=list)
    capability: tuple[int, int] = (9, 0)

    def access(self) -> CardAccess:
        return CardAccess(0, "cpu", self.capability, self._partitions, lambda: self.streams)

    def _partitions(self) -> FakePartitions:
        self.opened.append(FakePartitions(8, (2, 4)))
        return self.opened[-1]


@dataclass
class Told:
    """What was said while it opened."""

    labels: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def __call__(self, label: str, share: float) -> None:
        self.labels.append(label)
        self.shares.append(share)


def never(device: str, dtype: CardType) -> Weights:
    raise AssertionError("weights were read of a model that can not be served")


def model(**changes: object) -> CardModel:
    known = CardModel(
        name="made up",
        config=tiny_config(vocabulary=257),
        dtype="auto",
        weights=lambda device, dtype: RandomWeights(tiny_config(vocabulary=257)),
        tokenizer=ByteTokenizer(),
        kv_tokens=1600,
        rows_max=4,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def test_a_sharded_checkpoint_is_read_to_the_card_in_its_type_and_serves(tmp_path: Path) -> None:
    weights = RandomWeights(tiny_config(vocabulary=257))
    source = FolderSource("tiny", write_folder(tmp_path, weights, shards=3))
    read = open_card_weights(source, "cpu", torch.bfloat16).tensor("model.layers.1.mlp.up_proj.weight")
    assert read.dtype is torch.bfloat16
    assert torch.equal(read, weights.tensor("model.layers.1.mlp.up_proj.weight").bfloat16())

    card, told = Card(), Told()
    chosen = model(weights=lambda device, dtype: open_card_weights(source, device, dtype))
    backend = open_on_card(card.access(), chosen, told)
    device = backend.device
    assert isinstance(device, CudaDevice)
    assert [split.decode_units for split in device.splits()] == [2, 4]
    assert device.pages == 101
    assert backend.max_context_tokens == 512
    assert any(label.startswith("loading model.layers.2") for label in told.labels)
    assert any(label.startswith("capturing decode graphs: 4 rows") for label in told.labels)
    assert all(0.0 <= share <= 1.0 for share in told.shares)

    port = CollectingPort()
    device.start(port)
    device.launch(device.lane(Phase.PREFILL, 6), prefill_item(1, 0, 3, 3), ())
    device.launch(device.lane(Phase.DECODE, 2), decode_item(2, 3), ())
    done = [port.take(), port.take()]
    assert all(isinstance(message, ItemDone) and len(message.tokens) == 4 for message in done)
    state = device.describe()
    assert state["memory"]["kv_pages"] == 101
    assert state["graphs"]["captured"]["decode@2"] == [1, 2, 4]
    device.close()
    card.streams.close()
    assert card.opened[0].closed


def test_a_70b_on_one_card_is_refused_with_the_bytes_before_anything_is_read() -> None:
    card = Card()
    card.streams.used_bytes = -60 * GIB  # a card of 140 GiB
    large = model(name="llama-3.1-70b", config=LLAMA_70B, weights=never, kv_tokens=None)
    with pytest.raises(StartupError, match=r"llama-3.1-70b does not fit.*weights take 141,107,412,992"):
        open_on_card(card.access(), large, Told())
    assert card.opened[0].closed
    card.streams.close()


def test_an_8b_fits_beside_its_lanes_and_is_counted_as_its_checkpoint_has_it() -> None:
    assert weight_bytes(LLAMA_8B, 2) == 16_060_522_496
    assert chunk_tokens(LLAMA_8B, 2, 140 * GIB, 8) == 8192
    assert chunk_tokens(LLAMA_8B, 2, 24 * GIB, 8) == 1872  # 6 % over eight lanes
    assert chunk_tokens(tiny_config(), 2, 140 * GIB, 8) == tiny_config().max_context_tokens


@pytest.mark.parametrize(
    ("changes", "capability", "said"),
    [
        ({"dtype": "fp8"}, (9, 0), "dtype 'fp8' is not one of the cuda device: use auto, bf16 or fp16"),
        ({"dtype": "bf16"}, (7, 5), "dtype 'bf16' needs a card of capability 8.0 or later: use fp16"),
        ({"kv_tokens": 3}, (9, 0), "--kv-tokens 3 is less than one page of 16 tokens"),
    ],
)
def test_what_can_not_be_is_refused_with_what_would_be_right(
    changes: dict[str, object], capability: tuple[int, int], said: str
) -> None:
    card = Card(capability=capability)
    with pytest.raises(StartupError, match=said):
        open_on_card(card.access(), model(weights=never, **changes), Told())
    assert card.opened[0].closed
    card.streams.close()


def test_lanes_that_can_not_be_opened_leave_no_thread_and_no_stream_behind() -> None:
    card = Card()
    stream = card.streams.stream

    def third(handle: int) -> object:
        if handle == 1006:
            raise RuntimeError("CUDA error: out of memory")
        return stream(handle)

    card.streams.stream = third  # type: ignore[assignment, method-assign]
    with pytest.raises(StartupError, match="lanes of cuda:0 could not be opened: CUDA error: out of memory"):
        open_on_card(card.access(), model(), Told())
    assert card.opened[0].closed
    card.streams.close()
