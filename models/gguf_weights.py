"""Weights of a GGUF file, dequantised to float32, under the names and layout of Hugging Face."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import torch
from muxk.models.config import ModelConfig, config_from_gguf
from muxk.models.errors import ModelError, damaged
from muxk.models.gguf_blocks import QuantisedMatrix, quantised_matrix
from muxk.models.gguf_file import GgufFile, GgufTensor
from muxk.models.rope_scaling import FrequencyFactors
from numpy.typing import NDArray

GLOBAL_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ROPE_DIVISORS = "rope_freqs.weight"
LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufWeights:
    """The tensors of a GGUF file. Reads one tensor at a time, so that little is in memory at once."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.path = file.path
        paths = {entry.path for entry in file.tensors.values()}
        self._data = {path: np.memmap(path, dtype=np.uint8, mode="r") for path in paths}
        config = config_from_gguf(file.metadata, file.tensors, str(file.path))
        self.config: ModelConfig = self._with_frequency_factors(config)

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file, for progress."""
        return _stored_bytes(self._entry(name))

    def tensor(self, name: str) -> torch.Tensor:
        """float32, in Hugging Face's shape and layout. ModelError when missing or cut short."""
        entry = self._entry(name)
        values = torch.from_numpy(_dequantise(self._raw(entry), entry))
        order = self._order(name, entry)
        return values if order is None else values[torch.from_numpy(order)]

    def quantised(self, name: str) -> QuantisedMatrix | None:
        """A matrix as the file holds it, with the rows of `tensor`; None where it is not made of blocks."""
        entry = self._entry(name)
        if len(entry.shape) != 2:
            return None
        raw = self._raw(entry)
        matrix = quantised_matrix(raw, entry.shape[0], gguf.GGMLQuantizationType(entry.type_number))
        order = self._order(name, entry)
        return matrix if matrix is None or order is None else matrix.rows(order)

    def _with_frequency_factors(self, config: ModelConfig) -> ModelConfig:
        """Llama 3.1 and later: the file holds what its scaling makes of each frequency."""
        entry = self._file.tensors.get(ROPE_DIVISORS)
        if entry is None:
            return config
        divisors = _dequantise(self._raw(entry), entry)
        if config.rope_scaling is not None:
            raise ModelError(
                f"{self.path}: rope scaling by metadata and by {ROPE_DIVISORS!r} is not supported"
            )
        if divisors.shape != (config.head_dim // 2,) or not (divisors > 0).all():
            raise damaged(self.path, f"{ROPE_DIVISORS!r} is not {config.head_dim // 2} positive numbers")
        return replace(config, rope_scaling=FrequencyFactors(tuple(divisors.tolist())))

    def _raw(self, entry: GgufTensor) -> NDArray[np.uint8]:
        end = entry.start + _stored_bytes(entry)
        data = self._data[entry.path]
        if end > len(data):
            needs = f"tensor {entry.name!r} needs bytes {entry.start} to {end}, the file has {len(data)}"
            raise damaged(entry.path, needs)
        return data[entry.start : end]

    def _entry(self, name: str) -> GgufTensor:
        gguf_name = gguf_tensor_name(name)
        entry = self._file.tensors.get(gguf_name)
        if entry is None:
            raise ModelError(f"{self.path}: tensor {gguf_name!r} is missing (it holds {name!r})")
        return entry

    def _order(self, name: str, entry: GgufTensor) -> NDArray[np.int64] | None:
        """The rows that undo the interleaving of query and key heads by converters of some architectures."""
        rows, dims = entry.shape[0], self.config.head_dim
        permuted = self.config.permuted_in_gguf and re.search(r"\.[qk]_proj\.", name)
        if not permuted or rows % dims:  # A wrong number of rows is the reader's to report.
            return None
        return np.arange(rows).reshape(-1, dims // 2, 2).swapaxes(1, 2).reshape(-1)


def gguf_tensor_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert found is not None, name
    return f"blk.{found[1]}.{LAYER_NAMES[found[2]]}.{found[3]}"


def _quantisation(entry: GgufTensor) -> Any:
    try:
        return gguf.GGMLQuantizationType(entry.type_number)
    except ValueError:
        raise ModelError(
            f"{entry.path}: tensor {entry.name!r} has unknown ggml type {entry.type_number}"
        ) from None


def _stored_bytes(entry: GgufTensor) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[_quantisation(entry)]
    elements = math.prod(entry.shape)
    if elements == 0 or not entry.shape or entry.shape[-1] % block:
        raise damaged(entry.path, f"tensor {entry.name!r} has shape {list(entry.shape)}")
    return elements // block * int(block_bytes)


def _dequantise(raw: NDArray[np.uint8], entry: GgufTensor) -> NDArray[np.float32]:
    kind = gguf.GGMLQuantizationType(entry.type_number)
    plain = {gguf.GGMLQuantizationType.F32: "<f4", gguf.GGMLQuantizationType.F16: "<f2"}.get(kind)
    if plain is not None:
        return raw.view(plain).reshape(entry.shape).astype(np.float32)
    # Blocks of a whole tensor at once: `gguf.dequantize` takes 16 rows at a time, which is 3 times as slow.
    dequantise = getattr(getattr(gguf.quants, kind.name, None), "dequantize_blocks", None)
    if dequantise is None:
        raise ModelError(f"{entry.path}: tensor {entry.name!r} is of ggml type {kind.name}, not supported")
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    return np.ascontiguousarray(dequantise(blocks), dtype=np.float32).reshape(entry.shape)
