"""Who is compared: `POLICY[:KEY=VALUE,...][@DEVICE]`, as `chunked:budget=512@sim:a100,tp=4`.

Settings end at `@`, values hold no comma (`--set` takes those that do), and what follows `@sim:` is a device.
The path of a file that exists is taken whole, whatever characters it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muxk.client.errors import ClientError
from muxk.policies.engine import shipped_policies

DEVICE = "@sim:"


class ContenderError(ClientError):
    """The text is none."""


@dataclass(frozen=True)
class Contender:
    """A policy with settings on a device."""

    label: str
    """As it was written."""
    policy: str
    settings: tuple[tuple[str, str], ...]
    device: str


def parse_contender(text: str, device: str, settings: Mapping[str, str]) -> Contender:
    """`device` and `settings` are for those that name none; its own settings go first.

    Raises ContenderError.
    """
    if Path(text).is_file():
        return Contender(text, text, tuple(settings.items()), device)
    head, at, tail = text.rpartition(DEVICE)
    named, own_device = (head, DEVICE[1:] + tail) if at else (text, device)
    policy, colon, listed = named.partition(":")
    if "=" not in listed and colon:
        _refuse_unfinished(text, policy)
        policy, listed = named, ""  # a path with a colon, or a mistake that opening it tells
    _refuse_unfinished(text, policy.rpartition("@")[0])
    if not policy:
        raise ContenderError(f"{text!r}: a policy comes first, as in chunked:budget=512@sim:h200")
    own = dict(settings)
    for part in listed.split(",") if listed else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ContenderError(
                f"{text!r}: {part!r} is no setting; write KEY=VALUE, several with a comma between, as in "
                "chunked:budget=512@sim:h200"
            )
        own[key.strip()] = value.strip()
    return Contender(text, policy, tuple(own.items()), own_device)


def _refuse_unfinished(text: str, named: str) -> None:
    """Raises ContenderError for what begins with a policy that ships and goes on in no way that is known."""
    if named in shipped_policies():
        raise ContenderError(
            f"{text!r}: after the name of a policy comes :KEY=VALUE, @sim:GPU, both or nothing, as in "
            "chunked:budget=512@sim:h200"
        )


def distinct(contenders: list[Contender]) -> None:
    """Raises ContenderError when one is there twice."""
    seen: dict[tuple[str, tuple[tuple[str, str], ...], str], str] = {}
    for one in contenders:
        key = (one.policy, one.settings, one.device)
        if key in seen:
            raise ContenderError(f"{one.label!r} is the same as {seen[key]!r}: compare it once")
        seen[key] = one.label
