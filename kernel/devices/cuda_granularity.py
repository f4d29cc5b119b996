"""Which partitions a CUDA device can have: whether there are green contexts, and in what steps of SMs."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from muxk.kernel.devices.cuda_driver import CallMissing, Card, CudaError, Driver, SmResource, version_text

GREEN_VERSION = 12050
"""The CUDA whose drivers can make streams on green contexts."""
MENU_SIXTEENTHS = (2, 3, 4, 6, 8, 10, 12)
"""Shares of the device that decode has in the splits of the default menu, of sixteen."""
NO_GREEN_CODES = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_RESOURCE_TYPE")
"""How a driver that has the calls says that a device has no green contexts."""


class Granularity(msgspec.Struct, frozen=True):
    """What partitions of a device are made of, in SMs."""

    minimum: int
    alignment: int
    source: str
    """`driver`, or `capability` where the driver does not say: the table of cuda.h 13.0."""


class Support(NamedTuple):
    """What a device has for green contexts."""

    whole: SmResource | None
    granularity: Granularity | None
    """Both None where the driver does not tell them."""
    why_not: str | None
    """Why no two partitions can be made; None when they can."""


def green_support(driver: Driver, card: Card) -> Support:
    """Ask the driver, and make nothing. Raises CudaError for failures that mean something else."""
    version = driver.version()
    if version < GREEN_VERSION:
        needed = f"green contexts need {version_text(GREEN_VERSION)} or later"
        return Support(None, None, f"the driver implements CUDA {version_text(version)}, and {needed}")
    try:
        whole = driver.sm_resource(card.index)
    except CudaError as error:
        return Support(None, None, no_green_contexts(error))
    granularity = _granularity(whole, card.capability)
    return Support(whole, granularity, _too_small(whole.units, granularity))


def no_green_contexts(error: CudaError) -> str:
    """The reason, if a failed call means that the device has no green contexts; else raises the error."""
    if isinstance(error, CallMissing) or error.code in NO_GREEN_CODES:
        return str(error)
    raise error


def default_menu(units: int, granularity: Granularity) -> tuple[int, ...]:
    """SMs of decode in up to seven splits, ascending; empty when the device is too small for one."""
    step, least = granularity.alignment, granularity.minimum
    counts = sorted({units * share // 16 // step * step for share in MENU_SIXTEENTHS})
    return tuple(count for count in counts if least <= count <= units - least)


def refusal(units: int, whole: int, granularity: Granularity) -> str | None:
    """Why decode can not have so many SMs of a device, and what would be right; None when it can."""
    step, least = granularity.alignment, granularity.minimum
    most = (whole - least) // step * step
    if units > whole:
        return f"there are only {whole}: at most {most}"
    if units < least:
        return f"the least is {least}"
    if whole - units < least:
        return f"that leaves {whole - units} for prefill, which needs {least}: at most {most}"
    if units % step:
        near = sorted({max(least, units // step * step), min(most, (units // step + 1) * step)})
        return f"they come in multiples of {step}: {' or '.join(map(str, near))}"
    return None


def _granularity(whole: SmResource, capability: tuple[int, int]) -> Granularity:
    if whole.minimum and whole.alignment:
        return Granularity(whole.minimum, whole.alignment, "driver")
    major, _ = capability
    minimum, alignment = (8, 8) if major >= 9 else (4, 2) if major == 8 else (2, 2)
    return Granularity(minimum, alignment, "capability")


def _too_small(units: int, granularity: Granularity) -> str | None:
    step, least = granularity.alignment, granularity.minimum
    if units - least >= -(-least // step) * step:
        return None
    return f"{units} SMs are too few for two partitions of {least} or more in steps of {step}"
