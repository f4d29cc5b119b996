"""Where a policy's text comes from: a file, or the name of one that is shipped."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from muxk.client.errors import PolicyNotFound


def shipped_policies() -> list[str]:
    """Names of the policies in the package, sorted."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("muxk.policies").iterdir()
        if entry.name.endswith(".yaml")
    )


def read_policy(policy: str | Path) -> tuple[str, str]:
    """Text and file name of a policy: a path, a shipped name such as `muxwise`, or (several lines) the text.

    Raises PolicyNotFound, with the shipped names.
    """
    if isinstance(policy, str) and "\n" in policy:
        return policy, "<text>"
    path = Path(policy)
    if path.is_file():
        return _read(path), str(path)
    shipped = files("muxk.policies") / f"{path.name.removesuffix('.yaml')}.yaml"
    if shipped.is_file() and (str(policy) == path.name or path.parent == Path("policies")):
        return shipped.read_text(encoding="utf-8"), f"policies/{shipped.name}"
    names = ", ".join(shipped_policies())
    raise PolicyNotFound(f"no policy {str(policy)!r}: it is not a file, and the shipped ones are: {names}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyNotFound(f"can not read policy {path}: {error}") from error
