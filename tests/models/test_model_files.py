"""Checkpoints load from every form they come in, and what is wrong with one is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import HALVES, config_json, write_folder, write_gguf
from model_driver import Driver, RandomWeights, tiny_config, tiny_runner
from muxk.models.cpu_ops import CpuOperators
from muxk.models.errors import ModelError
from muxk.models.gguf_file import read_gguf
from muxk.models.gguf_weights import GgufWeights
from muxk.models.llama import load_decoder, tensor_names
from muxk.models.load import bytes_per_page, load_runner, open_weights
from muxk.models.resolve import EMBEDDED_ALIAS, GgufSource, resolve_model
from muxk.models.weights import SafetensorsWeights

PROMPT = [5, 17, 3, 99, 20]


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
    assert read.config.rms_epsilon == pytest.approx(weights.config.rms_epsilon)
    assert dataclasses.replace(read.config, rms_epsilon=weights.config.rms_epsilon) == weights.config
    for name, tensor in weights.tensors.items():
        assert torch.equal(read.tensor(name), tensor), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *HALVES])
def test_quantised_tensors_are_read_as_the_gguf_package_reads_them(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", RandomWeights(tiny_config(hidden=256)), kind)
    read = GgufWeights(read_gguf(path))
    name = "model.layers.1.mlp.gate_proj.weight"
    (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_gate.weight"]
    assert tensor.tensor_type.name == kind
    assert np.array_equal(read.tensor(name).numpy(), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


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


def test_a_shard_that_lacks_what_the_index_says_is_named(tmp_path: Path, tiny: RandomWeights) -> None:
    write_folder(tmp_path, tiny, shards=3)
    (tmp_path / "model-1.safetensors").write_bytes((tmp_path / "model-2.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"model-1\.safetensors: tensor '.*' is missing, but the index says"):
        load_runner(str(tmp_path), 4)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(tmp_path: Path, tiny: RandomWeights, index: str) -> None:
    write_folder(tmp_path, tiny, shards=3)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json.*damaged"):
        load_runner(str(tmp_path), 4)


def test_shards_without_an_index_that_are_not_all_there_are_counted(
    tmp_path: Path, tiny: RandomWeights
) -> None:
    write_folder(tmp_path, tiny, shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-0.safetensors").rename(tmp_path / "model-00001-of-00003.safetensors")
    (tmp_path / "model-1.safetensors").unlink()
    (tmp_path / "model-2.safetensors").rename(tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"is missing; of its 3 files these are missing: 2"):
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


def test_a_folder_without_configuration_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: not found"):
        SafetensorsWeights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(tiny_config())))
    with pytest.raises(ModelError, match=r"holds no \.safetensors"):
        SafetensorsWeights(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        SafetensorsWeights(tmp_path)


def test_the_size_of_a_page_is_that_of_the_pool(tiny: RandomWeights) -> None:
    runner = tiny_runner(tiny, pages=10)
    assert bytes_per_page(tiny) == runner.bytes_per_page
    pool = sum(layer.keys.nbytes + layer.values.nbytes for layer in runner.kv)
    assert pool == 10 * runner.bytes_per_page
