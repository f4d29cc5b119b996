"""The base install has no torch, and a wheel carries every package; CI also compares a wheel with git."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from fnmatch import fnmatch

from architecture_rules import FOLDERS, ROOT, product_sources

NOT_IN_THE_BASE_INSTALL = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub")
NEEDS_TORCH = (
    *("kernel/devices/cpu", "kernel/devices/cuda", "models/", "profiles/"),
    *("actors/system", "actors/cpu_cluster", "actors/cpu_identity", "actors/cuda_opening"),
)

IMPORT_WITHOUT = """
import importlib, sys, traceback

blocked, modules = (argument.split(",") for argument in sys.argv[1:])

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not in the base install", name=name)

sys.meta_path.insert(0, Blocker())
failures = []
for module in modules:
    try:
        importlib.import_module(module)
    except Exception:
        failures.append(f"{module}: {traceback.format_exc(limit=-3)}")
sys.exit("\\n".join(failures) or None)
"""


def import_without(blocked: tuple[str, ...], modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Imports `modules` in a fresh interpreter where `blocked` cannot be found; stderr names each failure."""
    command = [sys.executable, "-c", IMPORT_WITHOUT, ",".join(blocked), ",".join(modules)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def base_modules() -> list[str]:
    paths = [source.path for source in product_sources() if not source.path.startswith(NEEDS_TORCH)]
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    return [f"muxk.{name}" for name in names if not name.endswith("__main__")]


def test_the_base_modules_import_without_torch() -> None:
    modules = base_modules()
    assert "muxk.kernel.actor" in modules
    result = import_without(NOT_IN_THE_BASE_INSTALL, modules)
    assert result.returncode == 0, result.stderr


def test_the_blocker_stops_an_import_of_a_blocked_package() -> None:
    result = import_without(("msgspec",), ["muxk.kernel.actor"])
    assert result.returncode == 1
    assert "msgspec is not in the base install" in result.stderr


def test_every_folder_with_code_is_a_package_of_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = sorted({source.path.rpartition("/")[0] for source in product_sources()})
    assert setuptools["package-dir"] == {f"muxk.{folder.replace('/', '.')}": folder for folder in folders}
    assert sorted(setuptools["packages"]) == sorted(setuptools["package-dir"])
    assert all((ROOT / folder / "py.typed").is_file() for folder in FOLDERS)


def test_every_data_file_matches_a_pattern_that_goes_into_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    patterns = ("*.py", "*.pyc", "*.md", "*.so", *setuptools["package-data"]["*"])
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert not [str(path) for path in files if not any(fnmatch(path.name, pattern) for pattern in patterns)]
