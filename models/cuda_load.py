"""From a checkpoint to a runner on a card, and what that takes of the card's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from muxk.kernel.devices.cuda_memory import MemoryNeeds
from muxk.kernel.work import PAGE_SIZE
from muxk.models.config import ModelConfig
from muxk.models.cuda_choice import attention_of, kernels_for
from muxk.models.cuda_kernels import AttentionKind, AttentionShape, distinct_windows
from muxk.models.cuda_layers import CudaOperators
from muxk.models.cuda_runner import CudaModelRunner
from muxk.models.cuda_workspace import attention_workspace_bytes
from muxk.models.errors import ModelError
from muxk.models.llama import LlamaDecoder, load_decoder, tensor_names
from muxk.models.load import open_weights
from muxk.models.ops import Heads
from muxk.models.resolve import FolderSource, Source
from muxk.models.weights import Progress, SafetensorsWeights, Weights
from torch import Tensor

CardType = torch.dtype
MakeWeights = Callable[[str, CardType], Weights]
"""(device as torch names it, type) -> a checkpoint."""

ROWS_MAX = 256
"""Rows of a decode step that lanes hold activations for, and of the largest decode graph."""
CHUNK_TOKENS = (512, 8192)
"""Least and most prompt tokens of one item."""
ACTIVATIONS_SHARE = 0.06
"""Of the card's memory, for the activations of all prefill lanes; it bounds the chunk."""
WORKSPACE_BYTES = 48 << 20
"""Of one lane beside its activations and the partial results of its attention: FlashInfer's plans (8 MiB),
cuBLAS's workspace (32 MiB a stream on Hopper), and room for the attention of a second window."""
DTYPES: Mapping[str, str] = {
    "auto": "bfloat16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}


def card_dtype(name: str, capability: tuple[int, int]) -> torch.dtype:
    """The type of weights, activations and KV. ModelError for a name that is none of a card's."""
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not one of the cuda device: use auto, bf16 or fp16")
    if DTYPES[name] == "bfloat16" and capability < (8, 0):
        if name != "auto":
            raise ModelError(f"dtype {name!r} needs a card of capability 8.0 or later: use fp16")
        return torch.float16
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


# --- bytes ---


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of all tensors of a checkpoint in a type of so many bytes."""
    return itemsize * sum(math.prod(shape_of(name, config)) for name in tensor_names(config))


def page_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of one KV page over all layers."""
    return itemsize * config.layers * 2 * PAGE_SIZE * config.kv_width


def activation_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of a token in the scratch of a lane (`cuda_layers.Scratch`)."""
    attention = 3 * config.query_width + 2 * config.kv_width
    return itemsize * (max(attention, 3 * config.intermediate) + 2 * config.hidden)


def chunk_tokens(config: ModelConfig, itemsize: int, total: int, prefill_lanes: int) -> int:
    """Prompt tokens of one item, so that the lanes' activations keep to their share of `total` bytes.

    Not more than a context, since a lane is warmed with one row of so many.
    """
    least, most = CHUNK_TOKENS
    fitting = round(total * ACTIVATIONS_SHARE) // (prefill_lanes * activation_bytes(config, itemsize))
    return min(config.max_context_tokens, max(least, min(most, fitting // PAGE_SIZE * PAGE_SIZE)))


def lanes_bytes(
    config: ModelConfig, itemsize: int, chunk: int, units: int, decode_lanes: int, prefill_lanes: int
) -> int:
    """Of all lanes on a card of so many SMs: activations, attention workspaces, logits in float32 where two
    lanes sample; and the table of rotations that they share."""
    token = activation_bytes(config, itemsize)
    prefill = prefill_lanes * (chunk + ROWS_MAX) * token
    decode = decode_lanes * ROWS_MAX * token
    logits = 2 * 2 * 4 * ROWS_MAX * config.vocabulary
    rotations = 4 * config.max_context_tokens * config.head_dim
    heads = Heads(config.heads, config.kv_heads, config.head_dim, config.rms_epsilon)
    workspace = WORKSPACE_BYTES + attention_workspace_bytes(heads, units, ROWS_MAX)
    return prefill + decode + logits + rotations + (decode_lanes + prefill_lanes) * workspace


def parked_bytes(config: ModelConfig, itemsize: int, chunk: int) -> int:
    """Hidden states of a running and a parked chunk, with room for another of each."""
    return 4 * chunk * config.hidden * itemsize


def card_needs(
    name: str, config: ModelConfig, dtype: CardType, total: int, units: int, splits: int
) -> tuple[MemoryNeeds, int]:
    """What a model takes beside its KV pool on `total` bytes and so many SMs with so many splits, and its
    largest chunk."""
    itemsize, prefill_lanes = dtype.itemsize, splits + 1  # One on the whole device.
    chunk = chunk_tokens(config, itemsize, total, prefill_lanes)
    needs = MemoryNeeds(
        model=name,
        weights=weight_bytes(config, itemsize),
        page=page_bytes(config, itemsize),
        lanes=lanes_bytes(config, itemsize, chunk, units, splits, prefill_lanes),
        parked=parked_bytes(config, itemsize, chunk),
    )
    return needs, chunk


_WIDE: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("query_width", "hidden"),
    "k_proj": ("kv_width", "hidden"),
    "v_proj": ("kv_width", "hidden"),
    "o_proj": ("hidden", "query_width"),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "embed_tokens": ("vocabulary", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
}


def shape_of(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The shape of a tensor of a checkpoint, by its Hugging Face name; of a norm, the hidden size."""
    sizes = _WIDE.get(name.split(".")[-2], ("hidden",))
    shape = tuple(int(getattr(config, size)) for size in sizes)
    return shape[:1] if name.endswith(".bias") else shape


# --- weights ---


class CardWeights(SafetensorsWeights):
    """Tensors that are read straight to the card and in its type."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(folder)
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str) -> Tensor:
        """Contiguous, on the device."""
        return self._read(name, self._tensor_there)

    def _tensor_there(self, file: Any, name: str) -> Tensor:
        tensor: Tensor = file.get_tensor(name)
        return tensor.to(self._device).to(self._dtype).contiguous()


class RandomCardWeights:
    """Tensors of real shapes and made-up values, made on the card: for measurements without a checkpoint."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.path = Path("random")
        self.config = config
        self._device, self._dtype, self._seed = device, dtype, seed
        self._places = {name: place for place, name in enumerate(tensor_names(config))}

    def stored_bytes(self, name: str) -> int:
        return self._dtype.itemsize * math.prod(shape_of(name, self.config))

    def tensor(self, name: str) -> Tensor:
        """Small enough that activations stay finite through any number of layers; norms are 1."""
        shape = shape_of(name, self.config)
        if "norm" in name:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seed * 1_000_003 + self._places[name])
        values = torch.randn(shape, dtype=self._dtype, device=self._device, generator=generator)
        return values.mul_(shape[-1] ** -0.5)


