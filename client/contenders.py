"""Who is compared: `POLICY[:KEY=VALUE,...][@DEVICE]`, as `chunked:budget=512@sim:a100,tp=4`.

Settings end at `@`, values hold no comma (`--set` takes those that do), and what follows `@sim:` is a device.
The path of a file that exists is taken whole, whatever characters it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muxk.client.errors import ClientError

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
        policy, listed = named, ""  # a path with a colon, or a mistake that opening it tells
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


def distinct(contenders: list[Contender]) -> None:
    """Raises ContenderError when one is there twice."""
    seen: dict[tuple[str, tuple[tuple[str, str], ...], str], str] = {}
    for one in contenders:
        key = (one.policy, one.settings, one.device)
        if key in seen:
            raise ContenderError(f"{one.label!r} is the same as {seen[key]!r}: compare it once")
        seen[key] = one.label
