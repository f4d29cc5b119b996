"""Where a policy's text comes from: the name of a shipped one, a file, or the text itself."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from muxk.client.errors import PolicyNotFound


def read_policy(policy: str | Path) -> tuple[str, str]:
    """Text and file name of a policy: a shipped name such as `muxwise`, a path, or text of several lines.

    Raises PolicyNotFound, with the shipped names.
    """
    if isinstance(policy, str) and "\n" in policy:
        return policy, "<text>"
    from muxk.policies.engine import shipped_policies

    shipped = shipped_policies()
    if str(policy) in shipped:
        file = resources.files("muxk.policies").joinpath(f"{policy}.yaml")
        return file.read_text(encoding="utf-8"), f"{policy}.yaml"
    try:
        return Path(policy).read_text(encoding="utf-8"), str(policy)
    except FileNotFoundError:
        names = ", ".join(shipped)
        raise PolicyNotFound(f"no policy file {str(policy)!r}; shipped policies are: {names}") from None
    except (OSError, ValueError) as error:
        raise PolicyNotFound(f"can not read policy {policy}: {error}") from error
