"""Checkpoints on disk for tests: folders as on the hub, and GGUF files as llama.cpp's converter writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_driver import RandomWeights
from muxk.models.config import ModelConfig
from muxk.models.gguf_weights import gguf_tensor_name
from muxk.models.rope_scaling import FrequencyFactors, LinearScaling, RopeScaling, YarnScaling
from numpy.typing import NDArray
from safetensors.torch import save_file


def config_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": config.architecture,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocabulary,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_context_tokens,
    }


def write_folder(folder: Path, weights: RandomWeights, shards: int = 1) -> Path:
    (folder / "config.json").write_text(json.dumps(config_json(weights.config)))
    names = list(weights.tensors)
    if shards == 1:
        save_file(weights.tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for shard in set(weight_map.values()):
        part = {name: weights.tensors[name] for name in names if weight_map[name] == shard}
        save_file(part, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def permuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """`permute` of convert_hf_to_gguf.py."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def add_rope_scaling(writer: gguf.GGUFWriter, scaling: RopeScaling | None) -> None:
    match scaling:
        case FrequencyFactors(divisors):
            writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
        case LinearScaling(factor):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling(factor, original):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(factor)
            writer.add_rope_scaling_orig_ctx_len(original)
        case _:
            assert scaling is None


HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the half-precision numbers of a block lie."""


def random_blocks(
    kind: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int = 0
) -> NDArray[np.uint8]:
    """Every pattern of codes and scales, with the half-precision numbers finite: uint8[rows, bytes]."""
    generator = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for place in HALVES[kind.name]:
        raw[:, place : place + 2] = generator.normal(size=(len(raw), 1)).astype("<f2").view(np.uint8)
    return raw.reshape(rows, -1)


def quantised(data: NDArray[np.float32], kind: str) -> tuple[NDArray[np.uint8], gguf.GGMLQuantizationType]:
    """A tensor in a ggml type where that has its shape; random blocks where the package cannot quantise."""
    type_ = gguf.GGMLQuantizationType[kind]
    if data.ndim != 2 or data.shape[1] % gguf.GGML_QUANT_SIZES[type_][0]:
        type_ = gguf.GGMLQuantizationType.F32
    try:
        return gguf.quants.quantize(data, type_), type_
    except NotImplementedError:
        return random_blocks(type_, *data.shape), type_


def write_gguf(path: Path, weights: RandomWeights, kind: str = "F32", part_tensors: int = 0) -> Path:
    """As llama.cpp's converter does: queries and keys of llama permuted to pairs.

    With `part_tensors` in parts of so many, of which the first is returned.
    """
    config = weights.config
    writer = gguf.GGUFWriter(path, config.architecture, split_max_tensors=part_tensors)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_epsilon)
    writer.add_vocab_size(config.vocabulary)
    add_rope_scaling(writer, config.rope_scaling)
    for name, tensor in weights.tensors.items():
        data = tensor.numpy()
        if config.permuted_in_gguf and (".q_proj." in name or ".k_proj." in name):
            data = permuted(data, data.shape[0] // config.head_dim)
        raw, type_ = quantised(data, kind)
        writer.add_tensor(gguf_tensor_name(name), raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part_tensors else path
