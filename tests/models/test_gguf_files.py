"""GGUF files in several parts are one model, and damaged ones are never more than a ModelError."""

from __future__ import annotations

import contextlib
from pathlib import Path

import gguf
import pytest
import torch
from checkpoint_files import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from model_driver import RandomWeights, tiny_config
from muxk.models.errors import ModelError
from muxk.models.gguf_file import read_gguf
from muxk.models.gguf_weights import GgufWeights
from muxk.models.llama import tensor_names
from muxk.models.resolve import GgufSource, resolve_model
from muxk.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def weights() -> RandomWeights:
    return RandomWeights(tiny_config(layers=1))


@pytest.fixture
def parts(tmp_path: Path, weights: RandomWeights) -> list[Path]:
    write_gguf(tmp_path / "tiny.gguf", weights, part_tensors=5)
    return sorted(tmp_path.glob("*.gguf"))


def test_a_model_in_parts_is_read_through_its_first(parts: list[Path], weights: RandomWeights) -> None:
    assert len(parts) == 3
    read = GgufWeights(read_gguf(parts[0]))
    for name, tensor in weights.tensors.items():
        assert torch.equal(read.tensor(name), tensor), name


def test_a_part_that_is_not_the_first_or_is_missing_is_named(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: is a part.*give its first part, .*00001-of"):
        read_gguf(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003\.gguf: cannot be read"):
        read_gguf(parts[0])
    with pytest.raises(ModelError, match=r"x\.gguf: is one of 3 parts, which are named like model-00001-of"):
        read_gguf(parts[0].rename(tmp_path / "x.gguf"))


def test_a_hub_model_in_parts_is_its_first_part(parts: list[Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    for part in parts:
        part.rename(snapshot / part.name)
    assert resolve_model("some/model", tmp_path) == GgufSource("some/model", snapshot / parts[0].name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, weights: RandomWeights) -> Path:
    """A file whose metadata has every kind of value that a model's has."""
    path = tmp_path_factory.mktemp("whole") / "x.gguf"
    write_gguf(path, weights)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("y.gguf"), "llama")
    for name, field in reader.fields.items():
        if field.types and not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*(chr(index) for index in range(33, 132)), "ab", "abc"])
    writer.add_token_types([1] * 99 + [3, 4])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(99)
    writer.add_chat_template("{{ messages }}")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("y.gguf")


@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_file_with_changed_bytes_is_a_model_or_a_model_error(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    changed = bytearray(whole.read_bytes())
    header = changed.index(b"output.weight") + 200
    for place, value in changes:
        changed[place % header] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.unlink(missing_ok=True)  # What reads the last one keeps its bytes.
    path.write_bytes(changed)
    for read in (read_all, load_tokenizer):
        with contextlib.suppress(ModelError):
            read(GgufSource("changed", path))


def read_all(source: GgufSource) -> None:
    weights = GgufWeights(read_gguf(source.path))
    if weights.config.layers < 10:
        for name in tensor_names(weights.config):
            weights.tensor(name)