def open_card_weights(source: Source, device: str, dtype: CardType) -> Weights:
    """Of a folder straight to the card; of a GGUF file by way of the host, without its blocks."""
    if isinstance(source, FolderSource):
        return CardWeights(source.path, torch.device(device), dtype)
    return open_weights(source)


# --- the runner ---


def attention_for(
    decoder: LlamaDecoder, dtype: CardType, device: torch.device, device_units: int
) -> AttentionKind:
    """For all layers of a decoder."""
    windows = distinct_windows([decoder.window(index) for index in range(decoder.config.layers)])
    return attention_of(AttentionShape(decoder.heads, windows, dtype, device, device_units))


def load_cuda_runner(
    weights: Weights,
    on: str,
    dtype: CardType,
    *,
    device_units: int,
    pages: int,
    chunk_tokens_max: int,
    rows_max: int = ROWS_MAX,
    progress: Progress | None = None,
) -> CudaModelRunner:
    """Load every tensor, make the KV pool, and wait until both are there. ModelError as `load_decoder`."""
    device = torch.device(on)
    decoder = load_decoder(weights, CudaOperators(kernels_for(device), dtype, device), progress)
    if progress is not None and device.type == "cuda":
        progress(1, 1, "attention, compiled where that has not been done")
    attention = attention_for(decoder, dtype, device, device_units)
    runner = CudaModelRunner(decoder, attention, pages, chunk_tokens_max, rows_max)
    if device.type == "cuda":
        # The lanes' streams do not wait for the default stream, which all this was enqueued on.
        torch.cuda.synchronize(device)
    return runner
