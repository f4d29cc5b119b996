"""The error of everything that can be wrong with a model's files."""

from __future__ import annotations

from pathlib import Path


class ModelError(Exception):
    """A model cannot be found, read or run; the text names the place and what would be right."""


def damaged(path: Path, what: str) -> ModelError:
    """The error for a file whose content contradicts itself or ends early."""
    return ModelError(f"{path}: {what}; the file is damaged or its download was cut short")


def wrong_shape(path: Path, tensor: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> ModelError:
    """The error for a tensor whose shape contradicts the model's configuration."""
    return ModelError(f"{path}: tensor {tensor!r} has shape {list(found)}, wanted {list(wanted)}")
