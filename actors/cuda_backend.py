"""From `--device cuda` and `--model` to a model that serves on a card; and whether there is one that can."""

from __future__ import annotations

from dataclasses import dataclass

from muxk.actors.backends import Backend, Progress, StartupError
from muxk.kernel.devices.cuda_facts import Problem, find_problem

CARD_DTYPES = ("auto", "bf16", "fp16")
"""Of `models/cuda_load.py`, which imports torch."""


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


def cuda_usable(index: int = 0) -> Usable | WhyNot:
    """Look for what the cuda device needs on a card, cheapest first, without importing torch."""
    found = find_problem(index)
    if isinstance(found, Problem):
        return WhyNot(found.reason, found.remedy)
    return Usable(found.index, found.name)


@dataclass(frozen=True)
class Choice:
    """What `--device auto` means here."""

    device: str
    reason: str
    """One line for the user."""


def choose_card(dtype: str) -> Choice:
    """The first card if the cuda device can use it and knows the dtype, else the cores, with the reason."""
    if dtype not in CARD_DTYPES:
        return Choice("cpu", f"device cpu, and not cuda: --dtype {dtype} is of the cpu device only")
    found = cuda_usable()
    if isinstance(found, WhyNot):
        return Choice("cpu", f"device cpu, and not cuda: {found.reason}")
    return Choice(f"cuda:{found.index}", f"device cuda:{found.index}: {found.name}")


def open_cuda_backend(
    device: str, model: str, dtype: str, kv_tokens: int | None, progress: Progress
) -> Backend:
    """Load a model onto the card that `cuda` or `cuda:N` names. Raises StartupError."""
    if "," in device:
        raise StartupError(
            f"device {device!r}: one server runs on one card; use cuda or cuda:N, and no comma"
        )
    _, colon, number = device.partition(":")
    if colon and not number.isdecimal():
        raise StartupError(f"device {device!r}: {number!r} is not the number of a card; use cuda or cuda:0")
    found = cuda_usable(int(number) if colon else 0)
    if isinstance(found, WhyNot):
        raise StartupError(
            f"device {device!r} can not be used: {found.reason}; {found.remedy}. muxk doctor shows more"
        )
    from muxk.actors.cuda_opening import open_card

    return open_card(found.index, model, dtype, kv_tokens, progress)
