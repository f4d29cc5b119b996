"""Distributions with policies, in a folder as an installer leaves them: modules and a dist-info."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "python_policy"


def install(
    folder: Path,
    distribution: str,
    entries: Mapping[str, str],
    modules: Mapping[str, str],
    version: str = "1.0",
) -> Path:
    """Install modules and register `entries`, policy name -> `module:attribute`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = "".join(f"{name} = {target}\n" for name, target in entries.items())
    (info / "entry_points.txt").write_text(f"[muxk.policies]\n{lines}", encoding="utf-8")
    return folder


def install_example(folder: Path) -> Path:
    """The package of examples/python_policy, from what its own pyproject.toml says."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))
    about = project["project"]
    install(folder, about["name"], about["entry-points"]["muxk.policies"], {}, about["version"])
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", folder)
    return folder
