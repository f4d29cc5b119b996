"""From `--device cuda` and `--model` to a model that serves on a card; and whether there is one that can."""

from __future__ import annotations

from dataclasses import dataclass

from muxk.actors.backends import Backend, Progress, StartupError


@dataclass(frozen=True)
class Usable:
    """A card that the cuda device runs on."""

    index: int
    name: str


@dataclass(frozen=True)
class WhyNot:
    """The first thing that keeps the cuda device from running here."""

    reason: str
    """One line, without a stop at its end."""
    remedy: str
    """What the user can do about it, one line."""


def cuda_usable() -> Usable | WhyNot:
    """Look for what the cuda device needs, cheapest first, without loading a model."""
    return WhyNot("the cuda device is not built yet", "use --device cpu")


def open_cuda_backend(
    device: str, model: str, dtype: str, kv_tokens: int | None, progress: Progress
) -> Backend:
    """Load a model onto the card that `cuda` or `cuda:N` names. Raises StartupError."""
    found = cuda_usable()
    if isinstance(found, WhyNot):
        raise StartupError(f"device {device!r} can not be used: {found.reason}; {found.remedy}")
    _, colon, number = device.partition(":")
    if colon and not number.isdecimal():
        raise StartupError(f"device {device!r}: {number!r} is not the number of a card; use cuda or cuda:0")
    from muxk.actors.cuda_opening import open_card

    return open_card(int(number) if colon else found.index, model, dtype, kv_tokens, progress)
