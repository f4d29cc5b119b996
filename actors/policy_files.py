"""Policies from files and by name, with the text that they were compiled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
from muxk.kernel.policy import Policy, PolicyText
from muxk.policies.engine import CompiledPolicy, compile_policy, shipped_policies
from muxk.policies.loader import MAX_CHARACTERS
from muxk.policies.registry import installed_policies, open_policy
from muxk.policies.shipped_files import shipped_text

BYTES_MAX = 4 * MAX_CHARACTERS
"""More is not read: the compiler refuses a text of so many characters."""


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    """A policy, and where it comes from."""

    policy: Policy
    text: PolicyText
    """Without a source when it is not written in the language."""
    path: Path | None
    """Of its file; None for a policy by name."""


def open_with_text(name_or_path: str, settings: Mapping[str, str]) -> OpenedPolicy:
    """Open a policy by name, or a file by path.

    Raises:
        PolicyError: there is none, it is wrong, or it can not be loaded.
    """
    names = [one.name for one in installed_policies()]
    path = Path(name_or_path)
    if name_or_path in names or not path.is_file():
        policy = open_policy(name_or_path, settings)
        filename, source = name_or_path, ""
        if isinstance(policy, CompiledPolicy) and name_or_path in shipped_policies():
            filename = f"{name_or_path}.yaml"
            source = shipped_text(name_or_path)
        return OpenedPolicy(policy, PolicyText(source, filename, settings), None)
    try:
        source = _read(path)
    except (OSError, UnicodeDecodeError):
        return OpenedPolicy(open_policy(name_or_path, settings), PolicyText("", str(path), settings), path)
    policy = compile_policy(source, str(path), settings)
    return OpenedPolicy(policy, PolicyText(source, str(path), settings), path)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(BYTES_MAX).decode("utf-8")


async def read_policy_text(path: Path) -> str:
    """The text of a policy's file, read on another thread.

    Raises:
        OSError, UnicodeDecodeError: it can not be read.
    """
    async with await anyio.open_file(path, "rb") as file:
        return (await file.read(BYTES_MAX)).decode("utf-8")
