"""Weights of a checkpoint, one tensor at a time, under the names and layout of Hugging Face."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from muxk.models.config import ModelConfig, config_from_folder
from muxk.models.errors import ModelError, damaged
from muxk.models.gguf_blocks import QuantisedMatrix
from safetensors import SafetensorError, safe_open

Progress = Callable[[int, int, str], None]
"""Called with (done bytes, total bytes, name of the tensor just read)."""
Value = TypeVar("Value")


class Weights(Protocol):
    """Where a decoder takes its tensors from."""

    path: Path
    config: ModelConfig

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file, for progress."""

    def tensor(self, name: str) -> torch.Tensor:
        """float32, contiguous, in Hugging Face's shape and layout. ModelError names what is wrong."""


@runtime_checkable
class QuantisedWeights(Weights, Protocol):
    """Weights that can also be had as the file holds them."""

    def quantised(self, name: str) -> QuantisedMatrix | None:
        """A matrix in blocks of integers, shaped like `tensor`; None where the file holds it otherwise."""


class SafetensorsWeights:
    """The tensors of a folder with `config.json` and one or several `.safetensors` files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = config_from_folder(folder)
        self._places = _places(folder)

    def stored_bytes(self, name: str) -> int:
        return self._read(name, _stored_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        return self._read(name, _tensor)

    def _read(self, name: str, read: Callable[[Any, str], Value]) -> Value:
        path = self._places.get(name)
        if path is None:
            raise ModelError(
                f"{self.path}: tensor {name!r} is missing{_shards_missing(self._places.values())}"
            )
        with _open_file(path) as file:
            try:
                return read(file, name)
            except SafetensorError:
                raise ModelError(
                    f"{path}: tensor {name!r} is missing, but the index says it is here"
                ) from None


def _stored_bytes(file: Any, name: str) -> int:  # The library's own types are not complete.
    part = file.get_slice(name)
    elements: int = math.prod(part.get_shape())
    return elements * _BYTES.get(part.get_dtype(), 2)


def _tensor(file: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    return tensor.to(torch.float32).contiguous()


def _shards_missing(files: Iterable[Path]) -> str:
    """A guess at the reason, from names like `model-00001-of-00003.safetensors`."""
    numbered = {re.search(r"-(\d+)-of-(\d+)\.safetensors$", file.name) for file in files}
    found = {int(match[1]) for match in numbered if match is not None}
    total = max((int(match[2]) for match in numbered if match is not None), default=0)
    missing = [str(number) for number in range(1, min(total, 1000) + 1) if number not in found]
    return f"; of its {total} files these are missing: {', '.join(missing)}" if missing else ""


_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
}


def _places(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _places_of_index(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: holds no .safetensors file")
    places: dict[str, Path] = {}
    for file in files:
        with _open_file(file) as opened:
            places.update(dict.fromkeys(opened.keys(), file))
    return places


def _places_of_index(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / file for name, file in names.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise damaged(index, "it has no usable 'weight_map'") from None


def _open_file(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (FileNotFoundError, IsADirectoryError):
        raise ModelError(f"{file}: not found, but the checkpoint names it") from None
    except (SafetensorError, OSError) as error:
        raise damaged(file, f"cannot be read as safetensors ({error})") from None
