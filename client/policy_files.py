"""Where a policy's text comes from: the name of a shipped one, a file, or the text itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from muxk.client import protocol
from muxk.client.errors import PolicyNotFound

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def swap_command(policy: str | Path, settings: Mapping[str, str] | None) -> protocol.SwapPolicy:
    """The command for a policy: its text, or the name of one that only the server may know.

    Raises PolicyNotFound, with the shipped names.
    """
    if isinstance(policy, str) and _may_be_installed_there(policy):
        return protocol.SwapPolicy("", settings=dict(settings or {}), plugin=policy)
    source, filename = read_policy(policy)
    return protocol.SwapPolicy(source, filename, dict(settings or {}))


def shadow_command(policy: str | Path | None, settings: Mapping[str, str] | None) -> protocol.SetShadow:
    """The same for a policy that is to be asked too; None ends that."""
    if policy is None:
        return protocol.SetShadow(None)
    swap = swap_command(policy, settings)
    return protocol.SetShadow(swap.source, swap.filename, swap.settings, plugin=swap.plugin)


def _may_be_installed_there(policy: str) -> bool:
    """A name that neither ships nor is a file here; the server has policies of its own in Python."""
    from muxk.policies.shipped_files import shipped_policies

    if not _NAME.fullmatch(policy) or policy.endswith((".yaml", ".yml")):
        return False
    return policy not in shipped_policies() and not Path(policy).exists()


def read_policy(policy: str | Path) -> tuple[str, str]:
    """Text and file name of a policy: a shipped name such as `muxwise`, a path, or text of several lines.

    Raises PolicyNotFound, with the shipped names.
    """
    if isinstance(policy, str) and "\n" in policy:
        return policy, "<text>"
    from muxk.policies.shipped_files import shipped_policies, shipped_text

    shipped = shipped_policies()
    if str(policy) in shipped:
        return shipped_text(str(policy)), f"{policy}.yaml"
    try:
        return _read(Path(policy)), str(policy)
    except FileNotFoundError:
        names = ", ".join(shipped)
        raise PolicyNotFound(f"no policy file {str(policy)!r}; shipped policies are: {names}") from None
    except OSError as error:
        raise PolicyNotFound(f"{policy} can not be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PolicyNotFound(f"{policy} is not UTF-8 text: byte {error.start}") from error
    except ValueError as error:
        raise PolicyNotFound(f"{str(policy)!r} is no path: {error}") from error


def _read(path: Path) -> str:
    """The text of a file, unless no server would take a frame with it. Raises OSError, UnicodeDecodeError."""
    from muxk.policies.loader import MAX_CHARACTERS

    bytes_max = 4 * MAX_CHARACTERS
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    text = "" if len(data) > bytes_max else data.decode("utf-8")
    if len(data) > bytes_max or len(text) > MAX_CHARACTERS:
        raise PolicyNotFound(f"{path} is larger than {MAX_CHARACTERS:,} characters, the bound of a policy")
    return text
